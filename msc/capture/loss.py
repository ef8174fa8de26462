"""The module that is exported: the batch in, the scalar loss out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from msc.capture.inputs import InputSpec
from msc.ir.errors import CaptureError

LossFunction = Callable[[Any], torch.Tensor]

_PASS_LOSS_FN = "Pass loss_fn, a function from the model's output to the loss."


class LossModule(nn.Module):
    """Calls the model on a batch that is given as a flat list of tensors, and returns the loss.

    Flat, because torch.export would otherwise need to know every container type of the user.
    """

    def __init__(self, model: nn.Module, spec: InputSpec, loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.spec = spec

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The scalar loss; `CaptureError` if there is none."""
        batch = self.spec.rebuild(tensors)
        output = self.model(**batch) if self.spec.keywords else self.model(*batch)
        return _checked(find_loss(output) if self.loss_fn is None else self.loss_fn(output))


def find_loss(output: Any) -> Any:
    """The loss in a model's output: itself, `output["loss"]` or `output.loss`."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        raise CaptureError(
            f"The model returned {_describe(output)}, not a loss. {_PASS_LOSS_FN}{_example(output)}"
        )
    else:
        loss = getattr(output, "loss", None)
    if loss is None:
        raise CaptureError(
            f"The model returned {_describe(output)} without a loss. Pass what the model computes "
            f"it from (such as labels), or: {_PASS_LOSS_FN}"
        )
    return loss


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point() or loss.dim() != 0:
        raise CaptureError(
            f"The loss is {_describe(loss)}; training needs one floating number (a 0-dim tensor). "
            f"Reduce it, for example with .mean(). {_PASS_LOSS_FN}"
        )
    if not loss.requires_grad:
        raise CaptureError(
            "The loss depends on no trainable parameter. Check requires_grad, torch.no_grad and "
            ".detach() in the model."
        )
    return loss


def _example(output: Sequence[Any]) -> str:
    """Which element is the loss, if one may be."""
    for index, value in enumerate(output):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 0:
            return f" Element {index} may be it: loss_fn=lambda output: output[{index}]."
    return ""


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        # a length that depends on the batch is a symbol of the export, which means nothing outside
        lengths = [str(n) if isinstance(n, int) else "batch" for n in value.shape]
        return f"a {value.dtype} tensor of shape [{', '.join(lengths)}]"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    if isinstance(value, (tuple, list)):
        parts = ", ".join(_describe(item) for item in value)
        return f"a {type(value).__name__} of {len(value)} ({parts})"
    return f"a value of type {type(value).__name__}"
