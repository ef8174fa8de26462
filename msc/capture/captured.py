"""What a capture yields: the graph, and what its placeholders are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from msc.capture.inputs import InputInfo, InputSpec

__all__ = ["BufferInfo", "Captured", "InputInfo", "ParameterInfo"]


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter of the model. `aliases` are the other names of the same tensor (tied weights)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class BufferInfo:
    """A buffer that the loss reads, or a constant tensor of the model's code (not persistent)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool


@dataclass
class Captured:
    """The forward graph of a model and its loss, on the shapes of the global batch.

    Placeholders of `graph` stand in the order parameters, buffers, inputs; normalization adds `rng`
    if anything is random. The output is the loss and then the new values of the buffers that the
    forward writes, named in `graph.meta["buffers"]`. Every value has the metadata of
    `msc.ir.values`, and `graph.meta["fake_mode"]` is the mode of all fake tensors.
    """

    graph: fx.GraphModule
    parameters: dict[str, ParameterInfo]
    buffers: dict[str, BufferInfo]
    inputs: tuple[InputInfo, ...]
    batch_size: int
    notes: list[str]
    module: nn.Module
    input_spec: InputSpec
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    def flatten(self, batch: Any) -> list[torch.Tensor]:
        """The tensors of a global batch, in the order of `inputs`.

        Raises `InputError`, which names the input and both shapes, if the batch has another
        structure, shape or dtype than the one that was captured.
        """
        tensors = self.input_spec.flatten(batch)
        if self.dtype is None:
            return tensors
        return [t.to(self.dtype) if t.is_floating_point() else t for t in tensors]

    def read_parameter(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The parameter of the user's module, detached; None if it has no values (meta, fake).

        In `dtype` if it is floating, or in that of the capture.
        """
        return self._real(self.module.get_parameter(name), dtype)

    def read_buffer(self, name: str) -> torch.Tensor | None:
        """The buffer of the user's module, or the constant; None if it has no values."""
        if name in self.constants:
            return self._real(self.constants[name])
        return self._real(self.module.get_buffer(name))

    def _real(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        if not has_values(tensor):
            return None
        tensor = tensor.detach()
        wanted = dtype or self.dtype
        if wanted is not None and tensor.is_floating_point():
            return tensor.to(wanted)
        return tensor


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has storage with numbers, which meta and fake tensors lack."""
    from msc.ir.torch_private import FakeTensor

    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
