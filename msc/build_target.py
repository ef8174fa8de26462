"""What the command line compiles: `package.module:build`, a function of the user's."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msc.ir.errors import UserError

_CONTRACT = "build() returns (model, inputs) or (model, inputs, loss_fn)"
_LIBRARIES = tuple(
    sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


@dataclass(frozen=True)
class Built:
    """What `build()` returned: a module, its example inputs, and the loss of its output."""

    model: Any
    inputs: Any
    loss_fn: Callable[[Any], Any] | None


def load_target(target: str) -> Built:
    """Import `package.module`, call its `build`, and check what it returned.

    The current folder can be imported from. Raises `UserError` if there is no such function, if
    importing or calling it fails (with the user's line), or if it returned something else.
    """
    name, colon, attribute = target.partition(":")
    if not colon or not name or not attribute.isidentifier():
        raise UserError(
            f"'{target}' names no function. Write package.module:function, for example "
            f"models:build, where {_CONTRACT}."
        )
    build = _find(name, attribute)
    try:
        result = build()
    except Exception as error:
        raise UserError(_failure(f"{target} failed", error)) from error
    return _checked(target, result)


def _find(name: str, attribute: str) -> Callable[[], Any]:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(
                f"There is no module '{error.name}' to import. It must be installed, or lie in "
                f"the current folder {here}."
            ) from None
        raise UserError(_failure(f"Importing '{name}' failed", error)) from error
    except Exception as error:
        raise UserError(_failure(f"Importing '{name}' failed", error)) from error
    build = getattr(module, attribute, None)
    if not callable(build):
        what = "has no" if build is None else "does not make a function of"
        raise UserError(f"Module '{name}' {what} '{attribute}'. {_CONTRACT}.")
    return build  # type: ignore[no-any-return]


def _checked(target: str, result: Any) -> Built:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        found = type(result).__name__
        if isinstance(result, tuple):
            found += f" of {len(result)}"
        raise UserError(f"{target} returned a {found}; {_CONTRACT}.")
    model, inputs, loss_fn = (*result, None)[:3]
    if not hasattr(model, "named_parameters"):
        raise UserError(
            f"{target} returned a {type(model).__name__} in the place of the model; {_CONTRACT}, "
            "and the model is a torch.nn.Module."
        )
    if not isinstance(inputs, (tuple, dict)):
        raise UserError(
            f"{target} returned inputs that are a {type(inputs).__name__}; inputs are a tuple "
            "(positional) or a dict (keywords) of tensors, the global batch of one step."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise UserError(
            f"{target} returned a {type(loss_fn).__name__} in the place of loss_fn, which is a "
            "function of the model's output."
        )
    return Built(model, inputs, loss_fn)


def _failure(what: str, error: BaseException) -> str:
    place = user_line(error)
    return f"{what}{f' at {place}' if place else ''}\n{type(error).__name__}: {error}"


def user_line(error: BaseException) -> str:
    """`models.py:12 in build: the text of the line`, innermost outside of libraries, or ""."""
    if isinstance(error, SyntaxError):
        return ""  # its own text names file and line
    own = os.path.dirname(os.path.abspath(__file__)) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.abspath(frame.filename)
        if frame.filename.startswith("<") or path.startswith((*_LIBRARIES, own)):
            continue
        inside = os.path.relpath(path)
        shown = path if inside.startswith(os.pardir) else inside
        return f"{shown}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    return ""
