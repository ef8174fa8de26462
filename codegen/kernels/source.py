"""Fills templates of source text, so that an emitted kernel reads as if it had been written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import dedent, indent

from msc.codegen.kernels.dtypes import on_tensor_cores

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


def masked(*conditions: str, other: str = "") -> str:
    """The arguments of a load or store where all conditions hold; an empty one needs no mask.

    other: what a load gives elsewhere.
    """
    mask = " & ".join(filter(None, conditions))
    return f", mask={mask}" + (f", other={other}" if other else "") if mask else ""


def wide_index(elements: int) -> str:
    """The conversion of a row index, so that offsets beyond 2^31 do not wrap around."""
    return ".to(tl.int64)" if elements >= 2**31 else ""


def precision(dtype: str) -> str:
    """The argument of `tl.dot` that multiplies float32 as such: tensor cores would keep 10 bits."""
    return "" if on_tensor_cores(dtype) else ', input_precision="ieee"'


def module(title: str, constants: Mapping[str, int | float], *pieces: str) -> str:
    """The text of a module: a docstring, the constants of this kernel, its functions."""
    named = "\n".join(f"{name} = tl.constexpr({value!r})" for name, value in constants.items())
    parts = [f'"""{title}"""', HEADER.strip(), named, *(piece.strip("\n") for piece in pieces)]
    return "\n\n".join(parts[:3]) + "".join(f"\n\n\n{piece}" for piece in parts[3:] if piece) + "\n"
