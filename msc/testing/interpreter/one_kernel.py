"""Runs kernels one at a time in the interpreter, where a kernel's programs follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msc.codegen.kernels.numerics import exact_bfloat16
from msc.codegen.kernels.patching import replaced
from msc.testing.interpreter.assembly import Results, fences


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels launched inside the block run alone in the interpreter, where fences do nothing."""
    from triton.runtime import interpreter

    def assembly(
        builder: Any, text: str, constraints: str, values: list[Any], *rest: Any
    ) -> Results:
        fences(text)
        return Results(interpreter.TensorHandle(values[0].data.copy(), values[0].dtype))

    hooks = {"create_inline_asm": assembly}
    with exact_bfloat16(), replaced(interpreter.InterpreterBuilder, hooks):
        yield
