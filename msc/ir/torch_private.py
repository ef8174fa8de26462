"""Every private name of torch that MSC uses; no other module may touch one.

Private names change without notice. Each stands here with the reason why no public name will do;
`tests/test_torch_private.py` holds the rest of the source to this. Tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

# One overload of a torch op: what `torch.ops.msc.linear.default` is. Public only as a value.
from torch._ops import OpOverload as OpOverload

# Tensors with shape and dtype but no numbers, and the mode that makes them. torch.export takes them,
# and no public constructor exists.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode


def is_mutable(op: OpOverload) -> bool:
    """Whether the op writes to an operand. The schema has no public accessor."""
    return bool(op._schema.is_mutable)


def num_returns(op: OpOverload) -> int:
    """The number of results in the op's schema."""
    return len(op._schema.returns)


def new_fake(mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype) -> FakeTensor:
    """A contiguous fake tensor on the CPU.

    Ten times cheaper than `torch.empty` under the mode, which matters at one per node.
    """
    return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cpu"))


def tensor_registries(
    module: nn.Module,
) -> tuple[dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]:
    """A module's own registries of parameters and buffers: assigning to them skips every check."""
    return module._parameters, module._buffers


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a module's own buffer is part of its state_dict."""
    return buffer not in module._non_persistent_buffers_set


def argument_names(op: OpOverload) -> dict[str, bool]:
    """The names of an op's arguments, each with whether it is keyword-only. Schemas are private."""
    return {argument.name: argument.kwarg_only for argument in op._schema.arguments}



def add_each(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`left[i] + right[i]`, in one call. The foreach functions are documented but underscored."""
    return list(torch._foreach_add(list(left), list(right)))


def add_each_(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    """`left[i] += right[i]`, in one call."""
    torch._foreach_add_(list(left), list(right))


def version(tensor: torch.Tensor) -> int:
    """A number that every in-place write to the tensor's memory raises."""
    return int(tensor._version)


def fused_adamw_(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first_moments: list[torch.Tensor],
    second_moments: list[torch.Tensor],
    step: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place by torch's fused kernel; `step` is a 0-dim float32 tensor.

    All tensors have one device and dtype. The public `torch.optim.AdamW(fused=True)` keeps its own
    step counters and moments, so it cannot run on ours.
    """
    torch._fused_adamw_(
        parameters,
        gradients,
        first_moments,
        second_moments,
        [],
        [step] * len(parameters),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )

# The fused attention of the CPU. Its public wrapper keeps neither the logsumexp nor one node.
FLASH_ATTENTION_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_ATTENTION_CPU_BACKWARD = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
