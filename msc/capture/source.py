"""The user's line: from the stack trace of a graph node, or from an exception."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from types import TracebackType

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_MSC = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN = (_MSC + "capture" + os.sep, _MSC + "ir" + os.sep)


def source_of(stack_trace: str | None) -> str:
    """`file.py:12 in forward`: the innermost frame outside torch and MSC; "" if there is none."""
    if not stack_trace:
        return ""
    for path, line, function in reversed(_FRAME.findall(stack_trace)):
        if is_user_file(path):
            return f"{short_path(path)}:{line} in {function}"
    return ""


def line_of_exception(error: BaseException) -> str:
    """`file.py:12 in forward: the text of the line` that raised; "" if no frame is the user's."""
    frames = _frames(error.__traceback__)
    for path, line, function in reversed(frames):
        if is_user_file(path):
            return _with_text(path, line, function)
    return ""


def line_of_caller() -> str:
    """The user's line that is running now, innermost; "" if no frame is the user's."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return _with_text(frame.filename, frame.lineno or 0, frame.name)
    return ""


def is_user_file(path: str) -> bool:
    """Whether a frame in this file is the user's code (a library of models counts as such)."""
    return not (path.startswith((_TORCH, *_OWN, "<")) or path.startswith("torch" + os.sep))


def short_path(path: str) -> str:
    """A path relative to site-packages or the working directory, or else the file's name."""
    _, installed, inside = path.rpartition(os.sep + "site-packages" + os.sep)
    if installed:
        return inside
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else os.path.basename(path)


def _with_text(path: str, line: int, function: str) -> str:
    text = linecache.getline(path, line).strip()
    place = f"{short_path(path)}:{line} in {function}"
    return f"{place}: {text}" if text else place


def _frames(tb: TracebackType | None) -> list[tuple[str, int, str]]:
    return [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(tb)]
