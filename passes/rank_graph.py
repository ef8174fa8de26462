"""Build the rank graph of each pipeline stage: one training step in schedule order.

    %x0 = wait(recv(..))                       the schedule's forwards and backwards, with transfers
    %f0 = chunk0_forward(.., %x0)
    %b0 = chunk0_backward(..)
    %g = accumulate(None, %b0[1])              gradients summed over micro-batches
    %r = all_reduce(flatten(%g), 'dp')         reduced once, over every axis that owes it
    %p = adam(..)                              the optimizer's actions

Ranks that differ only on dp, or on tp where their shards have equal shapes, run the same graph;
their coordinates are nodes.
Numerics: the sum over micro-batches runs in the schedule's order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from msc.ir import actions
from msc.ir.placement import Partial
from msc.ir.structure import placeholders
from msc.ir.torch_private import lazy_graph_module
from msc.passes.buckets import bucket_limit
from msc.passes.chunks import Chunk
from msc.passes.compilation import Compilation, Variant
from msc.passes.gradient_sums import GradientSums
from msc.passes.optimizer_step import OptimizerStep, state_keys
from msc.passes.reduce_gradients import reduce_gradients, reduce_tied
from msc.passes.schedules.stages import Step
from msc.passes.transfers import Transfers
from msc.passes.zero.parameters import ParametersInUse
from msc.passes.zero.shard_data import shard_group

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def build_rank_graph(
    unit: Compilation, variant: Variant, stage: int, waits: Mapping[Step, Sequence[Step]]
) -> fx.GraphModule:
    """The step of the ranks of a variant at pp coordinate `stage`.

    waits: before a step, the sends to wait for, by the steps that made them.
    """
    return _Builder(unit, variant, stage, waits).build()


class _Builder:
    def __init__(
        self,
        unit: Compilation,
        variant: Variant,
        stage: int,
        waits: Mapping[Step, Sequence[Step]],
    ) -> None:
        self.unit = unit
        self.variant = variant
        self.settings = unit.settings
        self.stage = stage
        self.chunks = [chunk for chunk in variant.chunks if chunk.stage == stage]
        self.read = {  # what the chunks read, as their graphs have it
            (n.meta["kind"], n.meta["name"]): n
            for chunk in reversed(self.chunks)
            for n in reversed(placeholders(chunk.forward))
        }
        self.wholes = {n: val for chunk in self.chunks for n, val in chunk.values.items()}
        self.others = list(dict.fromkeys(o for chunk in self.chunks for o in chunk.others))
        self.written = list(dict.fromkeys(n for chunk in self.chunks for n in chunk.written))
        names = dict.fromkeys(name for chunk in self.chunks for name in chunk.parameters)
        trained = {name for chunk in variant.chunks for name in chunk.parameter_gradients}
        self.trained = [name for name in names if name in trained]
        self.values: dict[int, tuple[Any, ...]] = {}
        self.graph = fx.Graph()
        self.modules: dict[str, fx.GraphModule] = {}
        self.inputs: dict[tuple[str, str], fx.Node] = {}
        self.parameters: dict[str, fx.Node] = {}
        self.sharding = shard_group(unit)
        self.arrived: dict[str, fx.Node] = {}
        self.coordinates: dict[str, fx.Node] = {}
        self.step_values: dict[str, fx.Node] = {}
        self.buffers: dict[tuple[int, str], fx.Node] = {}
        self.transfers = Transfers(self._act, unit, variant, stage, waits)
        self.results: dict[tuple[int, int], list[fx.Node]] = {}
        reduced = self.sharding if self.settings.zero >= 2 else None
        self.sums = GradientSums(
            self._act,
            self._master,
            self.settings.master,
            reduced,
            unit.reduced_together,
            self.settings.micro_batches,
            lambda size: self._limit("reduce_scatter", size),
        )
        self.loss: fx.Node | None = None

    def build(self) -> fx.GraphModule:
        self._placeholders()
        per_call = self.settings.zero == 3
        held = self._lowered()
        self.in_use = ParametersInUse(
            self._act,
            self.chunks,
            held,
            self.sharding,
            per_call,
            lambda size: self._limit("all_gather", size),
        )
        steps = self.unit.schedule.orders[self.stage]
        self.in_use.begin(steps)
        self._prologue()
        self.in_use.begin_rest()
        self._announce(steps[0])
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            if following is not None:
                self._announce(following)  # so that it arrives while this step computes
            arrived = self.transfers.arrived(step)
            self.transfers.release(step)
            if step.kind == "forward":
                self._forward(step, arrived)
            elif step.kind == "backward":
                self._backward(step, arrived)
            else:
                self._weight_backward(step)
        self.transfers.finish()
        summed = self.sums.finish()
        gradients = {name: summed[name] for name in self.trained if name in summed}
        reduce_gradients(self._act, self.unit, self.sharding, self.chunks, gradients)
        gradients = {name: gradients.get(name) or self._zeros(name) for name in self.trained}
        reduce_tied(self._act, self.unit, gradients)
        output: dict[str, Any] = {
            "loss": self._reduce_loss(),
            "gradients": tuple(gradients.values()),
        }
        if self.written:
            output["buffers"] = tuple(map(self._last_value, self.written))
        optimizer = self._optimizer(gradients)
        if optimizer is not None:
            output |= optimizer.append()
        self.graph.output(output)
        gm = lazy_graph_module(self.modules, self.graph)
        gm.meta["gradients"] = list(gradients)
        gm.meta["buffers"] = list(self.written)
        if optimizer is not None:
            gm.meta["parameters"] = optimizer.changed
            gm.meta["optimizer"] = optimizer.kept
        return gm

    def _limit(self, kind: str, size: float) -> float:
        return bucket_limit(self.settings, kind, self.settings.data_group, size)

    # -- nodes

    def _act(self, function: Any, *args: Any, val: Any = None, **meta: Any) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta = {"val": val, **meta}
        return node

    def _pick(self, node: fx.Node, index: int) -> fx.Node:
        value = node.meta["val"][index]
        return self._act(operator.getitem, node, index, val=value)

    def _placeholder(self, name: str, meta: dict[str, Any]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = dict(meta)
        return node

    def _placeholders(self) -> None:
        for name in dict.fromkeys(name for chunk in self.chunks for name in chunk.parameters):
            node = self.read["parameter", name]
            meta = {**node.meta, "val": self._master(self._held(name))}
            if self.sharding is not None:
                meta |= self.sharding.placements_of(name, node.meta)
            self.parameters[name] = self._placeholder(node.name, meta)
        if self.settings.optimizer is not None:
            for key in state_keys(self.settings, self.trained):
                state, _, name = key.partition(".")
                node = self.parameters[name]
                meta = {**node.meta, "kind": "optimizer", "name": key}
                placeholder = self._placeholder(f"{state}_{node.name}", meta)
                self.inputs["optimizer", key] = placeholder
        needed = list(self.others)
        prologue = self.unit.local_prologue
        if prologue is not None and any(kind == "step" for kind, _ in needed):
            needed += [(n.meta["kind"], n.meta["name"]) for n in placeholders(prologue.gm)]
        in_prologue = reversed(placeholders(prologue.gm)) if prologue is not None else ()
        sources = self.read | {(n.meta["kind"], n.meta["name"]): n for n in in_prologue}
        for kind, name in dict.fromkeys(needed):
            if kind not in ("buffer", "input", "rng"):
                continue
            node = sources[kind, name]
            meta = dict(node.meta)
            if kind == "input":
                meta["val"] = self._local_input(name, meta["val"])
            self.inputs[kind, name] = self._placeholder(node.name, meta)
        if self.settings.optimizer is not None:
            kinds = ("step", "skipped") if self.settings.optimizer.skips else ("step",)
            with self.unit.fake_mode:
                val = torch.empty((), dtype=torch.int64)
            for kind in kinds:
                meta = {"kind": kind, "name": "", "val": val}
                self.inputs[kind, ""] = self._placeholder(kind, meta)

    def _held(self, name: str) -> torch.Tensor:
        """What a rank holds of a parameter, in the dtype in which chunks compute with it."""
        value = self.wholes[name]
        if self.sharding is None or name not in self.sharding.shards:
            return value
        return self.sharding.shard_of(name, value)

    def _master(self, value: torch.Tensor) -> torch.Tensor:
        """A value of a chunk as the step holds or sums it: floating ones in the master dtype."""
        if self.settings.master is None or not value.is_floating_point():
            return value
        with self.unit.fake_mode:
            return torch.empty(value.shape, dtype=self.settings.master)

    def _lowered(self) -> dict[str, fx.Node]:
        """The parameters as the chunks compute with them, converted once per step."""
        found = {}
        for name, node in self.parameters.items():
            value = self._held(name)
            same = value.dtype == node.meta["val"].dtype
            converted = node if same else self._act(aten.to.dtype, node, value.dtype, val=value)
            found[name] = converted
        return found

    def _sum(self, total: fx.Node | None, parts: Any, vals: Sequence[Any]) -> fx.Node:
        """Add what a micro-batch gives to a total, which is in the master dtype."""
        master = () if self.settings.master is None else (self.settings.master,)
        vals = tuple(None if val is None else self._master(val) for val in vals)
        return self._act(actions.accumulate, total, parts, *master, val=vals)

    def _local_input(self, name: str, micro_batch: torch.Tensor) -> torch.Tensor:
        """All rows of the rank: those of a micro-batch, times their number."""
        dim = self.settings.batch_dims.get(name)
        if dim is None:
            return micro_batch
        shape = list(self.unit.input_shapes[name])
        shape[dim] //= self.settings.mesh.axis_size("dp")
        with self.unit.fake_mode:
            return torch.empty(shape, dtype=micro_batch.dtype)

    def _input(self, kind: str, name: str) -> fx.Node:
        """An input, buffer or key of the step.

        An input is waited for where it is read first, so that parameters can be on their way to
        this rank while its batch is loaded.
        """
        node = self.inputs[kind, name]
        if kind != "input" or self.sharding is None:
            return node
        if name not in self.arrived:
            self.arrived[name] = self._act(actions.arrived, node, val=node.meta["val"])
        return self.arrived[name]

    def _coordinate(self, axis: str) -> fx.Node:
        if axis not in self.coordinates:
            with self.unit.fake_mode:
                val = torch.empty((), dtype=torch.int64)
            self.coordinates[axis] = self._act(actions.coordinate, axis, val=val)
        return self.coordinates[axis]

    def _call(self, target: str, gm: fx.GraphModule, args: Sequence[fx.Node], val: Any) -> fx.Node:
        self.modules[target] = gm
        node = self.graph.call_module(target, tuple(args))
        node.meta = {"val": val}
        return node

    # -- the step

    def _prologue(self) -> None:
        prologue = self.unit.local_prologue
        if prologue is None or not any(kind == "step" for kind, _ in self.others):
            return
        args = []
        for node in placeholders(prologue.gm):
            kind, name = node.meta["kind"], node.meta["name"]
            args.append(self._coordinate(name) if kind == "coordinate" else self._input(kind, name))
        outputs = prologue.gm.graph.output_node().args[0]
        val = tuple(node.meta["val"] for node in outputs)  # type: ignore[union-attr]
        call = self._call("prologue", prologue.gm, args, val)
        for index, name in enumerate(self.unit.prologue_names):
            self.step_values[name] = self._pick(call, index)

    def _arguments(self, step: Step) -> list[fx.Node]:
        """What a forward reads besides activations."""
        chunk, micro_batch = self._chunk(step), step.micro_batch
        nodes = self.in_use.of(step)
        count = self.settings.micro_batches
        for kind, name in chunk.others:
            val = self.read[kind, name].meta["val"]
            if kind == "input":
                dim = self.settings.batch_dims.get(name)
                node = self._input(kind, name)
                if dim is not None and count > 1:
                    node = self._act(actions.micro_batch, node, dim, micro_batch, count, val=val)
                nodes.append(node)
            elif kind == "coordinate" and name == "mb":
                nodes.append(self._act(actions.micro_batch_index, micro_batch, val=val))
            elif kind == "coordinate":
                nodes.append(self._coordinate(name))
            elif kind == "step":
                nodes.append(self.step_values[name])
            elif (chunk.index, name) in self.buffers:
                nodes.append(self.buffers[chunk.index, name])
            else:
                nodes.append(self.inputs[kind, name])
        return nodes

    def _last_value(self, name: str) -> fx.Node:
        """A buffer as all micro-batches have left it; each chunk that writes it has its own."""
        chunk = next(chunk for chunk in self.chunks if name in chunk.written)
        return self.buffers[chunk.index, name]

    # -- work

    def _chunk(self, step: Step) -> Chunk:
        return self.variant.chunks[step.chunk]

    def _announce(self, step: Step) -> None:
        """Start what brings a step its operands."""
        self.transfers.post(step)
        self.in_use.announce(step)

    def _call_chunk(self, name: str, gm: fx.GraphModule, args: Sequence[fx.Node]) -> fx.Node:
        if id(gm) not in self.values:
            self.values[id(gm)] = _values(gm)
        call = self._call(name, gm, args, self.values[id(gm)])
        self.sums.settle()  # what was on its way beside this call
        return call

    def _forward(self, step: Step, received: list[fx.Node]) -> None:
        chunk = self._chunk(step)
        args = [*self._arguments(step), *received]
        call = self._call_chunk(f"chunk{chunk.index}_forward", chunk.forward, args)
        if chunk.sent:
            self.transfers.pass_on(step, self._pick(call, 0), len(chunk.sent))
        if chunk.has_loss:
            value = self._pick(call, 1)
            self.loss = self._sum(self.loss, (value,), (value.meta["val"],))
        if chunk.written:
            values = self._pick(call, 3)
            call.meta["buffers"] = list(chunk.written)
            for index, name in enumerate(chunk.written):
                self.buffers[chunk.index, name] = self._pick(values, index)
        if chunk.backward is not None:
            stored = self._pick(call, 2)
            self.results[step.chunk, step.micro_batch] = [
                self._pick(stored, i) for i in range(len(call.meta["val"][2]))
            ]

    def _backward(self, step: Step, received: list[fx.Node]) -> None:
        chunk = self._chunk(step)
        if chunk.backward is None:
            return
        stored = self.results.pop((step.chunk, step.micro_batch))
        args = [*self.in_use.of(step), *stored, *received]
        call = self._call_chunk(f"chunk{chunk.index}_backward", chunk.backward, args)
        if chunk.sent_gradients:
            self.transfers.pass_on(step, self._pick(call, 0), len(chunk.sent_gradients))
        if chunk.weight_backward is not None:
            kept = self._pick(call, 1)
            self.results[step.chunk, step.micro_batch] = [
                *(stored[i] for i in chunk.weight_saved),
                *(self._pick(kept, i) for i in range(len(kept.meta["val"]))),
            ]
        elif chunk.parameter_gradients:
            self.sums.add(chunk, call)

    def _weight_backward(self, step: Step) -> None:
        chunk = self._chunk(step)
        if chunk.weight_backward is None:
            return
        args = [*self.in_use.of(step), *self.results.pop((step.chunk, step.micro_batch))]
        name = f"chunk{chunk.index}_weight_backward"
        call = self._call_chunk(name, chunk.weight_backward, args)
        self.sums.add(chunk, call)

    # -- the end of the step

    def _zeros(self, name: str) -> fx.Node:
        """The gradient of a parameter that only another stage has one of."""
        val = self.parameters[name].meta["val"]
        node = self.graph.call_function(
            aten.zeros.default, (list(val.shape),), {"dtype": val.dtype}
        )
        node.meta = {"val": val}
        return node

    def _reduce_loss(self) -> fx.Node:
        """The loss of the step, on every rank."""
        loss = self.unit.structure.loss
        meta = self.variant.value_meta[loss.instance, loss.output]
        value = self._master(meta["val"])
        if self.loss is None:
            node = self.graph.call_function(aten.full.default, ([], 0.0), {"dtype": value.dtype})
            node.meta = {"val": value}
        else:
            node = self._pick(self.loss, 0)
        axes = [axis for axis in ("pp", "dp") if self.settings.mesh.axis_size(axis) > 1]
        if isinstance(meta.get("placement", {}).get("tp"), Partial):
            axes.append("tp")
        if not axes:
            return node
        start = self._act(c10d.all_reduce.default, node, "sum", ",".join(axes), val=value)
        return self._act(c10d.wait_tensor.default, start, val=value)

    def _optimizer(self, gradients: dict[str, fx.Node]) -> OptimizerStep | None:
        if self.settings.optimizer is None:
            return None
        return OptimizerStep(
            self._act,
            self.unit,
            self.parameters,
            gradients,
            {key: node for (kind, key), node in self.inputs.items() if kind == "optimizer"},
            self.inputs["step", ""],
            self.inputs.get(("skipped", "")),
        )


def _values(gm: fx.GraphModule) -> tuple[Any, ...]:
    """The fake tensors that a chunk's graph returns, nested as it returns them."""

    def value(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return item.meta["val"]
        return None if item is None else tuple(map(value, item))

    (returned,) = gm.graph.output_node().args
    return tuple(map(value, cast(Sequence[Any], returned)))
