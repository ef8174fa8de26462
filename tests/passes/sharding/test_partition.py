"""Every conversion between states is what the states mean, in the value and in the gradient."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from msc.ir.errors import VerifyError
from msc.ir.mesh import Mesh
from msc.ir.placement import (
    PARTIAL,
    REPLICATED,
    VARYING,
    Partial,
    Placement,
    Replicate,
    Shard,
    State,
    shard_of,
    sharded,
    unshard,
)
from msc.ir.printer import format_graph
from msc.ir.structure import placeholders
from msc.passes.cut import mark_differentiable
from msc.passes.differentiate import differentiate
from msc.passes.sharding.axes import Axis, local_runs, local_shape
from msc.passes.sharding.calls import is_call
from msc.passes.sharding.partition import Partitioned, Plan, partition
from msc.passes.sharding.rule import Strategy
from msc.runtime.virtual import VirtualExecutor
from tests.passes.graphs import ATEN, Forward, assert_text

SHAPE = (4, 8)
STATES = [REPLICATED, VARYING, PARTIAL, sharded(0), sharded(1), sharded(1, 2), sharded(1, (6, 2))]
IMPOSSIBLE = [(VARYING, REPLICATED)]
"""A partial gradient cannot be made from a whole one by communication alone."""

Parts = list[Tensor]
"""A value on every rank of the mesh, in rank order."""


def split(whole: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """What the ranks of one axis hold of a value; parts of a sum differ from each other."""
    if isinstance(placement, Shard):
        return [shard_of(whole, placement, size, index).contiguous() for index in range(size)]
    if isinstance(placement, Partial):
        others = [torch.full_like(whole, 1.5 + index) * whole.sin() for index in range(size - 1)]
        return [whole - torch.stack(others).sum(0), *others] if others else [whole]
    return [whole.clone() for _ in range(size)]


def joined(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The value that the ranks of one axis hold."""
    if isinstance(placement, Shard):
        return unshard(parts, placement)
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0])
    return parts[0]


def nested(placements: Sequence[Placement], sizes: Sequence[int]) -> list[Placement]:
    """Each axis's placement of what the axes before it left.

    Segments count over the whole dim: of four, an outer axis of two ranks leaves two, unless it
    splits each of them.
    """
    found: list[Placement] = []
    for index, placement in enumerate(placements):
        if isinstance(placement, Shard) and isinstance(placement.segments, int):
            segments = placement.segments
            for outer, size in zip(placements[:index], sizes, strict=False):
                if not isinstance(outer, Shard) or outer.dim != placement.dim:
                    continue
                if isinstance(outer.segments, int) and segments % (outer.segments * size) == 0:
                    segments //= size
            placement = Shard(placement.dim, segments)
        found.append(placement)
    return found


def spread(whole: Tensor, placements: Sequence[Placement], sizes: Sequence[int]) -> Parts:
    """A value on all ranks; the first axis is the major one."""
    parts = [whole]
    for placement, size in zip(nested(placements, sizes), sizes, strict=True):
        parts = [piece for part in parts for piece in split(part, placement, size)]
    return parts


def gathered(parts: Parts, placements: Sequence[Placement], sizes: Sequence[int]) -> Tensor:
    """The value that all ranks hold; the opposite of `spread`."""
    pairs = list(zip(nested(placements, sizes), sizes, strict=True))
    for placement, size in reversed(pairs):
        parts = [
            joined(parts[start : start + size], placement) for start in range(0, len(parts), size)
        ]
    return parts[0]


def converting(
    axes: tuple[Axis, ...], have: tuple[State, ...], want: tuple[State, ...], trains: bool = True
) -> Partitioned:
    """A graph that turns a value, a placeholder in one state, into another state."""
    build = Forward()
    x = build.parameter("x", *SHAPE, trains=trains)
    gm = build.done(x)
    mark_differentiable(gm)
    plan = Plan(axes, {}, {x: have}, [want])
    return partition(gm, plan, build.mode)


def executed(gm: fx.GraphModule, mesh: Mesh, values: Parts) -> list[Parts]:
    """The results of a rank-local graph on every rank; coordinates are filled in."""
    arguments = []
    for rank in range(mesh.size):
        row = []
        for node in placeholders(gm):
            if node.meta["kind"] == "coordinate":
                row.append(torch.tensor(mesh.coordinate(rank)[node.meta["name"]]))
            else:
                row.append(values[rank])
        arguments.append(row)
    return [list(result) for result in VirtualExecutor(mesh, lambda rank: gm).run(arguments)]


def check(axes: tuple[Axis, ...], have: tuple[State, ...], want: tuple[State, ...]) -> None:
    """Convert numbers forward and a gradient backward, and compare both with their meaning."""
    local = converting(axes, have, want)
    found = differentiate(local.gm, placeholders(local.gm)[0].meta["val"].fake_mode)
    mesh = Mesh(tuple((axis.name, axis.size) for axis in axes))
    sizes = [axis.size for axis in axes]
    torch.manual_seed(0)
    whole = torch.randn(SHAPE, dtype=torch.float64)
    values = spread(whole, [state.value for state in have], sizes)
    results = executed(found.forward, mesh, values)
    outputs = [result[0] for result in results]
    torch.testing.assert_close(gathered(outputs, [s.value for s in want], sizes), whole)

    gradient = torch.randn(SHAPE, dtype=torch.float64)
    tangents = spread(gradient, [state.grad for state in want], sizes)
    assert found.backward is not None
    assert found.tangents == (0,)
    arguments = []
    for rank in range(mesh.size):
        coordinates = {
            node.name: torch.tensor(mesh.coordinate(rank)[node.meta["name"]])
            for node in placeholders(found.forward)
            if node.meta["kind"] == "coordinate"
        }
        inputs = [values[rank], *coordinates.values()]
        stored = results[rank][found.num_outputs :]
        saved = [inputs[s.index] if s.is_input else stored[s.index] for s in found.saved]
        arguments.append([*saved, tangents[rank]])
    backward = found.backward
    gradients = VirtualExecutor(mesh, lambda rank: backward).run(arguments)
    back = gathered([g[0] for g in gradients], [state.grad for state in have], sizes)
    torch.testing.assert_close(back, gradient)


PAIRS = [pair for pair in itertools.product(STATES, STATES) if pair not in IMPOSSIBLE]


@pytest.mark.parametrize(("have", "want"), PAIRS, ids=str)
def test_a_conversion_means_what_its_states_say(have: State, want: State) -> None:
    check((Axis("tp", 2),), (have,), (want,))


def possible(states: tuple[State, ...], axes: tuple[Axis, ...]) -> bool:
    """Whether a value can be in these states: an inner axis splits runs that an outer one left."""
    for index, state in enumerate(states):
        if isinstance(state.value, Shard):
            dim = state.value.dim
            runs = local_runs(SHAPE[dim], index, states, axes, dim)
            if runs is None or 0 in runs:
                return False
    return True


TWO = st.tuples(st.sampled_from(STATES), st.sampled_from(STATES))


@given(TWO, TWO)
@settings(max_examples=100, deadline=None)
def test_conversions_over_two_axes(have: tuple[State, State], want: tuple[State, State]) -> None:
    axes = (Axis("dp", 2), Axis("tp", 2))
    assume(possible(have, axes))
    assume(possible(want, axes))
    assume(not any(pair in IMPOSSIBLE for pair in zip(have, want, strict=True)))
    check(axes, have, want)


def test_a_partial_gradient_is_not_made_whole() -> None:
    with pytest.raises(VerifyError) as error:
        converting((Axis("tp", 2),), (VARYING,), (REPLICATED,))
    assert str(error.value) == (
        "partition: no conversion of %x from R~ to R over 'tp'. "
        "This is a bug in the placement pass."
    )


def test_a_maximum_that_trains_is_not_reduced() -> None:
    maximum = State(Partial("max"), Replicate())
    with pytest.raises(VerifyError) as error:
        converting((Axis("tp", 2),), (maximum,), (REPLICATED,))
    assert str(error.value) == (
        "partition: %x is a maximum over 'tp' that needs a gradient, but its reduction has none. "
        "This is a bug in the placement pass."
    )
    local = converting((Axis("tp", 2),), (maximum,), (REPLICATED,), trains=False)
    assert "msc.all_reduce(%x, 'max', 'tp', 2, 'identity')" in format_graph(local.gm)


def test_without_a_gradient_its_placement_is_ignored() -> None:
    local = converting((Axis("tp", 2),), (REPLICATED,), (VARYING,), trains=False)
    assert_text(
        local.gm,
        """
%x: f64[4,8] = parameter "x"
return (%x,)
""",
    )


def test_local_runs() -> None:
    axes = (Axis("dp", 2), Axis("tp", 2))

    def runs(length: int, *states: State) -> list[int] | None:
        return local_runs(length, len(states) - 1, states, axes, 0)

    assert runs(8, sharded(0)) == [4]
    assert runs(12, sharded(0, 3)) == [2, 2, 2]
    assert runs(8, sharded(0, (4, 2, 2))) == [2, 1, 1]
    assert runs(8, REPLICATED, sharded(0)) == [4]
    assert runs(8, sharded(1), sharded(0)) == [4]
    assert runs(8, sharded(0), sharded(0)) == [2]
    # dp left half of the four runs
    assert runs(16, sharded(0), sharded(0, 4)) == [2, 2]
    # dp has split each of two runs; those of tp would not be whole
    assert runs(8, sharded(0, 2), sharded(0)) is None
    assert runs(8, sharded(0, (4, 4)), sharded(0)) is None


@given(
    st.integers(1, 3),
    st.sampled_from([2, 3]),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_local_runs_are_the_lengths_of_a_shard(
    segments: int, size: int, run: int, outer: int
) -> None:
    """With an outer axis that leaves whole runs, tp's part consists of the runs that are told."""
    axes = (Axis("dp", outer), Axis("tp", size))
    total = segments * outer
    states = (sharded(0), sharded(0, total))
    length = total * size * run
    whole = torch.arange(length)
    part = shard_of(shard_of(whole, Shard(0), outer, 0), Shard(0, segments), size, 0)
    found = local_runs(length, 1, states, axes, 0)
    assert found == [run] * segments
    steps = (part[1:] - part[:-1] != 1).nonzero().flatten().tolist()
    starts = [0, *(step + 1 for step in steps), len(part)]
    assert [b - a for a, b in itertools.pairwise(starts)] == (found if size > 1 else [len(part)])
    assert local_shape((length,), states, axes) == (len(part),)


def product(wanted: Strategy, trains: bool = True) -> tuple[fx.GraphModule, Partitioned]:
    """A linear, run in one way over tp; its operands start whole."""
    build = Forward()
    x, w = build.parameter("x", 4, 8), build.parameter("w", 8, 8, trains=trains)
    y = build.linear(x, w, "layer")
    gm = build.done(y, y)
    mark_differentiable(gm)
    plan = Plan((Axis("tp", 2),))
    plan.placeholders = {node: (REPLICATED,) for node in placeholders(gm)}
    plan.strategies = {node: (wanted,) for node in gm.graph.nodes if is_call(node)}
    plan.outputs = [(REPLICATED,), (sharded(0),)]
    return gm, partition(gm, plan, build.mode)


def test_one_conversion_serves_all_readers() -> None:
    wanted = Strategy((sharded(1), sharded(1)), (PARTIAL,), "k")
    _, local = product(wanted)
    assert_text(
        local.gm,
        """
%x: f64[4,8] = parameter "x"
%w: f64[8,8] = parameter "w"
%coordinate_tp: i64[] = coordinate "tp"
%shard_default: f64[4,4]{tp:S1} = msc.shard(%x, 1, [4], 'tp', 2, %coordinate_tp, 'all_gather')
%shard_default_1: f64[8,4]{tp:S1} = msc.shard(%w, 1, [4], 'tp', 2, %coordinate_tp, 'all_gather')
%linear_default: f64[4,8]{tp:P} = msc.linear(%shard_default, %shard_default_1)  # layer
%all_reduce_default: f64[4,8] = msc.all_reduce(%linear_default, 'sum', 'tp', 2, 'identity')  # layer
%reduce_scatter_default: f64[2,8]{tp:S0} = msc.reduce_scatter(%linear_default, 0, [2], 'tp', 2)\
  # layer
return (%all_reduce_default, %reduce_scatter_default)
""",
    )
    assert local.coordinates == ["tp"]


def test_a_rule_that_promises_other_shapes_is_caught() -> None:
    wanted = Strategy((sharded(1), sharded(1)), (sharded(0),), "k")
    with pytest.raises(VerifyError) as error:
        product(wanted)
    assert str(error.value) == (
        "partition: the rule of msc.linear.default expects local results ((2, 8),), but the op "
        "yields ((4, 8),).\n  %linear_default: f64[4,8], strategies ['k: S1, S1 -> S0']\n"
        "This is a bug in the rule's `localize`."
    )


def test_results_that_nothing_reads_are_not_picked() -> None:
    build = Forward()
    x = build.parameter("x", 4, 8)
    parts = build.call(ATEN.split.Tensor, x, 4, 1)
    gm = build.done(build.call(operator.getitem, parts, 1))
    mark_differentiable(gm)
    plan = Plan((Axis("tp", 2),), {parts: (Strategy((sharded(0),), (sharded(0),) * 2, "r"),)})
    plan.placeholders = {x: (sharded(0),)}
    local = partition(gm, plan, build.mode)
    assert_text(
        local.gm,
        """
%x: f64[2,8]{tp:S0} = parameter "x"
%split_with_sizes_default: (f64[2,4], f64[2,4]) = aten.split_with_sizes(%x, [4, 4], 1)
%getitem: f64[2,4]{tp:S0} = %split_with_sizes_default[1]
return (%getitem,)
""",
    )
    assert local.output_states == [(sharded(0),)]
