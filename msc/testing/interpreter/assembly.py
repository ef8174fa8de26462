"""The inline assembly that emitted kernels may use: fences, whose result is their first operand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msc.testing.interpreter.numerics import exact_bfloat16
from msc.testing.interpreter.patching import replaced

PROXY_FENCE = "fence.proxy.async.global"
BULK_WAIT = "cp.async.bulk.wait_group 0"


def fences(text: str) -> list[str]:
    """The fences in a text. NotImplementedError for anything else but the move of the result."""
    found = [line for line in (part.strip() for part in text.split(";")) if line]
    for line in found:
        if line not in (PROXY_FENCE, BULK_WAIT) and not line.startswith("mov.u32"):
            raise NotImplementedError(f"inline assembly that kernels may not use: {line}")
    return [line for line in found if line in (PROXY_FENCE, BULK_WAIT)]


class Results:
    """Looks like an operation of the interpreter with one result."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get_result(self, index: int) -> Any:
        """The result."""
        return self._value


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
