"""What a model must not have: parts of it that a captured graph would silently leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from msc.capture.source import line_of_caller
from msc.ir.errors import CaptureError
from msc.ir.torch_private import gradient_hooks


def check_model(model: Any, loss_fn: Any) -> None:
    """Raise `CaptureError` for what is no trainable module, or has hooks on gradients."""
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"The model is a {type(model).__name__}, not a torch.nn.Module. Pass a module instance."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"The model is a {type(model).__name__}: its Python code is gone. Pass the module that "
            "it was scripted or traced from."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(
            f"loss_fn is a {type(loss_fn).__name__}; it is a function from the model's output to "
            "the loss."
        )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise CaptureError(
                f"Parameter '{name}' is uninitialized (a lazy module). Run the model once on the "
                "example batch before compiling it."
            )
        if gradient_hooks(parameter):
            raise CaptureError(_hook(f"Parameter '{name}'"))
    for name, module in model.named_modules():
        if gradient_hooks(module):
            raise CaptureError(_hook(f"Module '{name}'" if name else "The model"))


def _hook(owner: str) -> str:
    return (
        f"{owner} has a hook on its gradients, which a compiled program would not run. Remove it; "
        "what it computes can be part of the model or of the loss."
    )


@contextmanager
def refuse_tensor_hooks() -> Iterator[None]:
    """Refuse `tensor.register_hook` while the model is traced."""
    original: Callable[..., Any] = torch.Tensor.register_hook

    def refuse(tensor: torch.Tensor, hook: Any) -> Any:
        raise CaptureError(
            f"tensor.register_hook is called at {line_of_caller()}: a compiled program would not "
            "run the hook. Remove it; what it computes can be part of the model or of the loss."
        )

    setattr(torch.Tensor, "register_hook", refuse)  # noqa: B010  (mypy)
    try:
        yield
    finally:
        setattr(torch.Tensor, "register_hook", original)  # noqa: B010
