"""What the normalizing passes share: emit a call before a node, with its value and its origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from msc.ir.torch_private import FakeTensorMode, OpOverload, argument_names, new_fake
from msc.ir.values import carry

aten = torch.ops.aten


def mode_of(gm: fx.GraphModule) -> FakeTensorMode:
    """The mode of every fake tensor of a captured graph."""
    mode: FakeTensorMode = gm.meta["fake_mode"]
    return mode


class Emitter:
    """Inserts calls before `anchor`, which they replace or prepare; they carry its origin.

    A call gets its `val` from `shape` and `dtype` where the caller knows them, and otherwise by
    running the op on fake tensors, which costs some hundred microseconds.
    """

    def __init__(self, gm: fx.GraphModule, anchor: fx.Node) -> None:
        self.gm = gm
        self.anchor = anchor

    def __call__(
        self,
        target: Callable[..., Any],
        *args: Any,
        shape: Sequence[int] | None = None,
        like: fx.Node | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """`target(*args, **kwargs)`; `shape` with the dtype of `like` (default: first operand)."""
        with self.gm.graph.inserting_before(self.anchor):
            node = self.gm.graph.create_node(
                "call_function", target, args, kwargs, short_name(target)
            )
        carry(self.anchor, node)
        if shape is not None:
            source = like if like is not None else node.all_input_nodes[0]
            node.meta["val"] = new_fake(mode_of(self.gm), shape, source.meta["val"].dtype)
        else:
            node.meta["val"] = evaluate(self.gm, node)
        return node


def short_name(target: Callable[..., Any]) -> str:
    """`linear` for `msc.linear.default`."""
    return str(target).split(".")[1] if isinstance(target, OpOverload) else target.__name__


def evaluate(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What a call yields, as fake tensors."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with mode_of(gm), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let every reader of `old` read `new`, and remove `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's value."""
    return tuple(node.meta["val"].shape)


def calls(gm: fx.GraphModule, *targets: Callable[..., Any]) -> list[fx.Node]:
    """The calls of any of `targets`, in order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in targets]


def named_arguments(node: fx.Node, defaults: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, over `defaults`: tracing drops trailing defaults."""
    assert isinstance(node.target, OpOverload)
    names = list(argument_names(node.target))
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def is_parameter(node: Any) -> bool:
    """Whether a node is a parameter of the model."""
    return isinstance(node, fx.Node) and node.meta.get("kind") == "parameter"


def needing_grad(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose value has a gradient: what trainable parameters reach in floating types."""
    result: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            trains = node.meta.get("requires_grad", False)
        else:
            trains = (
                node.target is not aten.detach.default
                and any(source in result for source in node.all_input_nodes)
                and _differentiable(node.meta.get("val"))
            )
        if trains:
            result.add(node)
    return result


def _differentiable(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_differentiable(item) for item in value)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
