"""Replace ops that write to an operand by ops that make a new value.

    %add_: f32[8,4] = aten.add_.Tensor(%x, %y)        %add: f32[8,4] = aten.add.Tensor(%x, %y)
    %cos: f32[8,4] = aten.cos(%x)                ->   %cos: f32[8,4] = aten.cos(%add)

A write to a part is carried into the whole:

    %row: f32[4] = aten.select.int(%x, 0, 2)          %row: f32[4] = aten.select.int(%x, 0, 2)
    %fill_: f32[4] = aten.fill_.Scalar(%row, 1)  ->   %fill: f32[4] = aten.fill.Scalar(%row, 1)
                                                      %whole = aten.select_scatter(%x, %fill, 0, 2)

A write to a buffer makes its last value an output of the graph, after the loss:
`gm.meta["buffers"]` names these outputs. What cannot be told apart from an alias, and writes to
parameters and inputs, is refused.

Numerics: kept bit for bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from msc.ir.errors import CaptureError
from msc.ir.torch_private import OpOverload, is_mutable, may_alias
from msc.ir.values import carry, where
from msc.passes.normalize.rewrite import Emitter, aten, named_arguments, shape_of


def functionalize(gm: fx.GraphModule) -> int:
    """Replace every in-place op; returns their number.

    Raises `CaptureError`, with the user's line, for a write that has no functional form.
    """
    _refuse_running_statistics(gm)
    gm.meta["buffers"] = ()
    if not any(_writes(node) for node in gm.graph.nodes):
        return 0
    state = _State()
    writes = []
    for node in list(gm.graph.nodes):
        state.refuse_stale(node)
        source = _viewed(node)
        if _writes(node):
            _write(gm, node, state)
            writes.append(node)
            continue
        if source is not None:
            state.base[node] = state.original(source)
        node.args = fx.map_arg(node.args, state.value)
        node.kwargs = fx.map_arg(node.kwargs, state.value)
    _return_buffers(gm, state)
    for node in reversed(writes):
        gm.graph.erase_node(node)
    return len(writes)


def _return_buffers(gm: fx.GraphModule, state: _State) -> None:
    """Make the new values of buffers outputs, each as a node that nothing else reads."""
    output = gm.graph.output_node()
    emit = Emitter(gm, output)
    results: list[Any] = [*output.args[0]]  # type: ignore[misc]
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] == "buffer" and node in state.current:
            value = state.value(node)
            results.append(emit(aten.detach.default, value))
            carry(value, results[-1])
            names.append(node.meta["name"])
    output.args = (tuple(results),)
    gm.meta["buffers"] = tuple(names)


@dataclass
class _State:
    """What is known up to a node, in terms of the nodes of the graph as it was.

    base: what a view is a view of. same: a write -> what it writes to. current: the node that holds
    a node's present value. stale: a view of memory that changed -> the write; nobody may read it.
    """

    base: dict[fx.Node, fx.Node] = field(default_factory=dict)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    current: dict[fx.Node, fx.Node] = field(default_factory=dict)
    stale: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def original(self, node: fx.Node) -> fx.Node:
        """The node whose memory `node` names."""
        return self.same.get(node, node)

    def value(self, node: fx.Node) -> fx.Node:
        """The node that holds the present value of `node`."""
        original = self.original(node)
        return self.current.get(original, original)

    def chain(self, node: fx.Node) -> list[fx.Node]:
        """`node`, what it is a view of, and so on up to a value that is no view."""
        chain = [node]
        while chain[-1] in self.base:
            chain.append(self.base[chain[-1]])
        return chain

    def refuse_stale(self, node: fx.Node) -> None:
        """Refuse a node that reads a view whose memory was changed through another view."""
        for source in node.all_input_nodes:
            write = self.stale.get(self.original(source))
            if write is not None:
                raise _refusal(write, f"another view of that memory is read at {where(node)}")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_mutable(node.target)


def _viewed(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        # a part of what split returns; the results of topk have memory of their own
        return node.args[0] if _viewed(node.args[0]) is not None else None
    if isinstance(node.target, OpOverload) and may_alias(node.target):
        return node.args[0]
    return None


def _write(gm: fx.GraphModule, node: fx.Node, state: _State) -> None:
    if not isinstance(node.args[0], fx.Node):
        raise _refusal(node, "it writes to several tensors at once")
    written = state.original(node.args[0])
    chain = state.chain(written)
    _refuse_placeholder(node, chain[-1])
    for view in state.base:
        if view not in chain and state.chain(view)[-1] is chain[-1]:
            state.stale[view] = node
    emit = Emitter(gm, node)
    new = _twin(emit, node, written, state)
    state.same[node] = written
    state.current[written] = new
    for part, whole in pairwise(chain):
        new = _into_whole(emit, node, part, whole, new, state)
        state.current[whole] = new


def _twin(emit: Emitter, node: fx.Node, written: fx.Node, state: _State) -> fx.Node:
    """The value that the op writes, as a new value in the shape and dtype of what it writes to."""
    shape, dtype = shape_of(written), written.meta["val"].dtype
    args: Any = fx.map_arg(node.args, state.value)
    kwargs: Any = fx.map_arg(node.kwargs, state.value)
    if node.target in (aten.copy_.default, aten.fill_.Tensor):
        new: fx.Node = args[1]
        if new.meta["val"].dtype != dtype:
            new = emit(aten.to.dtype, new, dtype)
        return emit(aten.expand.default, new, list(shape), shape=shape)
    new = emit(_functional(node), *args, **kwargs)
    return new if new.meta["val"].dtype == dtype else emit(aten.to.dtype, new, dtype)


def _functional(node: fx.Node) -> OpOverload:
    """`aten.add.Tensor` for `aten.add_.Tensor`."""
    namespace, name, overload = str(node.target).split(".")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twin = getattr(packet, overload, None)
    if not name.endswith("_") or not isinstance(twin, OpOverload):
        raise _refusal(node, "it has no form that returns a new tensor")
    return twin


def _into_whole(
    emit: Emitter, node: fx.Node, part: fx.Node, whole: fx.Node, new: fx.Node, state: _State
) -> fx.Node:
    """`whole` with its part `part` replaced by `new`."""
    if part.target is operator.getitem:
        raise _refusal(node, f"it writes to a part of {part.args[0].target}")  # type: ignore[union-attr]
    shape, before, rest = shape_of(whole), state.value(whole), part.args[1:]
    if part.target is aten.select.int:
        return emit(aten.select_scatter.default, before, new, *rest, shape=shape)
    if part.target is aten.slice.Tensor:
        if shape_of(part) == shape:
            return new
        return emit(aten.slice_scatter.default, before, new, *rest, shape=shape)
    if part.target in (aten.transpose.int, aten.t.default):
        return emit(part.target, new, *rest, shape=shape)
    if part.target in (aten.view.default, aten.unsqueeze.default, aten.squeeze.dim):
        return emit(aten.reshape.default, new, list(shape), shape=shape)
    if part.target in (aten.alias.default, aten.detach.default):
        return new
    raise _refusal(node, f"it writes through {part.target}")


def _refuse_placeholder(node: fx.Node, root: fx.Node) -> None:
    if root.op != "placeholder" or root.meta["kind"] == "buffer":
        return
    kind, name = root.meta["kind"], root.meta["name"]
    advice = {
        "parameter": "Only the optimizer changes parameters.",
    }.get(kind, "Make a new tensor in place of it.")
    raise CaptureError(
        f"{kind.capitalize()} '{name}' is changed in place at {where(node)}. {advice}"
    )


def _refuse_running_statistics(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.target is not aten.instance_norm.default:
            continue
        args = named_arguments(node, {})
        running = args.get("running_mean")
        if args["use_input_stats"] and isinstance(running, fx.Node):
            raise CaptureError(
                f"Buffer '{running.meta.get('name', running.name)}' is changed at {where(node)}: "
                "an instance norm in train mode keeps running statistics. Call .eval() on this "
                "module (its statistics are then constants), or leave out track_running_stats."
            )


def _refusal(node: fx.Node, reason: str) -> CaptureError:
    return CaptureError(
        f"The in-place op {node.target} at {where(node)} cannot be captured: {reason}. Write it "
        "out of place."
    )
