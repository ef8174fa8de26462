"""Differentiate a local block: its forward graph, and the graph of its gradients.

    %y = msc.linear(%x, %w)      ->   forward:  %y = msc.linear(%x, %w)         return (%y,), saved
                                      backward: %dx = msc.linear_dgrad(%dy, %w)
                                                %dw = msc.linear_wgrad(%dy, %x)  return (%dx, %dw)

AOTAutograd traces both at once; the joint graph is cut where the forward's outputs are complete.
What the backward reads is saved: values of the forward, or its inputs. Collectives become start and
wait nodes. Numerics: kept bit for bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from msc.ir.errors import VerifyError
from msc.ir.structure import output_nodes, placeholders
from msc.ir.torch_private import joint_graph, joint_inputs, joint_outputs
from msc.ir.values import tensor_of
from msc.ir.walks import ancestors
from msc.passes.halves import Halves
from msc.passes.lower_collectives import lower_collectives

aten = torch.ops.aten

_CARRIED = ("module_path", "source", "conversion")


@dataclass(frozen=True)
class Saved:
    """A value that the backward reads: a placeholder of the forward, or one of its results."""

    is_input: bool
    index: int


@dataclass
class Differentiated:
    """One distinct block, ready to run.

    forward: the block's placeholders -> outputs, then `num_saved` saved results.
    backward: the values of `saved` in order, then one tangent per entry of `tangents` (a number of
        an output) -> one gradient per entry of `gradients` (a number of a placeholder).
    halves: of the backward, where the schedule splits it; they run in its place.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int
    num_saved: int
    saved: tuple[Saved, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    halves: Halves | None = None

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """Those that run."""
        split = self.halves
        backward = [self.backward] if split is None else [split.inputs, split.weights]
        return [gm for gm in (self.forward, *backward) if gm is not None]


def differentiate(gm: fx.GraphModule, fake_mode: Any, with_backward: bool = True) -> Differentiated:
    """Differentiate a rank-local block graph with respect to its differentiable placeholders."""
    inputs = placeholders(gm)
    if not with_backward or not any(node.meta.get("differentiable") for node in inputs):
        return _forward_only(gm)
    _separate_outputs(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            # survives the trace, also onto the backward nodes
            node.meta["custom"] = {key: node.meta.get(key) for key in _CARRIED}
    with fake_mode:
        values = [_like(node) for node in inputs]
    joint = joint_graph(gm, values)
    _drop_factors_of_one(joint)
    return _Splitter(gm, joint).run()


def _drop_factors_of_one(joint: fx.GraphModule) -> None:
    """Drop products with the number 1, as the gradient of `addcmul` has them."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.mul.Scalar):
        (x,) = node.all_input_nodes
        if node.args[1] == 1 and tensor_of(x).dtype == tensor_of(node).dtype:
            node.replace_all_uses_with(x)
            joint.graph.erase_node(node)


def _like(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return fresh.requires_grad_(bool(node.meta.get("differentiable")))


def _forward_only(gm: fx.GraphModule) -> Differentiated:
    forward = fx.GraphModule({}, fx.Graph())
    forward.graph.output(forward.graph.graph_copy(gm.graph, {}))
    forward.recompile()
    for old, new in zip(gm.graph.nodes, forward.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    lower_collectives(forward)
    return Differentiated(forward, None, len(output_nodes(gm)), 0, (), (), ())


def _separate_outputs(gm: fx.GraphModule) -> None:
    """Copy outputs that share the memory of an input or of another output.

    AOTAutograd gives an alias no tangent, so that a gradient that comes in by it would be lost.
    """
    taken = [tensor_of(node).untyped_storage() for node in placeholders(gm)]
    for node in dict.fromkeys(output_nodes(gm)):
        storage = tensor_of(node).untyped_storage()
        if any(storage is other for other in taken):
            _clone_output(gm, node)
        else:
            taken.append(storage)


def _clone_output(gm: fx.GraphModule, node: fx.Node) -> None:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        copy = gm.graph.call_function(aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    output.replace_input_with(node, copy)
    gm.recompile()


class _Splitter:
    def __init__(self, gm: fx.GraphModule, joint: fx.GraphModule) -> None:
        self.gm = gm
        self.joint = joint
        self.primals, self.tangents = joint_inputs(joint)
        self.outputs, self.grads = joint_outputs(joint)
        self.input_index = {node: index for index, node in self.primals.items()}
        self.forward_nodes = ancestors(self.outputs.values())
        for node in joint.graph.nodes:
            # a result that only the backward reads is picked in the forward, so that the others
            # of the same call need not be saved with it
            if node.target is operator.getitem and node.args[0] in self.forward_nodes:
                self.forward_nodes.add(node)
        for node in joint.graph.nodes:
            custom = node.meta.get("custom") or {}
            node.meta.update({k: v for k, v in custom.items() if v is not None})

    def run(self) -> Differentiated:
        names = placeholders(self.gm)
        wanted = [i for i, node in enumerate(names) if node.meta.get("differentiable")]
        gradients = [i for i in wanted if isinstance(self.grads.get(i), fx.Node)]
        grad_nodes = ancestors(self.grads[i] for i in gradients)
        backward_nodes = [
            n
            for n in self.joint.graph.nodes
            if n in grad_nodes and n not in self.forward_nodes and n.op == "call_function"
        ]
        inside = set(backward_nodes)
        reads: dict[fx.Node, None] = {}
        for node in backward_nodes:
            reads.update(dict.fromkeys(a for a in node.all_input_nodes if a not in inside))
        reads.update(dict.fromkeys(self.grads[i] for i in gradients if self.grads[i] not in inside))
        tangents = [i for i, node in sorted(self.tangents.items()) if node in reads]
        saved_nodes = [n for n in reads if n not in self.tangents.values()]
        results = [n for n in saved_nodes if n not in self.input_index]
        saved = tuple(
            Saved(True, self.input_index[n])
            if n in self.input_index
            else Saved(False, results.index(n))
            for n in saved_nodes
        )
        forward = self._forward(results)
        backward = self._backward(saved_nodes, tangents, backward_nodes, gradients)
        self._check_gradients(wanted, gradients)
        return Differentiated(
            forward,
            backward,
            len(self.outputs),
            len(results),
            saved,
            tuple(tangents),
            tuple(gradients),
        )

    def _check_gradients(self, wanted: list[int], gradients: list[int]) -> None:
        names = placeholders(self.gm)
        for index in wanted:
            read = any(user.meta.get("differentiable") for user in names[index].users)
            if index not in gradients and read:
                node = names[index]
                raise VerifyError(
                    f'differentiate: {node.meta["kind"]} "{node.meta.get("name", node.name)}" is '
                    "used and trainable, but its block has no gradient for it. "
                    "An op on its way to the loss has lost its gradient."
                )

    def _forward(self, results: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        originals = placeholders(self.gm)
        for index, original in enumerate(originals):
            new = graph.placeholder(original.name)
            new.meta = dict(original.meta)
            if index in self.primals:
                env[self.primals[index]] = new
        for node in self.joint.graph.nodes:
            if node in self.forward_nodes and node.op == "call_function":
                env[node] = _copy(graph, node, env, "forward")
        outputs = [env[self.outputs[i]] for i in range(len(self.outputs))]
        graph.output(tuple(outputs + [env[node] for node in results]))
        for old, new in zip(output_nodes(self.gm), outputs, strict=True):
            for key in ("placement", "grad_placement"):
                if key in old.meta:
                    new.meta[key] = old.meta[key]
        return _finish(graph)

    def _backward(
        self,
        saved: list[fx.Node],
        tangents: list[int],
        nodes: list[fx.Node],
        gradients: list[int],
    ) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        originals = placeholders(self.gm)
        for node in saved:
            env[node] = graph.placeholder(node.name)
            if node in self.input_index:
                env[node].meta = dict(originals[self.input_index[node]].meta)
            else:
                env[node].meta = {"val": node.meta["val"], "kind": "saved", "name": node.name}
        for index in tangents:
            node = self.tangents[index]
            env[node] = graph.placeholder(node.name)
            output = output_nodes(self.gm)[index]
            env[node].meta = {
                "val": node.meta["val"],
                "kind": "gradient",
                "name": output.name,
                "placement": output.meta.get("grad_placement", {}),
            }
        for node in nodes:
            env[node] = _copy(graph, node, env, "backward")
        graph.output(tuple(env[self.grads[i]] for i in gradients))
        for index in gradients:
            placement = originals[index].meta.get("grad_placement", {})
            env[self.grads[index]].meta.setdefault("placement", placement)
        return _finish(graph)


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], phase: str) -> fx.Node:
    new = graph.node_copy(node, env.__getitem__)
    new.meta = {key: node.meta[key] for key in ("val", *_CARRIED) if key in node.meta}
    new.meta["phase"] = phase
    return new


def _finish(graph: fx.Graph) -> fx.GraphModule:
    gm = fx.GraphModule({}, graph)
    gm.graph.eliminate_dead_code()
    lower_collectives(gm)
    gm.recompile()
    return gm
