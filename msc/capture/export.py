"""Run torch.export on the loss of a model, and explain in the user's terms why it failed."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils.checkpoint import CheckpointFunction

from msc.capture.functions import functions_as_ops, is_wrapped
from msc.capture.loss import LossModule
from msc.capture.refusals import refuse_tensor_hooks
from msc.capture.source import line_of_caller, line_of_exception
from msc.ir.errors import CaptureError
from msc.ir.torch_private import observe_autograd_functions

_DATA_DEPENDENT = ("data-dependent", "DataDependent", "unbacked", "data dependent", ".item()")


def export_loss(
    module: LossModule, tensors: Sequence[torch.Tensor], batch_dims: Sequence[int | None]
) -> tuple[ExportedProgram, str | None]:
    """Export with a symbolic batch, or with a fixed one where the model insists on it.

    `tensors` are fake and distinct (export takes one tensor passed twice for one input). Returns
    the program, and a note if the batch is fixed.
    """
    batch = Dim("batch", min=2)
    dynamic = tuple({} if dim is None else {dim: batch} for dim in batch_dims)
    try:
        return _export(module, [*map(_doubled, tensors, batch_dims)], dynamic), None
    except CaptureError:
        raise
    except Exception as symbolic_error:  # any failure may come from the symbolic size
        try:
            program = _export(module, tensors, None)
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error) from error
        return program, (
            "The model fixes its batch size: "
            f"{_first_line(symbolic_error)}. The batch was captured as a constant."
        )


def _doubled(tensor: torch.Tensor, batch_dim: int | None) -> torch.Tensor:
    """The tensor with two samples in place of one: export takes sizes 0 and 1 for constants."""
    if batch_dim is None or tensor.shape[batch_dim] != 1:
        return tensor
    return tensor.repeat_interleave(2, batch_dim)


def _export(
    module: LossModule, tensors: Sequence[torch.Tensor], dynamic: tuple[dict[int, Any], ...] | None
) -> ExportedProgram:
    shapes = None if dynamic is None else (dynamic,)
    with (
        _quiet(),
        functions_as_ops(),
        observe_autograd_functions(_refuse),
        refuse_tensor_hooks(),
        _inline_checkpoints(),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        # What torch.export warns about (its own deprecations) is nothing the user can act on.
        warnings.simplefilter("ignore")
        return torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what torch.export says on its way to raising: `explain` says it in one sentence.

    It prints the graph so far to stderr, and logs that it knows no name for a symbol.
    """
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    said = io.StringIO()
    log.addFilter(_is_error)
    try:
        with redirect_stderr(said):
            yield
    finally:
        log.removeFilter(_is_error)
    sys.stderr.write(said.getvalue())  # no failure: it came from the user's code


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _refuse(function: type[Any]) -> None:
    """Refuse torch.autograd.Function: export would differentiate its forward, not run its backward.

    Ops with a registered gradient come as functions too, and are no danger.
    """
    own = function.__module__.startswith("torch.")
    if own or is_wrapped(function) or function.__name__.startswith("GeneratedBackwardFor_"):
        return
    raise CaptureError(
        f"{function.__qualname__} is a torch.autograd.Function, whose backward a captured graph "
        f"would lose. It is called at {line_of_caller()}. Tell MSC of it: "
        f"msc.wrap_function({function.__qualname__}). Or write its forward in plain torch ops, or "
        "as an op with torch.library.custom_op and register_autograd."
    )


@contextmanager
def _inline_checkpoints() -> Iterator[None]:
    """Run reentrant checkpointing as what it computes: MSC decides what to recompute."""

    def apply(function: Any, preserve_rng_state: bool, *inputs: Any) -> Any:
        return function(*inputs)

    setattr(CheckpointFunction, "apply", staticmethod(apply))  # noqa: B010  (mypy)
    try:
        yield
    finally:
        delattr(CheckpointFunction, "apply")  # the inherited one shows again


def explain(error: BaseException) -> CaptureError:
    """The `CaptureError` that says what an export failure means for the model's author."""
    place = next((line for e in _chain(error) if (line := line_of_exception(e))), "")
    at = f" at {place}" if place else ""
    text = " ".join(f"{type(e).__name__}: {e}" for e in _chain(error))
    if any(word in text for word in _DATA_DEPENDENT):
        return CaptureError(
            f"The program depends on the numbers in a tensor{at}. One graph must serve every "
            "batch: replace the branch or the data-dependent shape by torch.where or a mask, or "
            f"move it out of the model. (torch.export: {_first_line(error)})"
        )
    return CaptureError(f"The model cannot be exported{at}: {_first_line(error)}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
