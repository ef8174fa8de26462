"""Fills templates of source text, so that an emitted kernel reads as if it had been written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import dedent, indent

_WHOLE_LINE = re.compile(r"^( *)<<(\w+)>>$")
_NAME = re.compile(r"\$(\w+)\b")

HEADER = """
import triton
import triton.language as tl
"""


def fill(template: str, **parts: str | int | float) -> str:
    """`template` with `$name` replaced in place, and a line `<<name>>` by lines at its indentation.

    A fragment may be empty: its line disappears. A name without a part is a KeyError.
    """
    lines: list[str] = []
    for line in dedent(template).strip("\n").split("\n"):
        whole = _WHOLE_LINE.match(line)
        if whole is None:
            lines.append(_NAME.sub(lambda found: str(parts[found[1]]), line))
            continue
        fragment = str(parts[whole[2]]).strip("\n")
        if fragment:
            lines.append(indent(fragment, whole[1]))
    return "\n".join(lines)


def module(title: str, constants: Mapping[str, int | float], *pieces: str) -> str:
    """The text of a module: a docstring, the constants of this kernel, its functions."""
    named = "\n".join(f"{name} = tl.constexpr({value!r})" for name, value in constants.items())
    parts = [f'"""{title}"""', HEADER.strip(), named, *(piece.strip("\n") for piece in pieces)]
    return "\n\n".join(parts[:3]) + "".join(f"\n\n\n{piece}" for piece in parts[3:] if piece) + "\n"
