"""Shard: turn every distinct block, the prelude and the prologue into rank-local graphs.

See `msc.passes.sharding.partition` for the picture. Afterwards every value has its placement and,
where a gradient flows, the placement of its gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from msc.ir import placement
from msc.ir.errors import PlanError
from msc.ir.passes import UnitPass
from msc.ir.placement import PARTIAL, REPLICATED, VARYING, State, sharded
from msc.ir.structure import output_nodes, placeholders
from msc.ir.values import tensors_of
from msc.passes.compilation import Compilation, Variant
from msc.passes.sharding.axes import Axis
from msc.passes.sharding.batch import propagate_batch
from msc.passes.sharding.calls import Value, is_call, operands_of, value_of
from msc.passes.sharding.partition import Partitioned, Plan, partition
from msc.passes.sharding.rule import Strategy
from msc.passes.sharding.search import Placed


@dataclass(frozen=True)
class Shard(UnitPass):
    """Partition all graphs by the chosen strategies."""

    name: ClassVar[str] = "shard"
    numerics: ClassVar[str] = "sums over sharded factors change their order"
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        before = unit.texts()
        uneven = _uneven(unit)
        unit.variants = _variants(unit, uneven)
        unit.graphs = {}
        first = unit.variants[0]
        for variant in unit.variants:
            axes = _axes(unit, variant)
            for name in unit.structure.blocks:
                if variant is first or name in uneven:
                    variant.local[name] = _shard_block(unit, axes, name)
                    unit.graphs[name + variant.suffix] = variant.local[name].gm
                else:
                    variant.local[name] = first.local[name]
            _record_values(unit, variant)
        unit.local_prelude = _shard_prelude(unit)
        unit.graphs["prelude"] = unit.local_prelude.gm
        if unit.prologue is not None:
            unit.local_prologue = _shard_prologue(unit, unit.prologue)
            unit.graphs["prologue"] = unit.local_prologue.gm
        _record_parameters(unit)
        return unit.lines_changed(before)


def _uneven(unit: Compilation) -> dict[str, set[int]]:
    """Of blocks that tp splits in unequal parts, the coordinates at which parts become smaller."""
    if unit.placed is None:
        return {}
    size = unit.settings.mesh.axis_size("tp")
    found: dict[str, set[int]] = {}
    block_of = {n: name for name, gm in unit.structure.blocks.items() for n in gm.graph.nodes}
    for reader, (node, index), state in _placements(unit.placed):
        if isinstance(state.value, placement.Shard) and state.value.unit:
            length = tensors_of(node)[index].shape[state.value.dim]
            runs = state.value.run_lengths(length)
            starts = {run // state.value.unit % size for run in runs} - {0}
            found.setdefault(block_of[reader], set()).update(starts)
    return found


def _placements(placed: Placed) -> Iterator[tuple[fx.Node, Value, State]]:
    """Every value with each state in which it is held, and a node that holds it so."""
    for node, strategy in placed.strategies.items():
        for operand, state in zip(operands_of(node), strategy.operands, strict=True):
            yield node, operand, state
        for index, state in enumerate(strategy.results):
            yield node, (node, index), state
    for node, state in placed.placeholders.items():
        yield node, (node, 0), state
    for value, state in placed.outputs.items():
        yield value[0], value, state


def _variants(unit: Compilation, uneven: dict[str, set[int]]) -> list[Variant]:
    """Ranges of tp coordinates whose shards have equal shapes."""
    size = unit.settings.mesh.axis_size("tp")
    bounds = sorted({0, size, *(start for starts in uneven.values() for start in starts)})
    single = len(bounds) == 2
    return [
        Variant(range(first, last), "" if single else f"@tp{first}")
        for first, last in itertools.pairwise(bounds)
    ]


def _axes(unit: Compilation, variant: Variant) -> tuple[Axis, ...]:
    first = variant.coordinates[0]
    return tuple(
        replace(axis, part=first) if axis.name == "tp" else axis for axis in unit.settings.axes
    )


def _shard_block(unit: Compilation, axes: tuple[Axis, ...], name: str) -> Partitioned:
    settings = unit.settings
    gm = unit.structure.blocks[name]
    batch = unit.batch[name]
    count = len(settings.batch_axes)
    placed = unit.placed
    plan = Plan(axes)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            states = (batch.states[node, 0],) * count
            plan.placeholders[node] = states + ((placed.placeholders[node],) if placed else ())
        elif is_call(node):
            chosen = (batch.strategies[node],) * count
            plan.strategies[node] = chosen + ((placed.strategies[node],) if placed else ())
    plan.outputs = [None] * len(output_nodes(gm))
    for index, output in enumerate(map(value_of, output_nodes(gm))):
        if placed is not None and output in placed.outputs:
            plan.outputs[index] = (batch.states[output],) * count + (placed.outputs[output],)
    for buffer, source in unit.structure.buffers.items():
        if source.kind == "block" and unit.structure.instances[source.instance].block == name:
            _replicate(plan, source.output, buffer)
    loss = unit.structure.loss
    instance = unit.structure.instances[loss.instance]
    if instance.block == name:
        # every rank's and micro-batch's loss is a part of a sum, so that its gradient's seed is one
        plan.outputs[loss.output] = (PARTIAL,) * count + ((placed.loss,) if placed else ())
    return partition(gm, plan, unit.fake_mode)


def _replicate(plan: Plan, output: int, buffer: str) -> None:
    """Let every rank have the whole new value of a buffer."""
    wanted = (REPLICATED,) * len(plan.axes)
    states = plan.outputs[output] or wanted
    if any(have.value != want.value for have, want in zip(states, wanted, strict=True)):
        raise PlanError(
            f"Buffer '{buffer}' is set to a value that later layers read sharded "
            f"({', '.join(map(str, states))}). Write a copy of the value into the buffer: "
            "buffer.copy_(value * 1)."
        )
    plan.outputs[output] = wanted


def _shard_prelude(unit: Compilation) -> Partitioned:
    axes = unit.settings.axes
    gm = unit.structure.prelude
    batch = unit.batch["prelude"]
    count = len(unit.settings.batch_axes)
    extra = len(axes) - count
    plan = Plan(axes)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            plan.placeholders[node] = (batch.states[node, 0],) * count + (REPLICATED,) * extra
        elif is_call(node):
            plan.strategies[node] = (batch.strategies[node],) * count + (
                _whole_strategy(batch.strategies[node]),
            ) * extra
    plan.outputs = [
        (unit.prelude_states[name],) * count + (REPLICATED,) * extra
        for name in unit.structure.prelude_outputs
    ]
    return partition(gm, plan, unit.fake_mode)


def _whole_strategy(like: Strategy) -> Strategy:
    return Strategy((REPLICATED,) * len(like.operands), (REPLICATED,) * len(like.results))


def _shard_prologue(unit: Compilation, gm: fx.GraphModule) -> Partitioned:
    """All rows of a rank at once: dp splits each micro-batch of the batch; results are whole."""
    settings = unit.settings
    axes = tuple(axis for axis in settings.batch_axes if axis.name == "dp")
    size = axes[0].size if axes else 1
    plan = Plan(axes)
    if axes:
        dims = settings.batch_dims
        inputs = {
            node: sharded(dim, settings.micro_batches)
            for node in placeholders(gm)
            if node.meta["kind"] == "input" and (dim := dims.get(node.meta["name"])) is not None
        }
        found = propagate_batch(gm, size, inputs, lambda node, operand: True)
        plan.strategies = {node: (strategy,) for node, strategy in found.strategies.items()}
        plan.placeholders = {node: (inputs.get(node, VARYING),) for node in placeholders(gm)}
    else:
        plan.strategies = {node: () for node in gm.graph.nodes if is_call(node)}
        plan.placeholders = {node: () for node in placeholders(gm)}
    plan.outputs = [(VARYING,) * len(axes) for _ in output_nodes(gm)]
    return partition(gm, plan, unit.fake_mode)


def _record_parameters(unit: Compilation) -> None:
    """States of each parameter per axis, the same in all blocks that use it."""
    axes = unit.settings.axes
    count = len(unit.settings.batch_axes)
    for instance in unit.structure.instances:
        nodes = placeholders(unit.structure.blocks[instance.block])
        for node, source in zip(nodes, instance.sources, strict=True):
            if source.kind != "parameter":
                continue
            states: dict[str, State] = dict.fromkeys((axis.name for axis in axes[:count]), VARYING)
            if unit.placed is not None:
                states["tp"] = unit.placed.placeholders[node]
            unit.parameter_states[source.name] = states


def _record_values(unit: Compilation, variant: Variant) -> None:
    for instance in unit.structure.instances:
        for index, node in enumerate(output_nodes(variant.local[instance.block].gm)):
            variant.value_meta[instance.index, index] = dict(node.meta)
