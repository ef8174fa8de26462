"""Build the rank graph of each pipeline stage: one training step in schedule order.

    %x0 = wait(recv(..))                       the schedule's forwards and backwards, with transfers
    %f0 = chunk0_forward(.., %x0)
    %b0 = chunk0_backward(..)
    %g = accumulate(None, %b0[1])              gradients summed over micro-batches
    %r = all_reduce(flatten(%g), 'dp')         reduced once, over every axis that owes it
    %p = adamw(..)                             the optimizer's actions

Ranks that differ only on dp, or on tp where their shards have equal shapes, run the same graph;
their coordinates are nodes.
Numerics: the sum over micro-batches runs in the schedule's order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from msc.ir import actions
from msc.ir.placement import Partial
from msc.ir.structure import placeholders
from msc.ir.torch_private import lazy_graph_module
from msc.passes.chunks import Chunk, Key
from msc.passes.compilation import Compilation, Variant
from msc.passes.gradient_buckets import buckets
from msc.passes.optimizer_step import OptimizerStep, state_keys
from msc.passes.schedules import Step, schedule_of

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def build_rank_graph(unit: Compilation, variant: Variant, stage: int) -> fx.GraphModule:
    """The step of the ranks of a variant at pp coordinate `stage`."""
    return _Builder(unit, variant, stage).build()


class _Builder:
    def __init__(self, unit: Compilation, variant: Variant, stage: int) -> None:
        self.unit = unit
        self.variant = variant
        self.settings = unit.settings
        self.stage = stage
        self.num_stages = unit.settings.mesh.axis_size("pp")
        self.chunk: Chunk = variant.chunks[stage]
        trained = {name for chunk in variant.chunks for name in chunk.parameter_gradients}
        self.trained = [name for name in self.chunk.parameters if name in trained]
        self.forward_values = _values(self.chunk.forward)
        self.backward_values = _values(self.chunk.backward) if self.chunk.backward else ()
        self.graph = fx.Graph()
        self.modules: dict[str, fx.GraphModule] = {}
        self.inputs: dict[tuple[str, str], fx.Node] = {}
        self.parameters: dict[str, fx.Node] = {}
        self.coordinates: dict[str, fx.Node] = {}
        self.step_values: dict[str, fx.Node] = {}
        self.tokens: dict[str, fx.Node] = {}
        self.results: dict[int, list[fx.Node]] = {}
        self.total: fx.Node | None = None
        self.loss: fx.Node | None = None

    def build(self) -> fx.GraphModule:
        self._placeholders()
        self._computed = self._lowered()
        self._prologue()
        steps = schedule_of(self.settings.schedule)(
            self.stage, self.num_stages, self.settings.micro_batches
        )
        for step in steps:
            (self._forward if step.kind == "forward" else self._backward)(step)
        for token in self.tokens.values():
            self._act(actions.wait, token)
        gradients = self._reduce_gradients()
        output: dict[str, Any] = {
            "loss": self._reduce_loss(),
            "gradients": tuple(gradients.values()),
        }
        if self.chunk.written:
            output["buffers"] = tuple(self.inputs["buffer", name] for name in self.chunk.written)
        optimizer = self._optimizer(gradients)
        if optimizer is not None:
            output |= optimizer.append()
        self.graph.output(output)
        gm = lazy_graph_module(self.modules, self.graph)
        gm.meta["gradients"] = list(gradients)
        gm.meta["buffers"] = list(self.chunk.written)
        if optimizer is not None:
            gm.meta["parameters"] = optimizer.changed
            gm.meta["optimizer"] = optimizer.kept
        return gm

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
        by_key = {(n.meta["kind"], n.meta["name"]): n for n in placeholders(self.chunk.forward)}
        for name in self.chunk.parameters:
            node = by_key["parameter", name]
            meta = {**node.meta, "val": self._master(node.meta["val"])}
            self.parameters[name] = self._placeholder(node.name, meta)
        if self.settings.optimizer is not None:
            for key in state_keys(self.settings, self.trained):
                state, _, name = key.partition(".")
                node = self.parameters[name]
                meta = {**node.meta, "kind": "optimizer", "name": key}
                placeholder = self._placeholder(f"{state}_{node.name}", meta)
                self.inputs["optimizer", key] = placeholder
        needed = list(self.chunk.others)
        prologue = self.unit.local_prologue
        if prologue is not None and any(kind == "step" for kind, _ in needed):
            needed += [(n.meta["kind"], n.meta["name"]) for n in placeholders(prologue.gm)]
        sources = {
            (n.meta["kind"], n.meta["name"]): n
            for gm in (self.chunk.forward, *((prologue.gm,) if prologue else ()))
            for n in reversed(placeholders(gm))
        }
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

    def _master(self, value: torch.Tensor) -> torch.Tensor:
        """A value of a chunk as the step holds or sums it: floating ones in the master dtype."""
        if self.settings.master is None or not value.is_floating_point():
            return value
        with self.unit.fake_mode:
            return torch.empty(value.shape, dtype=self.settings.master)

    def _lowered(self) -> list[fx.Node]:
        """The parameters as the chunk computes with them, converted once per step."""
        by_name = {
            n.meta["name"]: n
            for n in placeholders(self.chunk.forward)
            if n.meta["kind"] == "parameter"
        }
        found = []
        for name, node in self.parameters.items():
            value = by_name[name].meta["val"]
            same = value.dtype == node.meta["val"].dtype
            converted = node if same else self._act(aten.to.dtype, node, value.dtype, val=value)
            found.append(converted)
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
        if prologue is None or not any(kind == "step" for kind, _ in self.chunk.others):
            return
        args = []
        for node in placeholders(prologue.gm):
            kind, name = node.meta["kind"], node.meta["name"]
            args.append(self._coordinate(name) if kind == "coordinate" else self.inputs[kind, name])
        outputs = prologue.gm.graph.output_node().args[0]
        val = tuple(node.meta["val"] for node in outputs)  # type: ignore[union-attr]
        call = self._call("prologue", prologue.gm, args, val)
        for index, name in enumerate(self.unit.prologue_names):
            self.step_values[name] = self._pick(call, index)

    def _others(self, micro_batch: int) -> list[fx.Node]:
        """What a chunk reads besides parameters and activations, for one micro-batch."""
        nodes = []
        by_key = {(n.meta["kind"], n.meta["name"]): n for n in placeholders(self.chunk.forward)}
        count = self.settings.micro_batches
        for kind, name in self.chunk.others:
            val = by_key[kind, name].meta["val"]
            if kind == "input":
                dim = self.settings.batch_dims.get(name)
                node = self.inputs[kind, name]
                if dim is not None and count > 1:
                    node = self._act(actions.micro_batch, node, dim, micro_batch, count, val=val)
                nodes.append(node)
            elif kind == "coordinate" and name == "mb":
                nodes.append(self._act(actions.micro_batch_index, micro_batch, val=val))
            elif kind == "coordinate":
                nodes.append(self._coordinate(name))
            elif kind == "step":
                nodes.append(self.step_values[name])
            else:
                nodes.append(self.inputs[kind, name])
        return nodes

    def _receive(self, keys: Sequence[Key], stage: int, gradient: bool) -> list[fx.Node]:
        if not keys:
            return []
        values = [self.variant.value_meta[key]["val"] for key in keys]
        shapes = [tuple(value.shape) for value in values]
        dtypes = [value.dtype for value in values]
        channel = f"pp:{stage}>{self.stage}"
        token = self._act(actions.recv, stage, channel, shapes, dtypes)
        done = self._act(actions.wait, token, val=tuple(values))
        return [self._pick(done, index) for index in range(len(keys))]

    def _send(self, values: Sequence[fx.Node], stage: int) -> None:
        if not values:
            return
        channel = f"pp:{self.stage}>{stage}"
        if channel in self.tokens:
            # the buffers of the transfer before are free once it is complete
            self._act(actions.wait, self.tokens[channel])
        self.tokens[channel] = self._act(actions.send, list(values), stage, channel)

    def _forward(self, step: Step) -> None:
        chunk = self.chunk
        received = self._receive(chunk.received, self.stage - 1, gradient=False)
        args = [*self._computed, *self._others(step.micro_batch), *received]
        val = self.forward_values
        call = self._call(f"chunk{chunk.index}_forward", chunk.forward, args, val)
        if chunk.sent:
            values = self._pick(call, 0)
            self._send([self._pick(values, i) for i in range(len(chunk.sent))], self.stage + 1)
        if chunk.has_loss:
            value = self._pick(call, 1)
            self.loss = self._sum(self.loss, (value,), (value.meta["val"],))
        if chunk.written:
            values = self._pick(call, 3)
            for index, name in enumerate(chunk.written):
                self.inputs["buffer", name] = self._pick(values, index)
        if chunk.backward is not None:
            stored = self._pick(call, 2)
            self.results[step.micro_batch] = [self._pick(stored, i) for i in range(len(val[2]))]

    def _backward(self, step: Step) -> None:
        chunk = self.chunk
        if chunk.backward is None:
            return
        received = self._receive(chunk.received_gradients, self.stage + 1, gradient=True)
        args = [*self._computed, *self.results.pop(step.micro_batch), *received]
        val = self.backward_values
        call = self._call(f"chunk{chunk.index}_backward", chunk.backward, args, val)
        if chunk.sent_gradients:
            values = self._pick(call, 0)
            nodes = [self._pick(values, i) for i in range(len(chunk.sent_gradients))]
            self._send(nodes, self.stage - 1)
        if chunk.parameter_gradients:
            parts = self._pick(call, 1)
            self.total = self._sum(self.total, parts, val[1])

    # -- the end of the step

    def _reduce_gradients(self) -> dict[str, fx.Node]:
        gradients = self._summed_gradients()
        limit = self.settings.bucket_bytes
        first: dict[str, list[str]] = {}
        tied: dict[str, list[str]] = {}
        for name in gradients:
            states = self.unit.parameter_states[name]
            axes = [a for a, s in states.items() if a != "mb" and isinstance(s.grad, Partial)]
            if axes:
                first.setdefault(",".join(axes), []).append(name)
            stages = self.unit.stages_of[name]
            if len(stages) > 1:
                tied.setdefault(f"pp[{','.join(map(str, stages))}]", []).append(name)
        for group, members in first.items():
            for bucket in buckets(members, gradients, limit):
                self._all_reduce(group, bucket, gradients)
        # stages read tied weights in different orders; what they reduce together has one order
        for group, members in sorted(tied.items()):
            for bucket in buckets(sorted(members), gradients, limit):
                self._all_reduce(group, bucket, gradients)
        return gradients

    def _summed_gradients(self) -> dict[str, fx.Node]:
        """Gradients over all micro-batches; zero where only another stage has one of a weight."""
        gradients = {}
        for name in self.trained:
            if name in self.chunk.parameter_gradients:
                assert self.total is not None
                index = self.chunk.parameter_gradients.index(name)
                gradients[name] = self._pick(self.total, index)
                continue
            val = self.parameters[name].meta["val"]
            zeros = self.graph.call_function(
                aten.zeros.default, (list(val.shape),), {"dtype": val.dtype}
            )
            zeros.meta = {"val": val}
            gradients[name] = zeros
        return gradients

    def _all_reduce(self, group: str, names: list[str], gradients: dict[str, fx.Node]) -> None:
        values = [gradients[name].meta["val"] for name in names]
        with self.unit.fake_mode:
            val = torch.empty(sum(v.numel() for v in values), dtype=values[0].dtype)
        nodes = [gradients[name] for name in names]
        flat = self._act(actions.flatten, nodes, val=val)
        start = self._act(c10d.all_reduce.default, flat, "sum", group, val=val)
        done = self._act(c10d.wait_tensor.default, start, val=val)
        shapes = [tuple(v.shape) for v in values]
        split = self._act(actions.unflatten, done, shapes, val=tuple(values))
        for index, name in enumerate(names):
            gradients[name] = self._pick(split, index)

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
