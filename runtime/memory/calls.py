"""What one call of a graph allocates: found by running it, on fake tensors, as generated code does.

A call's *operands* are the tensors of its arguments, in the order of `operand_nodes`. Its results
lie in the memory of an operand or in memory of their own; while it runs it may need more.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from msc.codegen.fast_calls import function_of
from msc.codegen.in_place import in_place_calls
from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.lifetime import reuses_total
from msc.ir import actions
from msc.ir.communication import FUSED, STARTS, WAITS
from msc.ir.mesh import Mesh
from msc.ir.torch_private import FakeTensorMode, storage_key
from msc.ir.values import operand_nodes
from msc.runtime.actions import LocalActions
from msc.runtime.fused_collectives import UNFUSED
from msc.runtime.memory.meter import StorageMeter


@dataclass(frozen=True)
class Fresh:
    """Memory that a call allocates: results with equal `number` share it."""

    number: int
    size: int


@dataclass(frozen=True)
class Operand:
    """The memory of an operand."""

    number: int


@dataclass(frozen=True)
class CallMemory:
    """results: as the call's value, with `Fresh`, `Operand` or None for each leaf.

    peak: the most bytes that are live while it runs, over those live before, results included.
    """

    results: Any
    peak: int


class CallMemories:
    """Finds what calls allocate; equal calls are run once, in whatever graph they stand."""

    def __init__(self, choice: KernelChoice | None = None) -> None:
        self._choice = choice
        self._known: dict[Any, tuple[Any, CallMemory]] = {}

    def of(self, gm: fx.GraphModule) -> dict[fx.Node, CallMemory]:
        """Of each computing call of a graph; not of items, communication and called graphs."""
        return _Runner(gm, self._known, self._choice).run()


class _FakeMeter(StorageMeter):  # type: ignore[no-untyped-call]
    """Lets kernels read numbers back, as of the first rank and of valid ids: all are 0."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Runner:
    def __init__(
        self,
        gm: fx.GraphModule,
        known: dict[Any, tuple[Any, CallMemory]],
        choice: KernelChoice | None,
    ) -> None:
        self.gm = gm
        self.choice = choice
        self.known = known
        self.mode = FakeTensorMode()
        self.values: dict[fx.Node, Any] = {}
        self.in_place = in_place_calls(gm)
        self.local = LocalActions(Mesh.parse(""), 0)
        self.found: dict[fx.Node, CallMemory] = {}

    def run(self) -> dict[fx.Node, CallMemory]:
        with self.mode, torch.no_grad():
            for node in self.gm.graph.nodes:
                if node.op != "output":
                    self.values[node] = self._value(node)
        return self.found

    def _value(self, node: fx.Node) -> Any:
        args: Any
        if node.op == "get_attr":
            constant = operator.attrgetter(str(node.target))(self.gm)
            return _Value.of(self.mode.from_tensor(constant))
        if node.op != "call_function" or node.target in STARTS or node.target in WAITS:
            return pytree.tree_map(_Value.like, node.meta.get("val"))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        given = [self.values[operand] for operand in operand_nodes(node)]
        operands = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, _Value)]
        function, args = self._function(node, args)
        key = (function, _frozen((args, kwargs)), _sharing(operands))
        if key in self.known:
            results, self.found[node] = self.known[key]
            return pytree.tree_map(
                lambda leaf: (
                    operands[leaf.number] if isinstance(leaf, Operand) else _Value.like(leaf)
                ),
                results,
            )
        args, kwargs = pytree.tree_map(_Value.tensor_of, (args, kwargs))
        value, self.found[node] = _measure(function, args, kwargs, [o.tensor for o in operands])
        value = pytree.tree_map(_Value.of, value)
        results = _results(value, self.found[node].results, operands)
        if results is not None:
            self.known[key] = (results, self.found[node])
        return value

    def _function(self, node: fx.Node, args: Any) -> tuple[Callable[..., Any], Sequence[Any]]:
        """What generated code calls for a node, and with which arguments."""
        target: Any = node.target
        call = None if self.choice is None else self.choice.of(node)
        if target in FUSED:
            fused = None if self.choice is None else self.choice.fused(node)
            return UNFUSED[FUSED[target]] if fused is None else fused.plan.allocate, args
        if target in actions.ACTIONS:
            name = target.__name__
            in_place = target is actions.accumulate and args[0] is not None and reuses_total(node)
            action = getattr(self.local, name + ("_" if in_place else ""))
            return action if call is None else functools.partial(action, kernel=call), args
        if node in self.in_place:
            function, index = self.in_place[node]
            if call is not None:
                function = call.overwriting(function)
            return function, (args[index], *args[:index], *args[index + 1 :])
        return call or function_of(target), args


def _measure(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: list[torch.Tensor],
) -> tuple[Any, CallMemory]:
    with _FakeMeter(operands) as meter:
        before = meter.live
        value = function(*args, **kwargs)
    place: dict[int, Fresh | Operand] = {}
    for number, operand in enumerate(operands):
        place.setdefault(storage_key(operand), Operand(number))

    def where(leaf: Any) -> Fresh | Operand | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        size = leaf.untyped_storage().nbytes()
        return place.setdefault(storage_key(leaf), Fresh(len(place), size))

    return value, CallMemory(pytree.tree_map(where, value), meter.peak - before)


@dataclass(frozen=True)
class _Layout:
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Value:
    """A tensor of a graph; the fake one is made when a call is run on it."""

    def __init__(self, layout: _Layout, tensor: torch.Tensor | None = None) -> None:
        self.layout = layout
        self._tensor = tensor

    @staticmethod
    def of(value: Any) -> Any:
        """What a call returned."""
        if not isinstance(value, torch.Tensor):
            return value
        return _Value(_layout(value), value)

    @staticmethod
    def like(value: Any) -> Any:
        """A value like a tensor or of a layout, in memory of its own."""
        layout = _layout(value)
        return _Value(layout) if isinstance(layout, _Layout) else value

    @staticmethod
    def tensor_of(value: Any) -> Any:
        """The fake tensor of a value; what is none is itself."""
        return value.tensor if isinstance(value, _Value) else value

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            layout = self.layout
            self._tensor = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)
        return self._tensor

    @property
    def memory(self) -> Any:
        """Equal for values that share memory."""
        return self if self._tensor is None else storage_key(self._tensor)


def _results(value: Any, places: Any, operands: list[_Value]) -> Any:
    """A call's value with a layout or an operand for each tensor; None where it has other views."""
    leaves, spec = pytree.tree_flatten(value)
    taken = Counter(pytree.tree_leaves(places))
    found: list[Any] = []
    for leaf, place in zip(leaves, pytree.tree_leaves(places), strict=True):
        if not isinstance(leaf, _Value):
            found.append(leaf)
        elif isinstance(place, Operand) and leaf.tensor is operands[place.number].tensor:
            found.append(place)
        elif isinstance(place, Fresh) and taken[place] == 1:
            found.append(leaf.layout)
        else:
            return None
    return pytree.tree_unflatten(found, spec)


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Layout(value.shape, value.stride(), value.dtype)
    return value.layout if isinstance(value, _Value) else value


def _frozen(value: Any) -> Any:
    """Arguments as a key, with layouts in the place of tensors."""
    if isinstance(value, _Value):
        return value.layout
    if isinstance(value, Mapping):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return (type(value), value)  # 1, 1.0 and True are other arguments


def _sharing(operands: list[_Value]) -> tuple[int, ...]:
    """Which operands share memory: equal numbers."""
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(operand.memory, len(numbers)) for operand in operands)
