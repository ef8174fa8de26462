"""One call of an op in kernels: same operands, same results as the function that it replaces."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernels.description import Kernel
from msc.codegen.kernels.launch import KernelError, interpreting, launch, prepare
from msc.codegen.kernels.numerics import exact_bfloat16
from msc.ir.errors import PlanError
from msc.ir.torch_private import FakeTensor

Launches = Sequence[tuple[Kernel, dict[str, Any]]]
"""Kernels in the order in which they run, each with its arguments by name."""


@dataclass(frozen=True)
class Plan:
    """How kernels compute an op.

    kernels: all of them. run: takes the op's operands and makes (launches, results); nothing has
    been launched when it returns. over: the same, but the first operand of the op's in-place form
    (`msc.codegen.in_place`) comes first and holds the result. finish: makes the op's results of
    those of `run`, when all kernels have been launched.
    """

    kernels: tuple[Kernel, ...]
    run: Callable[..., tuple[Launches, Any]]
    over: Callable[..., tuple[Launches, Any]] | None = None
    finish: Callable[[Any], Any] | None = None


class KernelCall:
    """What generated code calls in place of an op's function.

    All kernels of the call are compiled before the first one runs. Where one of them does not
    compile, the op's function does the work from then on; `failure` says why, and so does a warning
    for the first such call of each op.

    op: its name; where: " in " and a module path, or "". function: what it replaces.
    """

    def __init__(self, op: str, where: str, plan: Plan, function: Callable[..., Any]) -> None:
        self.op = op
        self.where = where
        self.kernels = plan.kernels
        self.failure = ""
        self._run = plan.run
        self._function = function
        self._over = plan.over
        self._finish = plan.finish
        self._ready = False
        self.__name__ = f"{op.replace('.', '_')}_kernel"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done, results = self._computed(self._run, args, kwargs)
        if not done:
            return self._function(*args, **kwargs)
        return results if self._finish is None else self._finish(results)

    def overwriting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The form that writes over an operand, in place of `function`."""
        over = self._over
        if over is None:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            done, results = self._computed(over, args, kwargs)
            return results if done else function(*args, **kwargs)

        run.__name__ = f"{self.__name__}_"
        return run

    def _computed(
        self, run: Callable[..., tuple[Launches, Any]], args: Any, kwargs: Any
    ) -> tuple[bool, Any]:
        """Whether kernels did it, and what they gave."""
        if self.failure:
            return False, None
        try:
            launches, results = run(*args, **kwargs)
            if _is_fake(launches):
                return True, results
            if not self._ready:
                for kernel, values in launches:
                    prepare(kernel, values)
        except KernelError as error:
            self.failure = str(error)
            warn_once(
                self.op,
                f"{self.op}{self.where} runs without its Triton kernel: {self.failure}. ATen "
                "computes it from now on.",
            )
            return False, None
        self._ready = True
        with exact_bfloat16() if interpreting() else contextlib.nullcontext():
            for kernel, values in launches:
                launch(kernel, values)
        return True, results


def _is_fake(launches: Launches) -> bool:
    """Whether memory is being predicted: then there is nothing to compute."""
    _, values = launches[0]
    return any(isinstance(value, FakeTensor) for value in values.values())


_warned: set[str] = set()


def warn_once(op: str, text: str) -> None:
    """Say why an op runs without its kernels; of further calls of the op nothing is said."""
    if op not in _warned:
        _warned.add(op)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def dense(value: Tensor) -> Tensor:
    """`value` as kernels read it, a copy where it is not."""
    return value if is_dense(value) else value.clone(memory_format=torch.contiguous_format)


def is_dense(value: Tensor) -> bool:
    """Whether it is contiguous, at an address of a multiple of 16 bytes.

    Such an address is what tensor descriptors need and vector loads want.
    """
    aligned = isinstance(value, FakeTensor) or value.data_ptr() % 16 == 0
    return aligned and value.is_contiguous()


def rows(value: Tensor) -> Tensor:
    """`[..., n]` as dense `[rows, n]`."""
    return dense(value.reshape(-1, value.shape[-1]))


def name_of(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def one_dtype(op: str, *operands: Tensor | None) -> str:
    """The name of the dtype of all operands that there are; `PlanError` where they have several."""
    found = sorted({name_of(value.dtype) for value in operands if value is not None})
    if len(found) > 1:
        raise PlanError(f"{op}: kernels take operands of one dtype, not {' and '.join(found)}")
    return found[0]
