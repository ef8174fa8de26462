"""What the policy "selective" recomputes: the inside of attention, and gathered values."""

from __future__ import annotations

import torch
from torch import fx

from msc.ir.structure import output_nodes
from msc.passes.lower_collectives import lower_collectives
from msc.passes.recompute.policies import full, gathered, selective
from tests.passes.graphs import Forward

ATEN = torch.ops.aten

BATCH, HEADS, LENGTH, SIZE = 2, 3, 8, 8  # as many elements in the scores as in q


def attention() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    build = Forward()
    shape = (BATCH * HEADS, LENGTH, SIZE)
    q, k, v = (build.placeholder("value", name, *shape) for name in "qkv")
    bias = build.placeholder("prelude", "bias", LENGTH, LENGTH)
    key = build.placeholder("prelude", "key", dtype=torch.int64)
    q = build.call(ATEN.mul.Tensor, q, 0.5)
    turned = build.call(ATEN.transpose.int, k, 1, 2)
    found = {"scores": build.call(ATEN.bmm.default, q, turned)}
    found["capped"] = build.call(ATEN.tanh.default, found["scores"])
    found["biased"] = build.call(ATEN.add.Tensor, found["capped"], bias)
    found["softmax"] = build.call(ATEN._softmax.default, found["biased"], -1, False)
    found["dropped"] = build.call(
        torch.ops.msc.dropout.default,
        found["softmax"],
        0.1,
        key,
        [None] * 3,
        [BATCH * HEADS, LENGTH, LENGTH],
    )
    out = build.call(ATEN.bmm.default, found["dropped"], v)
    out = build.call(ATEN.relu.default, out)
    return build.done(out), found


def test_attention_runs_again_from_its_scores_to_its_dropout() -> None:
    gm, inside = attention()
    assert selective(gm) == set(inside.values())


def test_a_softmax_over_a_linear_is_no_attention() -> None:
    build = Forward()
    x, w = build.placeholder("value", "x", 4, 8), build.placeholder("parameter", "w", 8, 8)
    y = build.call(ATEN._softmax.default, build.linear(x, w), -1, False)
    assert selective(build.done(y)) == set()


def test_gathered_values_and_what_arranges_them() -> None:
    build = Forward()
    x = build.placeholder("value", "x", 2, 4)
    turned = build.call(ATEN.transpose.int, x, 0, 1)
    whole = build.call(torch.ops.msc.all_gather.default, turned, 1, [2], "tp", 2, "reduce_scatter")
    summed = build.call(torch.ops.msc.all_reduce.default, whole, "sum", "tp", 2)
    gm = build.done(build.call(ATEN.relu.default, whole), summed)
    lower_collectives(gm)
    found = gathered(gm)
    arranged = {node.target for node in found}
    assert torch.ops._c10d_functional.all_gather_into_tensor.default in arranged
    assert ATEN.clone.default in arranged  # before and behind it
    assert not arranged & {
        ATEN.transpose.int,
        ATEN.relu.default,
        torch.ops._c10d_functional.all_reduce.default,
    }
    results = output_nodes(gm)
    assert results[0].args[0] in found
    assert results[1] not in found


def test_full_is_every_call() -> None:
    gm, _ = attention()
    calls = {node for node in gm.graph.nodes if node.op == "call_function"}
    assert full(gm) == calls
