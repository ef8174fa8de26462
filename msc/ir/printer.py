"""Graphs as text: one line per node, the same for equal graphs, so that two texts can be diffed.

    rank 0 of tp=2
      %down: f32[8,16]{tp:S1} = parameter "layers.0.down.weight"
      %mm: f32[4,8]{tp:P} = msc.linear(%h, %down)  # layers.0.down
      %all_reduce: f32[4,8] = msc.all_reduce(%mm, 'sum', 'tp', 2, 'identity')  # layers.0.down
      return (%all_reduce,)

After the type stand the placements, `R~` where a replicated value has a partial gradient; axes that
replicate both are left out. Marks that passes left on a node follow its call, as `[recompute]`.
Nothing here depends on memory addresses, paths, times or hash order.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from msc.ir.actions import ACTIONS
from msc.ir.placement import VARYING, Partial, Placement, Replicate, State
from msc.ir.torch_private import OpOverload
from msc.ir.values import DTYPE_NAMES, describe

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def format_graph(gm: fx.GraphModule, title: str = "") -> str:
    """The text of a graph, without a final newline; indented under `title`, if there is one."""
    types: dict[int, str] = {}
    lines = [format_node(node, types) for node in gm.graph.nodes]
    return "\n".join([title, *(f"  {line}" for line in lines)] if title else lines)


def format_neighbourhood(gm: fx.GraphModule, node: fx.Node, around: int = 5) -> str:
    """The lines of up to `around` nodes before and after `node`, which `>` marks."""
    nodes = list(gm.graph.nodes)
    index = nodes.index(node)
    shown = nodes[max(0, index - around) : index + around + 1]
    return "\n".join(f"{'>' if each is node else ' '} {format_node(each)}" for each in shown)


def format_node(node: fx.Node, types: dict[int, str] | None = None) -> str:
    """The line of one node.

    types: the texts of values that were printed before, by id: a rank graph shows the same values
        for every micro-batch. It must not outlive the graph.
    """
    if node.op == "output":
        return f"return {format_argument(node.args[0])}"
    text = f"%{node.name}"
    type_text = format_type(node, types)
    if type_text:
        text += f": {type_text}"
    text += f" = {_format_call(node)}"
    marks = node.meta.get("marks")
    if marks:
        text += f" [{', '.join(_format_mark(mark, value) for mark, value in marks.items())}]"
    module_path = node.meta.get("module_path")
    return f"{text}  # {module_path}" if module_path else text


def format_type(node: fx.Node, types: dict[int, str] | None = None) -> str:
    """`f32[4,8]{tp:P}`; the empty string for a node that yields no tensor.

    types: as for `format_node`.
    """
    value = node.meta.get("val")
    if types is None:
        text = describe(value)
    elif (text := types.get(id(value), "")) == "":
        text = types[id(value)] = describe(value)
    return text + _format_placements(
        node.meta.get("placement") or {}, node.meta.get("grad_placement")
    )


def format_target(target: Any) -> str:
    """`aten.add.Tensor`, `aten.mm`, `send`: the name of what a node calls."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return type(target).__qualname__
    if target in ACTIONS:
        return str(name)
    module = str(getattr(target, "__module__", None) or "")
    module = {"_operator": "operator", "builtins": ""}.get(module, module)
    return f"{module}.{name}" if module else str(name)


def format_argument(value: Any) -> str:
    """An argument of a call: nodes as `%name`, containers item by item, the rest as literals."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, tuple):
        inner = ", ".join(map(format_argument, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(format_argument, value))}]"
    if isinstance(value, Mapping):
        items = (f"{format_argument(key)}: {format_argument(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice({', '.join(map(format_argument, parts))})"
    return _format_literal(value)


def _format_literal(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {describe(value)}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return format_target(value)
    text = repr(value)
    return type(value).__qualname__ if _ADDRESS.search(text) else text


def _format_call(node: fx.Node) -> str:
    if node.op == "placeholder":
        kind, name = node.meta.get("kind", "input"), node.meta.get("name")
        return kind if name is None else f'{kind} "{name}"'
    if node.op == "get_attr":
        return f'attribute "{node.target}"'
    if node.target is operator.getitem and len(node.args) == 2 and not node.kwargs:
        return f"{format_argument(node.args[0])}[{format_argument(node.args[1])}]"
    arguments = [format_argument(argument) for argument in node.args]
    arguments += [f"{key}={format_argument(value)}" for key, value in node.kwargs.items()]
    call = "call " if node.op == "call_module" else ""
    return f"{call}{format_target(node.target)}({', '.join(arguments)})"


def _format_mark(mark: str, value: Any) -> str:
    return mark if value is True else f"{mark}={format_argument(value)}"


def _format_placements(
    placement: Mapping[str, Placement], gradient: Mapping[str, Placement] | None
) -> str:
    parts = []
    for axis in dict.fromkeys([*placement, *(gradient or {})]):
        value = placement.get(axis, Replicate())
        text = str(value)
        if gradient is not None:
            text = _format_state(State(value, gradient.get(axis, Replicate())))
        if text != "R":
            parts.append(f"{axis}:{text}")
    return "{" + ",".join(parts) + "}" if parts else ""


def _format_state(state: State) -> str:
    """`R`, `R~`, `S0`, `P`; `S0~P` for a gradient that does not go with the value."""
    usual: Placement = Replicate() if isinstance(state.value, Partial) else state.value
    if state.grad == usual or state == VARYING:
        return str(state)
    return f"{state.value}~{state.grad}"
