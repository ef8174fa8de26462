"""Products that are added to one stream are added to each other first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import msc
from msc.capture.entry import capture
from msc.compiler import new_unit
from msc.cost import Cluster, CostModel
from msc.ir.mesh import Mesh
from msc.ir.pipeline import Pipeline
from msc.passes.compilation import Compilation, Settings
from msc.passes.merge_branches import MergeBranches
from msc.passes.pipelines import TRAIN
from tests import zoo
from tests.passes.graphs import (
    ATEN,
    LINEAR,
    Forward,
    assert_parity,
    assert_text,
    evaluate,
    random_values,
    text,
)
from tests.passes.rewrites.block_models import BlockConfig, Model, batch
from tests.passes.sharding.placing import ops_of


def branches(order: str = "(x+a)+m", biases: bool = True, behind: str = "") -> fx.GraphModule:
    """A stream and two products of it, added in some order.

    behind: "dropout" or "gate" behind the products; "flat" where the second sum is of `[b * s, d]`.
    """
    build = Forward()
    names = ("a", "m")
    weights = {name: build.parameter(f"{name}.weight", 6, 6) for name in names}
    vectors = {name: build.parameter(f"{name}.bias", 6) for name in names}
    gate = build.parameter("gate", 6)
    x = build.input("x", 4, 2, 6)
    key = build.placeholder("buffer", "key", dtype=torch.int64)
    terms = {"x": build.call(ATEN.sin.default, x)}
    for name in names:
        term = build.linear(build.call(ATEN.cos.default, x), weights[name], name)
        if biases:
            term = build.call(ATEN.add.Tensor, term, vectors[name], path=name)
        if behind == "dropout":
            dropout = torch.ops.msc.dropout.default
            term = build.call(dropout, term, 0.5, key, [None] * 3, [4, 2, 6])
        if behind == "gate":
            term = build.call(ATEN.mul.Tensor, gate, term)
        terms[name] = term

    def add(left: fx.Node, right: fx.Node) -> fx.Node:
        return build.call(ATEN.add.Tensor, left, right, path="sum")

    x, a, m = terms.values()
    if behind == "flat":
        flat = build.call(ATEN.reshape.default, add(x, a), [8, 6])
        y = add(flat, build.call(ATEN.reshape.default, m, [8, 6]))
    elif order == "(x+a)+m":
        y = add(add(x, a), m)
    elif order == "m+(x+a)":
        y = add(m, add(x, a))
    else:
        y = add(x, add(a, m))
    return build.done(build.call(ATEN.sum.default, build.call(ATEN.tanh.default, y)))


def test_products_come_first_and_their_biases_last() -> None:
    gm = branches()
    assert MergeBranches().run(gm, None) == 1
    assert_text(
        gm,
        """
%a_weight: f64[6,6] = parameter "a.weight"
%m_weight: f64[6,6] = parameter "m.weight"
%a_bias: f64[6] = parameter "a.bias"
%m_bias: f64[6] = parameter "m.bias"
%gate: f64[6] = parameter "gate"
%x: f64[4,2,6] = input "x"
%key: i64[] = buffer "key"
%sin_default: f64[4,2,6] = aten.sin(%x)
%cos_default: f64[4,2,6] = aten.cos(%x)
%linear_default: f64[4,2,6] = msc.linear(%cos_default, %a_weight)  # a
%cos_default_1: f64[4,2,6] = aten.cos(%x)
%linear_default_1: f64[4,2,6] = msc.linear(%cos_default_1, %m_weight)  # m
%add: f64[4,2,6] = aten.add.Tensor(%linear_default, %linear_default_1)  # sum
%add_1: f64[6] = aten.add.Tensor(%a_bias, %m_bias)  # sum
%add_2: f64[4,2,6] = aten.add.Tensor(%add, %add_1)  # sum
%add_3: f64[4,2,6] = aten.add.Tensor(%sin_default, %add_2)  # sum
%tanh_default: f64[4,2,6] = aten.tanh(%add_3)
%sum_default: f64[] = aten.sum(%tanh_default)
return (%sum_default,)
""",
    )


BRANCHES = st.builds(
    branches,
    st.sampled_from(["(x+a)+m", "m+(x+a)", "x+(a+m)"]),
    st.booleans(),
    st.sampled_from(["", "dropout", "gate", "flat"]),
)


@given(BRANCHES)
@settings(deadline=None)
def test_numbers_are_kept_and_a_second_run_changes_nothing(gm: fx.GraphModule) -> None:
    values = random_values(gm)
    expected = evaluate(gm, values)
    MergeBranches().run(gm, None)
    gm.graph.lint()
    torch.testing.assert_close(evaluate(gm, values), expected, rtol=1e-12, atol=1e-12)
    after = text(gm)
    assert MergeBranches().run(gm, None) == 0
    assert text(gm) == after


def test_what_is_read_elsewhere_stays_whole() -> None:
    """The sum of stream and one product is a value of its own then."""
    build = Forward()
    x = build.input("x", 4, 6)
    first = build.linear(x, build.parameter("a", 6, 6))
    second = build.linear(x, build.parameter("m", 6, 6))
    between = build.call(ATEN.add.Tensor, x, first)
    gm = build.done(build.call(ATEN.add.Tensor, between, second), between)
    assert MergeBranches().run(gm, None) == 0


def test_a_scaled_sum_is_none() -> None:
    build = Forward()
    x = build.input("x", 4, 6)
    first = build.linear(x, build.parameter("a", 6, 6))
    second = build.linear(x, build.parameter("m", 6, 6))
    between = build.call(ATEN.add.Tensor, x, first, alpha=2)
    gm = build.done(build.call(ATEN.add.Tensor, between, second))
    assert MergeBranches().run(gm, None) == 0


@pytest.mark.parametrize("behind", ["", "gate", "flat"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_every_mesh_computes_the_same(mesh: str, behind: str) -> None:
    assert_parity(branches(behind=behind), mesh, 2 if mesh == "tp=2" else 1)


FAST = CostModel(Cluster("fast", 1e15, 3e12, 8e10, 8, 4e11, 5e10))


def differentiated(
    model: nn.Module, inputs: Any, mesh: str, cost: CostModel, rewrites: Any = ()
) -> Compilation:
    found = capture(model, inputs)
    unit = new_unit(found, Settings(Mesh.parse(mesh), cost=cost, rewrites=tuple(rewrites)))
    Pipeline(TRAIN.passes).run(unit, stop_after="differentiate", skip=())
    return unit


def per_layer(unit: Compilation) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of the block that most layers are, forward and backward."""
    name, _ = unit.structure.counts.most_common(1)[0]  # type: ignore[attr-defined]
    found = unit.variants[0].differentiated[name]
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    assert found.backward is not None
    return ops_of(found.forward, *kinds), ops_of(found.backward, *kinds)


ONE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 0}
TWO = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 0}


def test_a_parallel_block_communicates_half_as_often() -> None:
    model, inputs = zoo.MODELS["llama"].build(), zoo.MODELS["llama"].batch(1)
    assert per_layer(differentiated(model, inputs, "tp=2", CostModel())) == (TWO, TWO)
    parallel = differentiated(model, inputs, "tp=2", CostModel(), [msc.ParallelBlock()])
    assert per_layer(parallel) == (ONE, ONE)


@pytest.mark.parametrize(
    ("cost", "mesh"), [(CostModel(), "dp=2,tp=2"), (FAST, "tp=2")], ids=["no cluster", "cluster"]
)
def test_samples_are_split_between_the_blocks_as_positions_are(cost: CostModel, mesh: str) -> None:
    """With one sample on each rank of dp positions are split over tp, otherwise samples."""
    model, inputs = zoo.MODELS["gpt2"].build(), zoo.MODELS["gpt2"].batch(4)
    assert per_layer(differentiated(model, inputs, mesh, cost, [msc.ParallelBlock()])) == (ONE, ONE)


@pytest.mark.parametrize("name", ["gpt-neox", "gpt-j"])
def test_models_with_parallel_blocks_need_no_rewrite(name: str) -> None:
    model, inputs = zoo.MODELS[name].build(), zoo.MODELS[name].batch(1)
    assert per_layer(differentiated(model, inputs, "tp=2", CostModel())) == (ONE, ONE)


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}, {"scale": "vector"}])
def test_parallel_blocks_in_any_order_of_sums(changes: dict[str, Any]) -> None:
    """`(x + attention) + mlp`, as Cohere and PaLM are written, also behind a dropout or a scale."""
    model = Model(BlockConfig(parallel=True, layers=3, **changes))
    assert per_layer(differentiated(model, batch(1), "tp=2", CostModel())) == (ONE, ONE)


def test_without_tp_the_biases_are_fused_again() -> None:
    model = Model(BlockConfig(parallel=True, layers=3))
    unit = differentiated(model, batch(), "dp=2", CostModel())
    forward = unit.variants[0].differentiated["block1"].forward
    biased = [
        len(node.args) > 2 and node.args[2] is not None
        for node in forward.graph.find_nodes(op="call_function", target=LINEAR)
    ]
    assert biased == [True, True, True, False, True, True]
