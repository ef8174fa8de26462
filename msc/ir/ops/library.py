"""Definition of opaque ops in the torch library namespace `msc`.

An opaque op stays one node wherever torch traces: it has a plain kernel for every device, a fake
implementation that returns the shape, dtype and strides of the kernel, and (forward ops only) a
gradient that is built of opaque ops again. Results are contiguous unless the op says otherwise, and
never share memory with an operand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from msc.ir.torch_private import OpOverload

LIBRARY: Any = torch.library.Library("msc", "DEF")  # type: ignore[no-untyped-call]

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Types whose reductions are computed, and kept for the backward, in float32."""

KERNELS: dict[OpOverload, Callable[..., Any]] = {}
"""Each overload's plain Python function; calling it skips the dispatcher (and autograd)."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What reductions of `dtype` are computed in: float32 for half types, else `dtype` itself."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> OpOverload:
    """Define `msc::<schema>` and return its overload.

    schema: name, arguments and results in torch's schema language; argument names and defaults are
        those of `kernel`.
    fake: the kernel on fake tensors; it also checks what can be checked from shapes.
    setup, backward: as for `torch.library.register_autograd`; without them the op has no gradient.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"msc::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"msc::{name}", backward, setup_context=setup, lib=LIBRARY)
    overload: OpOverload = getattr(torch.ops.msc, name).default
    KERNELS[overload] = kernel
    return overload


def arguments(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in (tracing drops trailing defaults)."""
    bound = inspect.signature(KERNELS[target]).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
