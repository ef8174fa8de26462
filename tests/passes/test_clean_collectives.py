"""Redundant collectives go, forward and backward, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from msc.ir.ops import arguments
from msc.ir.ops.collectives import simulate
from msc.ir.placement import PARTIAL, REPLICATED, VARYING, Shard, State, sharded
from msc.ir.structure import output_nodes, placeholders
from msc.passes.clean_collectives import CleanCollectives
from msc.passes.pipelines import TRAIN
from tests.passes.graphs import ATEN, Forward, assert_text, text

SIZE = 2
LENGTH = 4
OPS = torch.ops.msc
AXIS = ("tp", SIZE)
Converted = tuple[str, tuple[Any, ...], State]


class Local(Forward):
    """A rank-local graph over one axis, of square values that are sharded along dim 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        self.index = self.placeholder("coordinate", "tp", dtype=torch.int64)
        self.states: dict[fx.Node, State] = {}

    def value(self, name: str, state: State) -> fx.Node:
        shape = [LENGTH, LENGTH]
        if isinstance(state.value, Shard):
            shape[state.value.dim] //= SIZE
        node = self.placeholder("value", name, *shape)
        self.states[node] = state
        return node

    def convert(self, node: fx.Node, want: State) -> fx.Node:
        op, args, state = conversions(self.states[node], self.index)[want]
        new = self.call(getattr(OPS, op).default, node, *args)
        self.states[new] = state
        return new

    def apply(self, target: Any, *nodes: fx.Node) -> fx.Node:
        new = self.call(target, *nodes)
        self.states[new] = self.states[nodes[0]]
        return new


def conversions(have: State, index: fx.Node) -> dict[State, Converted]:
    """State -> the op that leads there from `have`, with its arguments."""
    found: dict[State, Converted] = {}
    runs = [LENGTH // SIZE]
    if isinstance(have.value, Shard):
        where = (have.value.dim, runs, *AXIS)
        found[VARYING] = ("all_gather", (*where, "reduce_scatter"), VARYING)
        found[REPLICATED] = ("all_gather", (*where, "shard", index), REPLICATED)
    if have == PARTIAL:
        found[REPLICATED] = ("all_reduce", ("sum", *AXIS, "identity"), REPLICATED)
        found[VARYING] = ("all_reduce", ("sum", *AXIS, "all_reduce"), VARYING)
    if have == REPLICATED:
        found[VARYING] = ("grad_reduce", AXIS, VARYING)
    if not isinstance(have.value, Shard):
        for dim in (0, 1):
            args: tuple[Any, ...] = (dim, runs, *AXIS)
            if have != PARTIAL:
                args += (index, "all_gather" if have == REPLICATED else "pad")
            op = "reduce_scatter" if have == PARTIAL else "shard"
            found[sharded(dim)] = (op, args, sharded(dim))
    return found


class Collective(torch.autograd.Function):
    """An op on all ranks' values, whose gradient is the one that it states."""

    @staticmethod
    def forward(ctx: Any, name: str, named: dict[str, Any], *values: Tensor) -> Any:
        ctx.name, ctx.named = name, named
        return tuple(simulate(name, list(values), **named))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        stated = ctx.named.get("grad")
        adjoint = {
            ("all_gather", "reduce_scatter"): "reduce_scatter",
            ("all_gather", "shard"): "shard",
            ("reduce_scatter", None): "all_gather",
            ("all_reduce", "all_reduce"): "all_reduce",
            ("all_reduce", "identity"): "grad_reduce",  # whose value is unchanged
            ("grad_reduce", None): "all_reduce",
            ("shard", "all_gather"): "all_gather",
            ("shard", "pad"): "shard_pad",
        }[ctx.name, stated]
        return None, None, *simulate(adjoint, list(grads), **ctx.named)


def run(gm: fx.GraphModule, inputs: dict[str, list[Tensor]]) -> list[list[Tensor]]:
    """Every output, a tensor of each rank."""
    values: dict[fx.Node, list[Any]] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs.get(node.meta["name"], [torch.tensor(r) for r in range(SIZE)])
        elif node.op == "call_function" and "msc." in str(node.target):
            named = arguments(node.target, node.args, node.kwargs)
            operand = values[named.pop("x")]
            named = {k: v for k, v in named.items() if not isinstance(v, fx.Node)}
            name = str(node.target).split(".")[1]
            values[node] = list(Collective.apply(name, named, *operand))  # type: ignore[no-untyped-call]
        elif node.op == "call_function":
            operands = zip(*(values[argument] for argument in node.args), strict=True)
            values[node] = [node.target(*ranks) for ranks in operands]
    return [values[node] for node in output_nodes(gm)]


def of_ranks(state: State, shape: torch.Size, generator: torch.Generator) -> list[Tensor]:
    """A value of each rank, as the placement says: the same on all, or each its own."""

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    same = draw()
    return [same.clone() if state.value == REPLICATED.value else draw() for _ in range(SIZE)]


def results(gm: fx.GraphModule, outs: list[State], ins: dict[str, State]) -> dict[str, Tensor]:
    """Outputs, and gradients of the inputs (their sum over ranks where it is partial)."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for node in placeholders(gm):
        if node.meta["name"] in ins:
            values = of_ranks(ins[node.meta["name"]], node.meta["val"].shape, generator)
            inputs[node.meta["name"]] = [value.requires_grad_() for value in values]
    found = {}
    loss = torch.zeros((), dtype=torch.float64)
    for i, (values, state) in enumerate(zip(run(gm, inputs), outs, strict=True)):
        seeds = of_ranks(State(state.grad, state.value), values[0].shape, generator)
        loss = loss + sum((v * s).sum() for v, s in zip(values, seeds, strict=True))
        total = state.value == PARTIAL.value
        found[f"out{i}"] = torch.stack(values).sum(0) if total else torch.stack(values)
    leaves = [tensor for tensors in inputs.values() for tensor in tensors]
    grads = iter(torch.autograd.grad(loss, leaves, materialize_grads=True))
    for name, tensors in inputs.items():
        ranks = torch.stack([next(grads) for _ in tensors])
        found[f"grad of {name}"] = ranks.sum(0) if ins[name] == VARYING else ranks
    return found


STATES = [REPLICATED, VARYING, PARTIAL, sharded(0), sharded(1)]
Drawn = tuple[Callable[[], fx.GraphModule], list[State], dict[str, State]]


@st.composite
def graphs(draw: st.DrawFn) -> Drawn:
    """Conversions of conversions, with some work and several readers between them."""
    ins = {f"x{i}": draw(st.sampled_from(STATES)) for i in range(draw(st.integers(1, 2)))}
    seed = draw(st.integers(0, 2**32))
    steps = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
    kept = draw(st.lists(st.integers(0, 10), min_size=1, max_size=3))

    def assembled() -> tuple[fx.GraphModule, list[State]]:
        build = Local()
        nodes = [build.value(name, state) for name, state in ins.items()]
        for step in steps:
            node = nodes[-1 - (step + seed) % min(3, len(nodes))]
            wanted = list(conversions(build.states[node], build.index))
            if step % 5:
                nodes.append(build.convert(node, wanted[step % len(wanted)]))
            else:
                nodes.append(build.apply(ATEN.neg.default, node))
        computed = nodes[len(ins) :]
        outputs = [computed[-1], *(computed[k % len(computed)] for k in kept)]
        return build.done(*outputs), [build.states[node] for node in outputs]

    return (lambda: assembled()[0]), assembled()[1], ins


@given(graphs())
@settings(deadline=None, max_examples=200)
def test_values_and_gradients_are_kept(drawn: Drawn) -> None:
    build, outs, ins = drawn
    before, gm = build(), build()
    clean(gm)
    after = text(gm)
    gm.graph.lint()
    assert CleanCollectives().run(gm, None) == 0
    assert text(gm) == after
    expected, found = results(before, outs, ins), results(gm, outs, ins)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def clean(gm: fx.GraphModule) -> int:
    before = text(gm)
    changes = CleanCollectives().run(gm, None)
    assert (text(gm) != before) == (changes > 0)
    return changes


CHAINS = {
    "gathered and sharded": ([sharded(0), VARYING, sharded(0)], []),
    "whole and sharded": ([sharded(0), REPLICATED, sharded(0)], []),
    "sharded and gathered": ([VARYING, sharded(1), VARYING], []),
    "sharded and whole": ([REPLICATED, sharded(1), REPLICATED], []),
    "sharded and gathered for parts": ([REPLICATED, sharded(0), VARYING], ["grad_reduce"]),
    "summed and sharded": ([PARTIAL, REPLICATED, sharded(0)], ["reduce_scatter"]),
    "summed for parts and sharded": ([PARTIAL, VARYING, sharded(1)], ["reduce_scatter"]),
    "scattered and gathered": ([PARTIAL, sharded(0), REPLICATED], ["all_reduce"]),
    "summed, then for parts": ([PARTIAL, REPLICATED, VARYING], ["all_reduce"]),
    "whole, then for parts": ([sharded(0), REPLICATED, VARYING], ["all_gather"]),
    "for parts and sharded": ([REPLICATED, VARYING, sharded(0)], ["shard"]),
    "gathered and sharded elsewhere": ([sharded(0), VARYING, sharded(1)], ["all_gather", "shard"]),
}


def chain(*states: State) -> tuple[Local, fx.Node]:
    build = Local()
    node = build.value("x", states[0])
    for state in states[1:]:
        node = build.convert(node, state)
    return build, build.apply(ATEN.neg.default, node)


def ops(gm: fx.GraphModule) -> list[str]:
    names = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("msc.")]


@pytest.mark.parametrize(("states", "left"), CHAINS.values(), ids=CHAINS)
def test_chains(states: list[State], left: list[str]) -> None:
    build, last = chain(*states)
    gm = build.done(last)
    assert clean(gm) == (left != ["all_gather", "shard"])
    assert ops(gm) == left


def test_what_is_sent_anyway_stays() -> None:
    build = Local()
    whole = build.convert(build.value("x", PARTIAL), REPLICATED)
    gm = build.done(build.convert(whole, sharded(0)), whole)
    assert clean(gm) == 0


def test_a_block_returns_what_it_computes() -> None:
    build = Local()
    x = build.value("x", sharded(0))
    gm = build.done(build.convert(build.convert(x, VARYING), sharded(0)))
    assert clean(gm) == 0


def test_the_text_before_and_after() -> None:
    build = Local()
    x = build.value("x", PARTIAL)
    first = build.convert(build.convert(x, REPLICATED), sharded(0))
    second = build.convert(build.convert(x, REPLICATED), sharded(0))
    gm = build.done(build.apply(ATEN.add.Tensor, first, second))
    assert clean(gm) == 3
    assert_text(
        gm,
        """
%tp: i64[] = coordinate "tp"
%x: f64[4,4] = value "x"
%reduce_scatter_default: f64[2,4] = msc.reduce_scatter(%x, 0, [2], 'tp', 2)
%add_tensor: f64[2,4] = aten.add.Tensor(%reduce_scatter_default, %reduce_scatter_default)
return (%add_tensor,)
""",
    )


def test_maxima_stay() -> None:
    build = Local()
    x = build.value("x", PARTIAL)
    most = build.call(OPS.all_reduce.default, x, "max", *AXIS)
    build.states[most] = REPLICATED
    assert clean(build.done(build.convert(most, sharded(0)))) == 0


def test_its_place_is_before_differentiation() -> None:
    names = [each.name for each in TRAIN.passes]
    assert names.index("shard") < names.index("clean-collectives") < names.index("differentiate")
