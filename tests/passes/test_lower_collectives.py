"""Lowered collectives mean what the ops mean: all ranks run in lock-step equal `simulate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed  # registers torch.ops._c10d_functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import msc.ir.ops
from msc.ir.ops.collectives import simulate
from msc.ir.torch_private import FakeTensorMode
from msc.passes.lower_collectives import lower_collectives

_c10d = torch.ops._c10d_functional
_STARTS = (
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_reduce.default,
)


def graph_of(op_name: str, inputs: list[Tensor], **attrs: Any) -> fx.GraphModule:
    """One collective on one rank, on fake values with the strides of the first rank's input."""
    target = getattr(torch.ops.msc, op_name).default
    graph = fx.Graph()
    mode = FakeTensorMode()
    nodes = {"x": graph.placeholder("x")}
    nodes["x"].meta["val"] = mode.from_tensor(inputs[0])
    if "index" in attrs:
        nodes["index"] = graph.placeholder("index")
        nodes["index"].meta["val"] = mode.from_tensor(torch.tensor(0))
        attrs["index"] = nodes["index"]
    node = graph.call_function(target, (nodes["x"],), attrs)
    values = fx.map_arg(dict(node.kwargs), lambda operand: operand.meta["val"])
    node.meta.update(
        val=target(nodes["x"].meta["val"], **values),
        module_path="layers.0.mlp",
        source="model.py:3 in forward",
        phase="forward",
        placement={"dp": "kept as it is"},
    )
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph)


def lock_step(gm: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    """Run all ranks node by node; check every value against its fake one."""
    ranks: list[dict[fx.Node, Any]] = [{} for _ in inputs]
    for node in gm.graph.nodes:
        if node.op == "output":
            return [rank[node.args[0][0]] for rank in ranks]
        if node.op == "placeholder":
            values: list[Any] = list(inputs)
            if node.name == "index":
                values = [torch.tensor(index) for index in range(len(inputs))]
        elif node.target in _STARTS:
            values = communicate(node, [rank[node.args[0]] for rank in ranks])
        elif node.target is _c10d.wait_tensor.default:
            values = [rank[node.args[0]] for rank in ranks]
        else:
            values = [
                node.target(*fx.map_arg(node.args, rank.get), **node.kwargs) for rank in ranks
            ]
        for rank, value in zip(ranks, values, strict=True):
            rank[node] = value
            if isinstance(value, Tensor):
                fake = node.meta["val"]
                assert (value.shape, value.dtype) == (fake.shape, fake.dtype), node
                assert value.is_contiguous() == fake.is_contiguous(), node
    raise AssertionError("a graph has an output")


def communicate(node: fx.Node, inputs: list[Tensor]) -> list[Tensor]:
    size = len(inputs)
    assert node.args[-1] == "tp"
    assert all(x.is_contiguous() for x in inputs)
    if node.target is _c10d.all_reduce.default:
        return simulate("all_reduce", inputs, op=node.args[1])
    assert node.args[-2] == size
    if node.target is _c10d.reduce_scatter_tensor.default:
        assert node.args[1] == "sum"
        return [part.clone() for part in sum(inputs[1:], inputs[0]).chunk(size)]
    return [torch.cat(inputs) for _ in inputs]


@st.composite
def cases(draw: st.DrawFn, sharded_input: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Every rank's input, contiguous or not, and the attributes of a collective along a dim."""
    size = draw(st.integers(1, 4))
    runs = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if draw(st.booleans()):
        runs = [runs[0]] * len(runs)
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(runs) * (1 if sharded_input else size)
    order = draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    stored = [0] * len(shape)
    for place, axis in enumerate(order):
        stored[axis] = shape[place]
    inputs = [
        torch.randn(stored, dtype=torch.float64, generator=generator).permute(order)
        for _ in range(size)
    ]
    return inputs, {"dim": dim, "runs": runs, "axis": "tp", "size": size}


def check(op_name: str, inputs: list[Tensor], attrs: dict[str, Any], tolerance: float = 0) -> None:
    gm = graph_of(op_name, inputs, **attrs)
    assert lower_collectives(gm) == 1
    gm.graph.lint()
    expected = simulate(op_name, inputs, **attrs)
    found = lock_step(gm, inputs)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert got.is_contiguous()
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert node.meta["module_path"] == "layers.0.mlp"
            assert node.meta["source"] == "model.py:3 in forward"
            assert node.meta["phase"] == "forward"
            assert "val" in node.meta
    assert lower_collectives(gm) == 0


@settings(deadline=None, max_examples=150)
@given(cases(sharded_input=True))
def test_any_all_gather(case: tuple[list[Tensor], dict[str, Any]]) -> None:
    inputs, attrs = case
    check("all_gather", inputs, {**attrs, "grad": "reduce_scatter"})


@settings(deadline=None, max_examples=150)
@given(cases(sharded_input=False))
def test_any_reduce_scatter(case: tuple[list[Tensor], dict[str, Any]]) -> None:
    inputs, attrs = case
    check("reduce_scatter", inputs, attrs, tolerance=1e-14)


@pytest.mark.parametrize("op", ["sum", "max", "logsumexp"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("size", [1, 3])
def test_all_reduce(op: str, shape: tuple[int, ...], size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(size)]
    attrs = {"op": op, "axis": "tp", "size": size}
    check("all_reduce", inputs, attrs, tolerance=1e-14)


def test_logsumexp_of_infinite_values() -> None:
    endless = float("inf")
    inputs = [
        torch.tensor([-endless, -endless, endless, 1e300, 2.0], dtype=torch.float64),
        torch.tensor([-endless, 1.0, 0.0, 1e300, float("nan")], dtype=torch.float64),
    ]
    check_nan(inputs, {"op": "logsumexp", "axis": "tp", "size": 2})


def check_nan(inputs: list[Tensor], attrs: dict[str, Any]) -> None:
    gm = graph_of("all_reduce", inputs, **attrs)
    lower_collectives(gm)
    for got, want in zip(
        lock_step(gm, inputs), simulate("all_reduce", inputs, **attrs), strict=True
    ):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_grad_reduce_becomes_its_input() -> None:
    gm = graph_of("grad_reduce", [torch.randn(2, 3)], axis="tp", size=2)
    assert lower_collectives(gm) == 1
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "output"]


def test_grad_reduce_has_the_strides_of_its_input() -> None:
    """Otherwise a view that was traced behind it would not fit its input."""
    gm = graph_of("grad_reduce", [torch.randn(2, 3, 4).permute(2, 0, 1)], axis="tp", size=2)
    x, reduced, _ = gm.graph.nodes
    assert reduced.meta["val"].stride() == x.meta["val"].stride() == (1, 12, 4)


def test_local_ops_stay() -> None:
    attrs = {"dim": 0, "runs": [2], "axis": "tp", "size": 2, "index": None}
    gm = graph_of("shard", [torch.randn(4, 3)] * 2, **attrs, grad="pad")
    assert lower_collectives(gm) == 0
    assert any(node.target is torch.ops.msc.shard.default for node in gm.graph.nodes)


def targets(gm: fx.GraphModule) -> list[str]:
    calls = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    return [str(getattr(target, "__name__", target)) for target in calls]


def gather(shape: tuple[int, ...], dim: int, runs: list[int]) -> fx.GraphModule:
    attrs = {"dim": dim, "runs": runs, "axis": "tp", "size": 2, "grad": "reduce_scatter"}
    gm = graph_of("all_gather", [torch.zeros(shape)] * 2, **attrs)
    lower_collectives(gm)
    return gm


def test_cheapest_forms_of_a_gather() -> None:
    start = ["all_gather_into_tensor.default", "wait_tensor.default"]
    assert targets(gather((4, 3), 0, [4])) == start
    assert targets(gather((1, 4, 3), 1, [4])) == [*start, "view.default"]
    one_copy = ["view.default", "permute.default", "clone.default", "view.default"]
    assert targets(gather((2, 4, 3), 1, [4])) == [*start, *one_copy]
    assert targets(gather((4, 3), 0, [2, 2])) == [*start, *one_copy]
    copies = [name for name in targets(gather((2, 4, 3), 1, [3, 1])) if "cat" in name]
    assert copies == ["cat.default"]


def test_the_last_node_takes_over_the_meta() -> None:
    gm = gather((2, 4, 3), 1, [4])
    last = next(iter(reversed(gm.graph.nodes))).args[0][0]
    assert last.meta["placement"] == {"dp": "kept as it is"}
    assert "placement" not in last.args[0].meta


def test_ops_are_registered() -> None:
    assert torch.ops.msc.all_gather.default in msc.ir.ops.KERNELS
