"""The step of a rank: schedule, transfers, one reduction per gradient, optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from msc.ir import actions
from msc.ir.communication import used_channels
from msc.ir.optimizer import AdamW
from msc.passes.compilation import Compilation
from msc.passes.schedules.rules import SCHEDULES
from tests.passes.graphs import (
    ATEN,
    Forward,
    assert_parity,
    assert_text,
    compilation,
    layers,
    named_values,
    step,
    through,
)

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


def built(gm: fx.GraphModule, mesh: str, micro_batches: int = 1, **settings: object) -> Compilation:
    unit = compilation(gm, mesh, micro_batches, **settings)  # type: ignore[arg-type]
    return through("build-rank-graphs", unit)


def reductions(gm: fx.GraphModule) -> list[str]:
    """`group: elements` of every all-reduce, in order."""
    return [
        f"{node.args[2]}: {node.meta['val'].numel()}"
        for node in gm.graph.nodes
        if node.target is ALL_REDUCE
    ]


def order(gm: fx.GraphModule) -> list[str]:
    """The chunk calls and transfers of a step, in order."""
    named = {actions.send: "send", actions.recv: "recv"}
    return [
        str(node.target) if node.op == "call_module" else named[node.target]
        for node in gm.graph.nodes
        if node.op == "call_module" or node.target in named
    ]


def test_the_first_stage() -> None:
    assert_text(
        built(layers(2, tied=True), "pp=2").rank_graphs[0],
        """
%head_weight: f64[8,8] = parameter "head.weight"
%layers_0_up_weight: f64[16,8] = parameter "layers.0.up.weight"
%layers_0_down_weight: f64[8,16] = parameter "layers.0.down.weight"
%x: f64[4,8] = input "x"
%recv = recv(1, 'pp:1>0 gradients', [(4, 8)], [f64])
%chunk0_forward: ((f64[4,8]), none, (f64[4,8], f64[4,16], f64[4,8])) = call chunk0_forward(\
%head_weight, %layers_0_up_weight, %layers_0_down_weight, %x)
%getitem: (f64[4,8]) = %chunk0_forward[0]
%getitem_1: f64[4,8] = %getitem[0]
%send = send([%getitem_1], 1, 'pp:0>1')
%getitem_2: (f64[4,8], f64[4,16], f64[4,8]) = %chunk0_forward[2]
%getitem_3: f64[4,8] = %getitem_2[0]
%getitem_4: f64[4,16] = %getitem_2[1]
%getitem_5: f64[4,8] = %getitem_2[2]
%wait: (f64[4,8]) = wait(%recv)
%getitem_6: f64[4,8] = %wait[0]
%wait_1 = wait(%send)
%chunk0_backward: ((), (f64[8,8], f64[16,8], f64[8,16])) = call chunk0_backward(%head_weight,\
 %layers_0_up_weight, %layers_0_down_weight, %getitem_3, %getitem_4, %getitem_5, %getitem_6)
%getitem_7: (f64[8,8], f64[16,8], f64[8,16]) = %chunk0_backward[1]
%accumulate: (f64[8,8], f64[16,8], f64[8,16]) = accumulate(None, %getitem_7)
%getitem_8: f64[8,8] = %accumulate[0]
%getitem_9: f64[16,8] = %accumulate[1]
%getitem_10: f64[8,16] = %accumulate[2]
%flatten: f64[64] = flatten([%getitem_8])
%all_reduce_default: f64[64] = _c10d_functional.all_reduce(%flatten, 'sum', 'pp[0,1]')
%wait_tensor_default: f64[64] = _c10d_functional.wait_tensor(%all_reduce_default)
%unflatten: (f64[8,8]) = unflatten(%wait_tensor_default, [(8, 8)])
%getitem_11: f64[8,8] = %unflatten[0]
%full_default: f64[] = aten.full([], 0.0, dtype=f64)
%all_reduce_default_1: f64[] = _c10d_functional.all_reduce(%full_default, 'sum', 'pp')
%wait_tensor_default_1: f64[] = _c10d_functional.wait_tensor(%all_reduce_default_1)
return {'loss': %wait_tensor_default_1, 'gradients': (%getitem_11, %getitem_9, %getitem_10)}
""",
    )


def test_the_last_stage() -> None:
    assert_text(
        built(layers(2, tied=True), "pp=2").rank_graphs[1],
        """
%layers_1_up_weight: f64[16,8] = parameter "layers.1.up.weight"
%layers_1_down_weight: f64[8,16] = parameter "layers.1.down.weight"
%head_weight: f64[8,8] = parameter "head.weight"
%recv = recv(0, 'pp:0>1', [(4, 8)], [f64])
%wait: (f64[4,8]) = wait(%recv)
%getitem: f64[4,8] = %wait[0]
%chunk1_forward: ((), f64[], (f64[4,16], f64[4,8], f64[4,8])) = call chunk1_forward(\
%layers_1_up_weight, %layers_1_down_weight, %head_weight, %getitem)
%getitem_1: f64[] = %chunk1_forward[1]
%accumulate: (f64[]) = accumulate(None, (%getitem_1,))
%getitem_2: (f64[4,16], f64[4,8], f64[4,8]) = %chunk1_forward[2]
%getitem_3: f64[4,16] = %getitem_2[0]
%getitem_4: f64[4,8] = %getitem_2[1]
%getitem_5: f64[4,8] = %getitem_2[2]
%chunk1_backward: ((f64[4,8]), (f64[16,8], f64[8,16], f64[8,8])) = call chunk1_backward(\
%layers_1_up_weight, %layers_1_down_weight, %head_weight, %getitem_3, %getitem_4, %getitem_5)
%getitem_6: (f64[4,8]) = %chunk1_backward[0]
%getitem_7: f64[4,8] = %getitem_6[0]
%send = send([%getitem_7], 0, 'pp:1>0 gradients')
%getitem_8: (f64[16,8], f64[8,16], f64[8,8]) = %chunk1_backward[1]
%accumulate_1: (f64[16,8], f64[8,16], f64[8,8]) = accumulate(None, %getitem_8)
%wait_1 = wait(%send)
%getitem_9: f64[16,8] = %accumulate_1[0]
%getitem_10: f64[8,16] = %accumulate_1[1]
%getitem_11: f64[8,8] = %accumulate_1[2]
%flatten: f64[64] = flatten([%getitem_11])
%all_reduce_default: f64[64] = _c10d_functional.all_reduce(%flatten, 'sum', 'pp[0,1]')
%wait_tensor_default: f64[64] = _c10d_functional.wait_tensor(%all_reduce_default)
%unflatten: (f64[8,8]) = unflatten(%wait_tensor_default, [(8, 8)])
%getitem_12: f64[8,8] = %unflatten[0]
%getitem_13: f64[] = %accumulate[0]
%all_reduce_default_1: f64[] = _c10d_functional.all_reduce(%getitem_13, 'sum', 'pp')
%wait_tensor_default_1: f64[] = _c10d_functional.wait_tensor(%all_reduce_default_1)
return {'loss': %wait_tensor_default_1, 'gradients': (%getitem_9, %getitem_10, %getitem_12)}
""",
    )


def test_tied_weights_are_reduced_once_over_their_stages() -> None:
    """First over dp with the others, then over the stages that hold the weight."""
    for gm in built(layers(4, tied=True), "pp=4,dp=2", 2).rank_graphs:
        groups = [line.split(":")[0] for line in reductions(gm)]
        holds = any(n.meta.get("name") == "head.weight" for n in gm.graph.nodes)
        assert groups.count("pp[0,3]") == holds
    assert_parity(layers(4, tied=True), "pp=4,dp=2", 2)


def test_a_gradient_is_reduced_once_per_step() -> None:
    for count in (1, 2):
        (gm,) = built(layers(2), "dp=2", count, batch_dims={"x": 0}).rank_graphs
        elements = 8 * 8 + 4 * 8 * 16
        assert reductions(gm) == [f"dp: {elements}", "dp: 1"]


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 1500, 2048, 2**30])
def test_buckets_hold_no_more_than_they_may(bucket_bytes: int) -> None:
    unit = built(layers(3), "dp=2", bucket_bytes=bucket_bytes)
    sizes = [8 * int(line.split()[1]) for line in reductions(unit.rank_graphs[0])[:-1]]
    assert sum(sizes) == 8 * (8 * 8 + 6 * 8 * 16)
    # a gradient of its own may be larger than a bucket: 1024 bytes is the largest there is
    assert all(size <= max(bucket_bytes, 1024) for size in sizes)
    if bucket_bytes == 2048:
        assert max(sizes) == 2048
    assert_parity(layers(3), "dp=2", bucket_bytes=bucket_bytes)


def test_a_bucket_has_one_dtype() -> None:
    build = Forward()
    x = build.input("x", 4, 8)
    dtypes = [torch.float64, torch.float32, torch.float64]
    for i, dtype in enumerate(dtypes):
        w = build.placeholder("parameter", f"w{i}", 8, dtype=dtype, requires_grad=True)
        x = build.call(ATEN.mul.Tensor, x, w)
    (gm,) = built(build.done(build.call(ATEN.sum.default, x)), "dp=2").rank_graphs
    assert reductions(gm) == ["dp: 8", "dp: 8", "dp: 8", "dp: 1"]
    buckets = [n for n in gm.graph.nodes if n.target is actions.flatten]
    assert [node.meta["val"].dtype for node in buckets] == dtypes


def test_stages_follow_their_schedule() -> None:
    orders = [order(gm) for gm in built(layers(2), "pp=2", 2).rank_graphs]
    assert orders == [
        # a receive is posted one step ahead
        [
            *["chunk0_forward", "send", "recv"] * 2,
            *["chunk0_backward"] * 2,
        ],
        [
            *["recv", "chunk1_forward", "recv", "chunk1_backward", "send"],
            *["chunk1_forward", "chunk1_backward", "send"],
        ],
    ]
    gpipe = [order(gm) for gm in built(layers(2), "pp=2", 2, schedule="gpipe").rank_graphs]
    assert gpipe == [
        orders[0],
        [*["recv"] * 2, *["chunk1_forward"] * 2, *["chunk1_backward", "send"] * 2],
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_schedules_keep_the_numbers(schedule: str, micro_batches: int) -> None:
    assert_parity(layers(6, tied=True), "pp=3", micro_batches, schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "mesh", "micro_batches"),
    [("interleaved", "pp=2", 5), ("zb-v", "pp=4", 9), ("zb-h1", "pp=4", 6), ("auto", "pp=3", 7)],
)
def test_sends_that_wait_for_their_receives(schedule: str, mesh: str, micro_batches: int) -> None:
    """As on a network without buffers, whichever rank is ahead."""
    gm = layers(8, tied=True, samples=micro_batches)
    unit = assert_parity(gm, mesh, micro_batches, schedule=schedule)
    values = named_values(gm)
    losses, _ = step(unit, values)
    for pick in (min, max):
        found, _ = step(unit, values, rendezvous=True, pick=pick)
        assert all(map(torch.equal, found, losses))


def test_neighbours_that_send_two_kinds_use_two_channels() -> None:
    """With two stages the last one sends activations to the first as well as gradients."""
    unit = built(layers(4), "pp=2", 2, schedule="interleaved")
    found = {channel for gm in unit.rank_graphs for channel, _ in used_channels(gm)}
    assert found == {"pp:0>1", "pp:1>0", "pp:0>1 gradients", "pp:1>0 gradients"}


def test_what_stays_on_a_stage_is_not_sent() -> None:
    for schedule in ("interleaved", "zb-v"):
        (gm,) = built(layers(4), "", 2, schedule=schedule).rank_graphs
        assert not any(node.target in (actions.send, actions.recv) for node in gm.graph.nodes)
    last = built(layers(4), "pp=2", 2, schedule="zb-v").rank_graphs[1]
    sent = [n for n in last.graph.nodes if n.target is actions.send]
    assert len(sent) == 2 * 2  # of each micro-batch, the last chunk's input and a gradient


def test_a_weight_of_two_chunks_is_summed_on_its_rank() -> None:
    """The tied head is in the first and in the last chunk, which a V puts on one stage."""
    unit = assert_parity(layers(4, tied=True, samples=6), "pp=2", 3, schedule="zb-v")
    assert unit.stages_of["head.weight"] == [0]
    assert not any("pp[" in line for gm in unit.rank_graphs for line in reductions(gm))


def test_every_chunk_reduces_early() -> None:
    """Buckets hold gradients of one chunk, and leave when its last backward has made them."""
    unit = assert_parity(layers(4, samples=4), "pp=2,dp=2", 2, schedule="interleaved")
    first = unit.rank_graphs[0]
    nodes = list(first.graph.nodes)
    starts = [i for i, n in enumerate(nodes) if n.target is ALL_REDUCE and n.args[2] == "dp"]
    calls = [i for i, n in enumerate(nodes) if "backward" in str(n.target)]
    assert len(starts) == 2
    assert starts[0] < calls[-1]


def test_every_send_is_waited_for() -> None:
    for gm in built(layers(3), "pp=3", 4).rank_graphs:
        sends = [node for node in gm.graph.nodes if node.target is actions.send]
        assert sends
        for node in sends:
            assert [user.target for user in node.users] == [actions.wait]


def test_inputs_are_those_that_the_stage_reads() -> None:
    first, last = built(layers(2), "pp=2", optimizer=AdamW()).rank_graphs
    for gm, name in ((first, "layers.0"), (last, "layers.1")):
        found = {(n.meta["kind"], n.meta["name"]) for n in gm.graph.nodes if n.op == "placeholder"}
        assert ("parameter", f"{name}.up.weight") in found
        assert ("optimizer", f"first_moment.{name}.up.weight") in found
        assert ("optimizer", f"second_moment.{name}.up.weight") in found
        assert (("input", "x") in found) == (gm is first)
        assert ("step", "") in found
    assert first.meta["gradients"] == ["layers.0.up.weight", "layers.0.down.weight"]


def test_the_optimizer_sees_reduced_gradients() -> None:
    (gm,) = built(layers(2), "dp=2", optimizer=AdamW(lr=0.5, weight_decay=0.0)).rank_graphs
    (node,) = [n for n in gm.graph.nodes if n.target is actions.adam]
    parameters, gradients, moments, step, lr, *rest = node.args
    assert [n.meta["name"] for n in parameters] == gm.meta["gradients"]
    result = gm.graph.output_node().args[0]
    assert isinstance(result, dict)
    assert tuple(gradients) == result["gradients"]
    assert [n.args[0].target for n in gradients] == [actions.unflatten] * len(gradients)
    assert (step.meta["kind"], lr, rest) == ("step", 0.5, [(0.9, 0.999), 1e-8, 0.0, True])
    assert [len(moment) for moment in moments] == [len(gradients)] * 2
