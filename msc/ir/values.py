"""What is known of a graph's values: the keys of `node.meta` that MSC reads and writes.

val             a fake tensor (or a tuple of them): shape and dtype, local to a rank once sharded
placement       {axis: Placement}; an axis that is left out replicates
grad_placement  {axis: Placement} of the value's gradient; absent where there is none
module_path     "layers.0.mlp.down": the module that computed the value
source          "model.py:12 in forward": the user's line
phase           "forward", "backward", "recompute" (a call of the forward again in the backward)
conversion      of what turns a value from one state into another: (node of the block, result, axis,
                state that it has, state that is read), as ("linear", 0, "tp", "P", "S1")
kind            of a placeholder: "parameter", "buffer", "input", "coordinate", "rng", "value",
                "saved", "gradient", "optimizer", "step", "skipped"
name            of a placeholder: the parameter's, buffer's or input's name as the user knows it
requires_grad   of a parameter: whether it trains
opened          in a rank graph, of what stands in place of a call: the graph that was called, as
                "chunk0_backward"; of a call in an opened call the outer one
marks           {name: value} that a pass left for a later one, such as {"recompute": True}; they
                are part of the printed text, so setting one counts as a change
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from msc.ir.placement import Placement

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

CARRIED = ("module_path", "source", "phase", "conversion")
"""Keys that a rewritten node takes over from the node that it replaces."""


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The tensors that a node yields, in order; empty if it yields none."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The one tensor that a node yields."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"%{node.name} yields {type(value).__name__}, not one tensor")
    return value


def operand_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments, with repetition, in `tree_flatten` order."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def placements(node: fx.Node) -> dict[str, Placement]:
    """The placements of a value on the axes where it is not replicated."""
    return dict(node.meta.get("placement", {}))


def describe(value: Any) -> str:
    """`f32[4,8]`, or a tuple of such; the empty string for what is no tensor."""
    if isinstance(value, torch.Tensor):
        shape = ",".join(str(length) for length in value.shape)
        return f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}[{shape}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe(item) or "none" for item in value) + ")"
    return ""


def where(node: fx.Node) -> str:
    """Module path and source line of a node, for messages."""
    parts = [node.meta.get("module_path") or "", node.meta.get("source") or ""]
    return ", ".join(part for part in parts if part) or f"%{node.name}"


def carry(old: fx.Node | Iterable[fx.Node], new: fx.Node) -> fx.Node:
    """Copy module path, source line and phase to a node that replaces another."""
    sources = [old] if isinstance(old, fx.Node) else list(old)
    for key in CARRIED:
        for source in sources:
            if key in source.meta:
                new.meta.setdefault(key, source.meta[key])
                break
    return new
