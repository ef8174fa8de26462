"""What the optimizers' actions share: gradients made ready, in pieces, and skipped steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Stepped = tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]]
"""Parameters and states after a step."""

Result = TypeVar("Result")
Taken = Callable[..., Result | None]
"""Kernels that a whole action may take (`msc.codegen.kernel_calls`), on its operands.

They return what the action does, or None where they do not run on this device.
"""

Kernel = Callable[[list[int], list[Tensor], list[Tensor]], None]
"""`kernel(indices, parameters, gradients)`: a step in place, of tensors of one device and dtype."""

_COPIED_BYTES = 64 * 2**20  # of gradients that are cast or scaled at a time


def step_in_pieces(
    kernel: Kernel,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    like: Sequence[Tensor],
    scale: Tensor | None,
) -> None:
    """Run a kernel on the parameters that have a gradient, in the devices and dtypes of `like`.

    A parameter of a lower precision is rounded at the end; copies of gradients that must be cast or
    scaled take a bounded memory.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            groups[like[index].device, like[index].dtype].append(index)
    for (_, dtype), members in groups.items():
        for indices in _pieces(members, gradients, dtype, scale is not None):
            working = [parameters[index].to(dtype) for index in indices]
            kernel(indices, working, [ready(gradients[i], dtype, scale) for i in indices])
            for index, value in zip(indices, working, strict=True):
                if value is not parameters[index]:
                    parameters[index].copy_(value)


def _pieces(
    indices: list[int], gradients: Sequence[Tensor | None], dtype: torch.dtype, scaled: bool
) -> Iterator[list[int]]:
    """Runs of indices whose gradients, where they must be copied, take a bounded memory."""
    piece: list[int] = []
    filled = 0
    for index in indices:
        gradient = gradients[index]
        assert gradient is not None  # the indices are those of gradients that exist
        copies = scaled or gradient.dtype != dtype or not gradient.is_contiguous()
        copied = gradient.numel() * dtype.itemsize if copies else 0
        if piece and filled + copied > _COPIED_BYTES:
            yield piece
            piece, filled = [], 0
        piece.append(index)
        filled += copied
    yield piece


def ready(gradient: Tensor | None, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """A gradient as its parameter takes it: in `dtype`, contiguous, scaled. The given one stays."""
    assert gradient is not None  # callers leave out parameters without one
    # the fused kernels walk through memory: a gradient must lie in it like its parameter
    gradient = gradient.to(dtype).contiguous()
    return gradient if scale is None else gradient * scale.to(gradient.device, dtype)


def kernel_rate(lr: float | Tensor) -> float | Tensor:
    """The rate as torch's kernels take it: a number, or off the CPU a float32 tensor."""
    if not isinstance(lr, Tensor):
        return lr
    return float(lr) if lr.device.type == "cpu" else lr.to(torch.float32)


def kernel_flag(skip: Tensor | None, device: torch.device) -> Tensor | None:
    """`skip` as torch's kernels take it: 1.0 where nothing may change."""
    return None if skip is None else skip.to(device, torch.float32)


def unless(skip: Tensor | None, value: Tensor) -> Tensor:
    """`value`, or zeros where `skip` is true: there a gradient that is NaN must not be felt."""
    return value if skip is None else value.masked_fill(skip.to(value.device), 0)
