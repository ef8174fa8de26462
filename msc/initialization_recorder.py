"""Record what a module's initialization does to tensors on `meta`, without doing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from msc.capture.captured import has_values
from msc.ir.draws import CHANGES, FILLS, Step
from msc.ir.torch_private import (
    OpOverload,
    TorchDispatchMode,
    is_mutable,
    replace_truncated_normal,
    storage_key,
)


def truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> Tensor:
    """Normal numbers within [a, b], by the inverse of the distribution function."""
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (a, b))
    tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2.0)).add_(mean)
    return tensor.clamp_(a, b)


@contextmanager
def recording(targets: dict[int, Target], protected: frozenset[int]) -> Iterator[Recorder]:
    """Record what is done to `targets`; see `Recorder`.

    torch.nn.init leaves tensors on meta out of what it cannot compute for them; here none says that
    it is on meta, so that nothing is left out unseen.
    """
    setattr(Tensor, "is_meta", False)  # noqa: B010  (mypy)
    try:
        with replace_truncated_normal(truncated_normal), Recorder(targets, protected) as recorder:
            yield recorder
    finally:
        delattr(Tensor, "is_meta")  # the inherited one shows again


_DEFAULTS = {"uniform": (0.0, 1.0), "normal": (0.0, 1.0)}
_KEYWORDS = {"uniform": ("from", "to"), "normal": ("mean", "std")}


@dataclass(eq=False)
class Target:
    """A tensor without values, all its names, and what is known of its initial values."""

    tensor: Tensor
    names: list[str]
    is_parameter: bool
    steps: list[Step] = field(default_factory=list)
    values: Tensor | None = None
    obstacle: str = ""

    def set(self, values: Tensor) -> None:
        """The tensor has these values, whatever was before."""
        tensor = self.tensor
        self.steps.clear()
        self.obstacle = ""
        self.values = values.detach().to(tensor.dtype).expand(tensor.shape).clone()

    def add(self, step: Step) -> None:
        """One more step; one that fills the whole makes those before it void."""
        if step.op in FILLS and step.stop - step.start == self.tensor.numel():
            self.steps.clear()
            self.values = None
            self.obstacle = ""
        elif self.values is not None:
            self.obstacle = f"its initialization changes computed values by {step.op}"
        self.steps.append(step)

    def missing(self) -> str:
        """Why the values are not known; "" if they are."""
        if self.obstacle:
            return self.obstacle
        if self.values is not None:
            return ""
        filled = 0
        for start, stop in sorted((s.start, s.stop) for s in self.steps if s.op in FILLS):
            filled = max(filled, stop) if start <= filled else filled
        if not self.steps and self.tensor.numel():
            return "no reset_parameters or _init_weights of a module fills it"
        if filled < self.tensor.numel() or (self.steps and self.steps[0].op not in FILLS):
            return "its initialization fills a part of it only"
        return ""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, in-place ops on `targets` (by storage) become steps of theirs.

    Ops on `protected` storages, the tensors of the model that have values, are left out.
    """

    def __init__(self, targets: dict[int, Target], protected: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = targets
        self._protected = protected

    def run(self, method: Callable[..., Any], module: nn.Module, *args: Any) -> None:
        """Call a module's initialization; if it fails, its own tensors are unknown for that."""
        try:
            method(*args)
        except Exception as error:  # any: it is the user's code; told if the values are needed
            text = str(error).strip().partition("\n")[0]
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                target = self._targets.get(storage_key(tensor))
                if target is not None:
                    name = getattr(method, "__qualname__", "its initialization")
                    target.obstacle = f"{name} fails on meta: {type(error).__name__}: {text}"

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = kwargs.get("out", args[0] if args else None)
        if isinstance(written, Tensor) and is_mutable(func):
            key = storage_key(written)
            if key in self._protected:
                return written
            if key in self._targets:
                self._record(self._targets[key], str(func).split(".")[1], args, kwargs)
                return written
        return func(*args, **kwargs)

    def _record(
        self, target: Target, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if "out" in kwargs:
            target.obstacle = f"its initialization computes it by {name}"
            return
        view = args[0]
        op = name.removesuffix("_")
        whole = view.numel() == target.tensor.numel()
        if op == "copy" and whole and has_values(args[1]):
            target.set(args[1])
            return
        if op == "zero":
            op, args = "fill", (view, 0.0)
        numbers = _numbers(op, args[1:], kwargs)
        start = view.storage_offset() - target.tensor.storage_offset()
        if numbers is None or not (whole or view.is_contiguous()):
            target.obstacle = f"its initialization uses {name}, which cannot be repeated on a part"
            return
        target.add(Step(op, numbers, 0 if whole else start, view.numel() + (0 if whole else start)))


def _numbers(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float | None, ...] | None:
    """The numbers that a step needs; None if it cannot be a step."""
    given = {name: value for name, value in kwargs.items() if name != "generator"}
    if op in _DEFAULTS:
        named = zip(_KEYWORDS[op], _DEFAULTS[op], strict=True)
        rest = [given.pop(name, default) for name, default in named][len(args) :]
        args = (*args, *rest)
    if given or (op not in FILLS and op not in CHANGES):
        return None
    numbers: list[float | None] = []
    for value in args:
        if isinstance(value, Tensor):
            if value.numel() != 1 or not has_values(value):
                return None
            value = value.item()
        numbers.append(None if value is None else float(value))
    return tuple(numbers)
