"""Collectives: one node forward and one backward, adjoints that are right over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from msc.ir.ops import KERNELS, arguments
from msc.ir.ops.collectives import COMMUNICATING, simulate
from msc.ir.placement import Shard, shard_of, unshard
from msc.ir.torch_private import FakeTensorMode, joint_graph

_msc = torch.ops.msc

SHARDED, WHOLE = (2, 6, 3), (2, 12, 3)
DIM: dict[str, Any] = {"dim": 1, "runs": [4, 2], "axis": "tp", "size": 2}
AXIS: dict[str, Any] = {"axis": "tp", "size": 2}
INDEX = {"index": "index"}

# op, attributes, shape of x, and the gradient's ops
CASES: list[tuple[str, dict[str, Any], tuple[int, ...], list[str]]] = [
    ("all_gather", {**DIM, "grad": "reduce_scatter"}, SHARDED, ["reduce_scatter"]),
    ("all_gather", {**DIM, "grad": "shard", **INDEX}, SHARDED, ["shard"]),
    ("reduce_scatter", DIM, WHOLE, ["all_gather"]),
    ("all_reduce", {"op": "sum", **AXIS, "grad": "identity"}, WHOLE, []),
    ("all_reduce", {"op": "sum", **AXIS, "grad": "all_reduce"}, WHOLE, ["all_reduce"]),
    ("all_reduce", {"op": "logsumexp", **AXIS, "grad": "identity"}, WHOLE, ["logsumexp_grad"]),
    (
        "all_reduce",
        {"op": "logsumexp", **AXIS, "grad": "all_reduce"},
        WHOLE,
        ["all_reduce", "logsumexp_grad"],
    ),
    ("grad_reduce", AXIS, WHOLE, ["all_reduce"]),
    ("shard", {**DIM, "grad": "all_gather", **INDEX}, WHOLE, ["all_gather"]),
    ("shard", {**DIM, "grad": "pad", **INDEX}, WHOLE, ["shard_pad"]),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")


def traced(case: tuple[str, dict[str, Any], tuple[int, ...], list[str]]) -> fx.GraphModule:
    """The joint graph of `op(x * 2)`; inputs x and index."""
    op_name, attrs, shape, _ = case
    graph = fx.Graph()
    x, index = graph.placeholder("x"), graph.placeholder("index")
    attrs = {name: index if value == "index" else value for name, value in attrs.items()}
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    call = graph.call_function(getattr(_msc, op_name).default, (scaled,), attrs)
    graph.output((call,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode():
        operands = [
            torch.empty(shape, dtype=torch.float64, requires_grad=True),
            torch.empty((), dtype=torch.int64),
        ]
        return joint_graph(gm, operands)


def msc_nodes(gm: fx.GraphModule) -> list[Any]:
    return [node for node in gm.graph.nodes if str(node.target).startswith("msc.")]


@every_case
def test_one_node_forward_and_the_stated_backward(
    case: tuple[str, dict[str, Any], tuple[int, ...], list[str]],
) -> None:
    gm = traced(case)
    op_name, attrs, shape, backward = case
    nodes = msc_nodes(gm)
    assert [str(node.target).split(".")[1] for node in nodes] == [op_name, *backward]
    # AOTAutograd detaches an op's own result when its backward reads it; nothing else is there.
    calls = [
        node
        for node in gm.graph.nodes
        if node.op == "call_function" and node.target is not torch.ops.aten.detach.default
    ]
    assert len(calls) == len(nodes) + 2  # the multiplication by 2, forward and backward
    outputs: Any = gm.graph.output_node().args[0]
    gradient = outputs[1]
    assert gradient.meta["val"].shape == shape
    for node in nodes:
        given_attrs = arguments(node.target, node.args, node.kwargs)
        for name in ("dim", "runs", "axis", "size"):
            if name in given_attrs and name in attrs:
                assert given_attrs[name] == attrs[name]


def test_a_max_has_no_gradient() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, requires_grad=True)
        assert not _msc.all_reduce(x, "max", "tp", 2).requires_grad


def run_joint(
    gm: fx.GraphModule, inputs: list[Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of all ranks: the joint graph in lock-step over `simulate`."""
    size = len(inputs)
    ranks: list[dict[fx.Node, Any]] = [{} for _ in inputs]
    operands = [inputs, [torch.tensor(rank) for rank in range(size)], tangents]
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values: list[Any] = operands.pop(0)
        elif node.op == "output":
            result, gradient = node.args[0][:2]
            return [rank[result] for rank in ranks], [rank[gradient] for rank in ranks]
        elif node.target in COMMUNICATING:
            attrs = arguments(node.target, node.args, node.kwargs)
            x = attrs.pop("x")
            values = simulate(str(node.target).split(".")[1], [rank[x] for rank in ranks], **attrs)
        else:
            run = KERNELS.get(node.target, node.target)
            values = [
                run(*fx.map_arg(node.args, rank.get), **fx.map_arg(node.kwargs, rank.get))
                for rank in ranks
            ]
        for rank, value in zip(ranks, values, strict=True):
            rank[node] = value
    raise AssertionError("a graph has an output")


Fill = Callable[[Tensor], list[Tensor]]


def _replicated(whole: Tensor) -> list[Tensor]:
    return [whole, whole.clone()]


def _partial(whole: Tensor) -> list[Tensor]:
    noise = torch.randn_like(whole)
    return [noise, whole - noise]


def _partial_logsumexp(whole: Tensor) -> list[Tensor]:
    share = torch.rand_like(whole)
    return [whole + share.log(), whole + (1 - share).log()]


def _sharded(whole: Tensor) -> list[Tensor]:
    return [shard_of(whole, Shard(1, (8, 4)), 2, rank) for rank in range(2)]


def _whole(kind: Fill, parts: list[Tensor]) -> Tensor:
    """The value that the ranks' parts stand for; fails where replicas differ."""
    if kind is _sharded:
        return unshard(parts, Shard(1, (8, 4)))
    if kind is _partial:
        return sum(parts[1:], parts[0])
    assert torch.equal(*parts)
    return parts[0]


# What the placements say that each case does: x -> y, and the gradients of both.
STATES: list[tuple[Fill, Fill, Fill, Fill]] = [
    (_sharded, _replicated, _sharded, _partial),
    (_sharded, _replicated, _sharded, _replicated),
    (_partial, _sharded, _replicated, _sharded),
    (_partial, _replicated, _replicated, _replicated),
    (_partial, _replicated, _replicated, _partial),
    (_partial_logsumexp, _replicated, _sharded, _replicated),
    (_partial_logsumexp, _replicated, _sharded, _partial),
    (_replicated, _replicated, _replicated, _partial),
    (_replicated, _sharded, _replicated, _sharded),
    (_replicated, _sharded, _partial, _sharded),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{CASES[n][3]}")
def test_adjoints_by_the_placements(number: int) -> None:
    """On whole values every collective is the identity, so its gradient must be, too.

    y(x * 2): the whole of y is 2 x, the whole of x's gradient is 2 g, for every way in which the
    ranks may hold x and g under the stated placements.
    """
    x_kind, y_kind, gx_kind, gy_kind = STATES[number]
    torch.manual_seed(number)
    logarithmic = x_kind is _partial_logsumexp
    whole, cotangent = torch.randn(2, *WHOLE, dtype=torch.float64)
    inputs = [part / 2 for part in x_kind(2 * whole if logarithmic else whole)]
    results, gradients = run_joint(traced(CASES[number]), inputs, gy_kind(cotangent))
    close: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13}
    if not logarithmic:
        torch.testing.assert_close(_whole(y_kind, results), whole, **close)
        torch.testing.assert_close(_whole(gx_kind, gradients), 2 * cotangent, **close)
        return
    torch.testing.assert_close(_whole(y_kind, results), 2 * whole, **close)
    # Each rank's part of a logsumexp has its own gradient: by autograd on both parts at once.
    leaves = [part.clone().requires_grad_() for part in inputs]
    together = torch.stack([2 * leaf for leaf in leaves]).logsumexp(0)
    torch.testing.assert_close(
        tuple(gradients), torch.autograd.grad(together, leaves, cotangent), **close
    )


def test_logsumexp_gradient_where_everything_is_minus_infinity() -> None:
    endless = torch.full((2,), float("-inf"))
    assert _msc.logsumexp_grad(torch.ones(2), endless, endless).tolist() == [0.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 1))
def test_simulate_agrees_with_placements(size: int, runs: list[int], dim: int) -> None:
    shape = [2, 2]
    shape[dim] = sum(runs) * size
    whole = torch.randn(shape)
    placement = Shard(dim, tuple(run * size for run in runs))
    parts = [shard_of(whole, placement, size, rank) for rank in range(size)]
    attrs = {"dim": dim, "runs": runs}
    for got in simulate("all_gather", parts, **attrs):
        assert torch.equal(got, whole)
    for got, part in zip(simulate("shard", [whole] * size, **attrs), parts, strict=True):
        assert torch.equal(got, part)
    padded = simulate("shard_pad", parts, **attrs)
    assert torch.equal(simulate("all_reduce", padded, op="sum")[0], whole)
    scattered = simulate("reduce_scatter", padded, **attrs)
    assert all(torch.equal(a, b) for a, b in zip(scattered, parts, strict=True))


@pytest.mark.parametrize("op", COMMUNICATING, ids=str)
def test_one_process_alone_cannot_communicate(op: Any) -> None:
    attrs = {
        "all_gather": (0, [2], "tp", 2, "reduce_scatter"),
        "reduce_scatter": (0, [1], "tp", 2),
        "all_reduce": ("sum", "tp", 2),
        "grad_reduce": ("tp", 2),
    }[str(op).split(".")[1]]
    with pytest.raises(RuntimeError, match="'tp' runs only inside an executor"):
        op(torch.zeros(2, 3), *attrs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: _msc.all_gather(x, 0, [1], "tp", 2, "reduce_scatter"), r"runs \[1\]"),
        (lambda x: _msc.all_gather(x, 0, [4], "tp", 2, "shard"), "needs index"),
        (lambda x: _msc.all_gather(x, 0, [4], "tp", 2, "sum"), "grad='sum' is none of"),
        (lambda x: _msc.reduce_scatter(x, 0, [4], "tp", 2), "on each of 2 ranks"),
        (lambda x: _msc.all_reduce(x, "prod", "tp", 2), "op='prod' is none of"),
        (lambda x: _msc.shard(x, 2, [1], "tp", 2, x, "pad"), "dim 2"),
    ],
)
def test_wrong_attributes_are_refused_while_tracing(
    call: Callable[[Tensor], Tensor], message: str
) -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        call(torch.empty(4, 3))


def test_simulate_knows_its_ops() -> None:
    with pytest.raises(ValueError, match="'broadcast' is no collective of MSC"):
        simulate("broadcast", [])
