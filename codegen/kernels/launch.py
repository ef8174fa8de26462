"""Runs an emitted kernel: its text becomes a module, tensors become its arguments."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from typing import Any

import torch

from msc.codegen.kernels.description import Argument, Kernel

_SEEN: dict[str, Any] = {}


class KernelError(Exception):
    """A kernel cannot be used on this device: it does not compile, or asks for too much of it."""


def function(kernel: Kernel) -> Any:
    """The kernel as Triton's function object, made once per text.

    The text is registered with `linecache`, where Triton, tracebacks and debuggers find it.
    """
    if kernel.source not in _SEEN:
        digest = hashlib.sha256(kernel.source.encode()).hexdigest()[:12]
        filename = f"<msc kernel {kernel.name} {digest}>"
        lines = kernel.source.splitlines(keepends=True)
        linecache.cache[filename] = (len(kernel.source), None, lines, filename)
        namespace: dict[str, Any] = {"__name__": f"msc_kernel_{digest}"}
        exec(compile(kernel.source, filename, "exec"), namespace)
        if interpreting():
            _unwrap_constants(namespace)
        _SEEN[kernel.source] = namespace[kernel.entry]
    return _SEEN[kernel.source]


def interpreting() -> bool:
    """Whether Triton interprets kernels in this process, decided when it was first imported."""
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(standard.zeros, InterpretedFunction)


def _unwrap_constants(namespace: dict[str, Any]) -> None:
    # The interpreter calls a kernel with plain numbers for its constexpr parameters, but leaves
    # constexpr globals wrapped, and `int % constexpr` is not defined.
    from triton.language import constexpr

    for name, value in list(namespace.items()):
        if isinstance(value, constexpr):
            namespace[name] = value.value


def bind(kernel: Kernel, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments in order, each tensor checked and, where the kernel wants it, described.

    Raises ValueError for a missing or surplus name, a wrong dtype, or a tensor with gaps.
    """
    wanted = {argument.name for argument in kernel.arguments}
    if wanted != set(values):
        raise ValueError(f"{kernel.name} takes {sorted(wanted)}, and was given {sorted(values)}")
    return tuple(_bound(kernel, argument, values[argument.name]) for argument in kernel.arguments)


def prepare(kernel: Kernel, values: Mapping[str, Any]) -> None:
    """Compile the kernel for these arguments and load it, without running it.

    Raises `KernelError` where that fails, whatever Triton raises.
    """
    arguments = bind(kernel, values)
    try:
        made = function(kernel)
        if not interpreting():
            compiled = made.warmup(*arguments, grid=kernel.grid, **kernel.options)
            _ = compiled.run  # loads it, which is when registers and shared memory are counted
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()
        raise KernelError(f"{kernel.name} does not compile: {' '.join(reason)[:300]}") from error


def launch(kernel: Kernel, values: Mapping[str, Any]) -> None:
    """Run the kernel on the device of its tensors (on the CPU: in Triton's interpreter)."""
    function(kernel)[kernel.grid](*bind(kernel, values), **kernel.options)


def _bound(kernel: Kernel, argument: Argument, value: Any) -> Any:
    if argument.kind in ("int32", "int64"):
        return int(value)
    dtype = torch.int64 if argument.kind == "table" else getattr(torch, argument.dtype)
    if value.dtype != dtype or not value.is_contiguous():
        raise ValueError(
            f"{kernel.name}: {argument.name} must be a contiguous tensor of {dtype}, "
            f"not {value.dtype} with strides {tuple(value.stride())}"
        )
    if argument.kind != "descriptor":
        return value
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(value, list(argument.block))
