"""Stand fake tensors in for a module's parameters and buffers while it is exported.

Fake tensors on the CPU, also for modules on `meta`: with meta tensors some losses silently lose
their backward when they are differentiated. No number is computed and no memory is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from msc.ir.torch_private import FakeTensorMode, new_fake, tensor_registries


def fake_like(
    mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A contiguous fake tensor on the CPU; floating tensors take `dtype` if it is given."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return new_fake(mode, tuple(tensor.shape), wanted)


@contextmanager
def fake_tensors(
    model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None
) -> Iterator[None]:
    """Replace every parameter and buffer, keeping ties.

    On exit every module has the very same attributes, parameters and buffers as before, also those
    that its forward assigned.
    """
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            value = fake_like(mode, tensor, dtype)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, tensor.requires_grad)
            fakes[id(tensor)] = value
        return fakes[id(tensor)]

    saved = []
    for module in model.modules():
        own_parameters, own_buffers = tensor_registries(module)
        saved.append((module, dict(vars(module)), dict(own_parameters), dict(own_buffers)))
    try:
        for module, _, parameters, buffers in saved:
            own_parameters, own_buffers = tensor_registries(module)
            for name, parameter in parameters.items():
                if parameter is not None:
                    own_parameters[name] = fake(parameter)  # type: ignore[assignment]
            for name, buffer in buffers.items():
                if buffer is not None:
                    own_buffers[name] = fake(buffer)
        yield
    finally:
        for module, attributes, parameters, buffers in saved:
            vars(module).clear()
            vars(module).update(attributes)
            own_parameters, own_buffers = tensor_registries(module)
            # In place: the registries keep their identity and their order.
            own_parameters.clear()
            own_parameters.update(parameters)
            own_buffers.clear()
            own_buffers.update(buffers)
