"""Names in generated source: module-level bindings and local variables."""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from msc.ir.torch_private import OpOverload

RESERVED = frozenset({"rt", "args", "box", "_", *keyword.kwlist, *dir(builtins)})
_SINGLETONS = (torch.dtype, torch.layout, torch.memory_format, torch.device)


class Namespace:
    """Module-level names of generated source and the objects behind them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._locals: set[str] = set()

    def bind(self, hint: str, value: Any) -> str:
        """The name of `value`: the one it has already, or a new one like `hint`."""
        known = self._names.get(id(value))
        if known is None:
            known = self.reserve(hint)
            self.values[known] = value  # keeps the object alive, so that its id stays its own
            self._names[id(value)] = known
        return known

    def reserve(self, hint: str) -> str:
        """A module-level name like `hint` that nothing has yet."""
        base = re.sub(r"\W", "_", hint) or "value"
        base = f"_{base}" if base[0].isdigit() else base
        name, number = base, 1
        while name in self.values or name in self._locals or name in RESERVED:
            number += 1
            name = f"{base}_{number}"
        self.values[name] = None
        return name

    def local_names(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
        """A variable for each node of one function; later bindings stay clear of these."""
        names: dict[fx.Node, str] = {}
        taken: set[str] = set()
        for node in nodes:
            name = node.name
            while name in self.values or name in RESERVED or name in taken:
                name += "_"
            taken.add(name)
            names[node] = name
        self._locals |= taken
        return names


def op_name(target: Callable[..., Any]) -> str:
    """`aten_add_Tensor` for an overload, the function's name for anything else."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default").replace(".", "_")
    return getattr(target, "__name__", "function")


class Renderer:
    """Writes the arguments of nodes as Python expressions; binds what has no literal."""

    def __init__(self, names: dict[fx.Node, str], namespace: Namespace) -> None:
        self._names = names
        self._namespace = namespace

    def value(self, value: Any) -> str:
        """`value` as an expression."""
        if isinstance(value, fx.Node):
            return self._names[value]
        if value is None or isinstance(value, (bool, int, str)) or value is Ellipsis:
            return "..." if value is Ellipsis else repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, dict):
            items = (f"{self.value(key)}: {self.value(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            parts = (self.value(part) for part in (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        return self._bound(value)

    def _tuple(self, value: tuple[Any, ...]) -> str:
        inner = ", ".join(map(self.value, value))
        text = f"({inner},)" if len(value) == 1 else f"({inner})"
        if not hasattr(value, "_fields"):
            return text
        return f"{self._namespace.bind(type(value).__name__, type(value))}(*{text})"

    def _bound(self, value: Any) -> str:
        if isinstance(value, _SINGLETONS):
            return self._namespace.bind(str(value).removeprefix("torch."), value)
        return self._namespace.bind(f"constant_{type(value).__name__}", value)

    def arguments(self, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
        """The inside of a call's parentheses."""
        named = (f"{key}={self.value(item)}" for key, item in kwargs.items())
        return ", ".join([*map(self.value, args), *named])
