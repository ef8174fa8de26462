"""Shard the batch over dp and the micro-batches.

    %nll   = msc.nll_terms(%logits, %labels)         S0 over dp and mb
    %total = aten.sum(%nll)                          P: a sum over samples
    %count = aten.sum(%mask)                         P, and a divisor: computed once per step, whole
    %loss  = aten.div(%total, %count)                P

States propagate from the inputs through the prelude and the block instances, once per distinct
block. Values without parameters that are needed whole move to the *prologue*, which runs once per
step on all rows of the rank. Numerics: kept; sums over the batch change their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from msc.ir.passes import UnitPass
from msc.ir.placement import VARYING, Partial, Shard, State, sharded
from msc.ir.structure import (
    Instance,
    Source,
    Structure,
    output_nodes,
    output_of,
    placeholders,
)
from msc.ir.values import operand_nodes
from msc.ir.walks import ancestors
from msc.passes.compilation import Compilation
from msc.passes.cut import copy_subgraph
from msc.passes.sharding.axes import parts
from msc.passes.sharding.batch import BatchPlan, NotSeparableError, propagate_batch
from msc.passes.sharding.calls import Value, operands_of, value_of


@dataclass(frozen=True)
class ShardBatch(UnitPass):
    """Find the batch states of all values."""

    name: ClassVar[str] = "shard-batch"
    numerics: ClassVar[str] = "sums over samples change their order"
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        before = unit.texts()
        _BatchSharder(unit, parts(unit.settings.batch_axes)).run()
        unit.graphs = {"prelude": unit.structure.prelude, **unit.structure.blocks}
        if unit.prologue is not None:
            unit.graphs["prologue"] = unit.prologue
        _annotate(unit)
        return unit.lines_changed(before)


def _annotate(unit: Compilation) -> None:
    """Show the states in the text."""
    axes = [axis.name for axis in unit.settings.batch_axes]
    for name in ("prelude", *unit.structure.blocks):
        for (node, index), state in unit.batch[name].states.items():
            if index == 0 and isinstance(node.meta.get("val"), torch.Tensor):
                shown = dict.fromkeys(axes, state.value) if state.value != VARYING.value else {}
                node.meta["placement"] = shown


class _Restart(Exception):
    """The graph was rewritten: propagate again."""


class _BatchSharder:
    def __init__(self, unit: Compilation, size: int) -> None:
        self.unit = unit
        self.structure: Structure = unit.structure
        self.size = size
        self.over_time = any(axis.name == "mb" for axis in unit.settings.batch_axes)
        self.pristine = _copy(self.structure.prelude)
        self.hoisted: dict[str, None] = {}
        self.prelude_plan = BatchPlan()
        self.outputs: dict[str, tuple[fx.Node, State]] = {}
        self.variants: dict[str, list[str]] = {}

    def run(self) -> None:
        self._written_buffers()
        self._prelude()
        for instance in list(self.structure.instances):
            self._instance(instance)
        self._finish_prelude()
        self._prologue()

    def _written_buffers(self) -> None:
        """A buffer that the batch changes is changed by each micro-batch after the other."""
        for name in sorted(self.structure.from_inputs) if self.over_time else ():
            node = output_of(self.structure, self.structure.buffers[name])
            raise NotSeparableError(node, f"buffer '{name}' is updated from the batch")

    # -- the prelude

    def _prelude(self) -> None:
        gm = self.structure.prelude
        while True:
            inputs = {node: self._input_state(node) for node in placeholders(gm)}
            try:
                self.prelude_plan = propagate_batch(gm, self.size, inputs, self._hoist_operand)
                break
            except _Restart:
                continue
        for name in self.structure.prelude_outputs:
            self.outputs[name] = self._named(name)

    def _input_state(self, node: fx.Node) -> State:
        dim = self.unit.settings.batch_dims.get(node.meta["name"])
        batched = node.meta["kind"] == "input" and dim is not None and self.size > 1
        return sharded(dim) if batched and dim is not None else VARYING

    def _hoist_operand(self, node: fx.Node, operand: Value) -> bool:
        if not self.over_time:
            return True  # over dp alone a collective in place does it
        for read in dict.fromkeys(operand_nodes(node)):
            if value_of(read) == operand:
                node.replace_input_with(read, self._whole(read))
        raise _Restart

    def _whole(self, node: fx.Node) -> fx.Node:
        """The placeholder of a value that the prologue computes."""
        gm = self.structure.prelude
        name = node.name
        for placeholder in placeholders(gm):
            if placeholder.meta["kind"] == "step" and placeholder.meta["name"] == name:
                return placeholder
        self.hoisted[name] = None
        last = placeholders(gm)[-1] if placeholders(gm) else None
        anchor = last.next if last is not None else next(iter(gm.graph.nodes))
        with gm.graph.inserting_before(anchor):
            new = gm.graph.placeholder(f"{name}_whole")
        new.meta = {**node.meta, "kind": "step", "name": name, "differentiable": False}
        return new

    def _named(self, name: str) -> tuple[fx.Node, State]:
        index = self.structure.prelude_outputs.index(name)
        node = output_nodes(self.structure.prelude)[index]
        return node, self.prelude_plan.states[value_of(node)]

    # -- the instances

    def _instance(self, instance: Instance) -> None:
        structure = self.structure
        sources = list(instance.sources)
        gm = structure.blocks[instance.block]
        nodes = placeholders(gm)
        while True:
            states = {node: self._source_state(s) for node, s in zip(nodes, sources, strict=True)}
            block = self._block_for(instance.block, states)
            if block is not None:
                name, plan = block
                break
            try:
                plan = propagate_batch(gm, self.size, states, self._resolver(gm, sources))
            except _Restart:
                continue
            if self._demand(gm, sources, states, plan):
                continue
            name = self._register(instance.block, states, plan)
            break
        structure.instances[instance.index] = replace(instance, block=name, sources=tuple(sources))

    def _source_state(self, source: Source) -> State:
        if source.kind == "block":
            producer = self.structure.instances[source.instance]
            gm = self.structure.blocks[producer.block]
            return self.unit.batch[producer.block].outputs(gm)[source.output]
        if source.kind == "prelude":
            return self.outputs[source.name][1]
        return VARYING

    def _block_for(self, block: str, states: dict[fx.Node, State]) -> tuple[str, BatchPlan] | None:
        """The block of this layer that was planned for inputs in these states, if there is one."""
        wanted = list(states.values())
        for name in self.variants.get(block, ()):
            plan = self.unit.batch[name]
            nodes = placeholders(self.structure.blocks[name])
            if [plan.states[node, 0] for node in nodes] == wanted:
                return name, plan
        return None

    def _register(self, block: str, states: dict[fx.Node, State], plan: BatchPlan) -> str:
        variants = self.variants.setdefault(block, [])
        if not variants:
            variants.append(block)
            self.unit.batch[block] = plan
            return block
        # an instance of the same layer whose inputs are sharded otherwise is a block of its own
        name = f"{block}_{len(variants)}"
        variants.append(name)
        copy = _copy(self.structure.blocks[block])
        twins = dict(zip(self.structure.blocks[block].graph.nodes, copy.graph.nodes, strict=True))
        self.structure.blocks[name] = copy
        self.unit.batch[name] = BatchPlan(
            {twins[node]: strategy for node, strategy in plan.strategies.items()},
            {(twins[node], i): state for (node, i), state in plan.states.items()},
        )
        return name

    def _resolver(
        self, gm: fx.GraphModule, sources: list[Source]
    ) -> Callable[[fx.Node, Value], bool]:
        nodes = placeholders(gm)

        def whole(node: fx.Node, operand: Value) -> bool:
            source = operand[0]
            if source.op == "placeholder" and source.meta["kind"] != "value":
                index = nodes.index(source)
                if sources[index].kind == "prelude":
                    if not self.over_time:
                        return True
                    sources[index] = Source("prelude", self._whole_output(sources[index].name))
                    raise _Restart
            self.unit.joins_samples = True
            return not self.over_time  # over which nothing can gather

        return whole

    def _whole_output(self, name: str) -> str:
        node, _ = self.outputs[name]
        variant = f"{name}@whole"
        if variant not in self.outputs:
            self.outputs[variant] = (self._whole(node), VARYING)
        return variant

    def _demand(
        self,
        gm: fx.GraphModule,
        sources: list[Source],
        states: dict[fx.Node, State],
        plan: BatchPlan,
    ) -> bool:
        """Ask the prelude for shards of what every reader in the block slices."""
        changed = False
        for index, node in enumerate(placeholders(gm)):
            if sources[index].kind != "prelude" or states[node] != VARYING:
                continue
            wanted = {
                strategy.operands[position]
                for reader, strategy in plan.strategies.items()
                for position, operand in enumerate(operands_of(reader))
                if operand == (node, 0)
            }
            if len(wanted) != 1 or not isinstance(next(iter(wanted)).value, Shard):
                continue
            (state,) = wanted
            source, _ = self.outputs[sources[index].name]
            variant = f"{sources[index].name}@{state.value}"
            self.outputs.setdefault(variant, (source, state))
            sources[index] = Source("prelude", variant)
            changed = True
        return changed

    # -- what remains

    def _finish_prelude(self) -> None:
        self._prelude_buffers()
        sources = [s for i in self.structure.instances for s in i.sources]
        sources += self.structure.buffers.values()
        used = {source.name for source in sources if source.kind == "prelude"}
        kept = {name: entry for name, entry in self.outputs.items() if name in used}
        gm = self.structure.prelude
        output = gm.graph.output_node()
        output.args = (tuple(node for node, _ in kept.values()),)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        self.structure.prelude_outputs = list(kept)
        self.unit.prelude_states = {name: state for name, (_, state) in kept.items()}
        alive = set(gm.graph.nodes)
        for node in placeholders(gm):
            self.prelude_plan.states.setdefault((node, 0), VARYING)
        self.unit.batch["prelude"] = BatchPlan(
            {n: s for n, s in self.prelude_plan.strategies.items() if n in alive},
            {v: s for v, s in self.prelude_plan.states.items() if v[0] in alive},
        )
        loss = self._source_state(self.structure.loss)
        assert not isinstance(loss.value, Shard), "a scalar loss cannot be sharded"
        if isinstance(loss.value, Partial) and loss.value.op != "sum":
            self.unit.joins_samples = True
            if not self.over_time:
                return
            producer = self.structure.instances[self.structure.loss.instance]
            node = output_nodes(self.structure.blocks[producer.block])[self.structure.loss.output]
            raise NotSeparableError(node, "the loss is no sum over samples")

    def _prelude_buffers(self) -> None:
        """Every rank needs the whole new value of a buffer, whoever else reads it."""
        for name, source in self.structure.buffers.items():
            if source.kind == "prelude":
                whole = f"{source.name}@buffer"
                self.outputs[whole] = (self.outputs[source.name][0], VARYING)
                self.structure.buffers[name] = Source("prelude", whole)

    def _prologue(self) -> None:
        live = {
            node.meta["name"]
            for node in placeholders(self.structure.prelude)
            if node.meta["kind"] == "step" and node.users
        }
        wanted = [name for name in self.hoisted if name in live]
        if not wanted:
            self.unit.prologue = None
            return
        by_name = {node.name: node for node in self.pristine.graph.nodes}
        outputs = [by_name[name] for name in wanted]
        needed = ancestors(outputs)
        inputs = [node for node in placeholders(self.pristine) if node in needed]
        for node in inputs:
            if node.meta["name"] in self.structure.buffers:
                raise NotSeparableError(node, "it changes from micro-batch to micro-batch")
        nodes = [n for n in self.pristine.graph.nodes if n in needed and n.op == "call_function"]
        prologue = copy_subgraph(inputs, nodes, outputs, lambda node: dict(node.meta))
        prologue.meta["names"] = wanted
        self.unit.prologue = prologue


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return copy_subgraph(placeholders(gm), calls, output_nodes(gm), lambda node: dict(node.meta))
