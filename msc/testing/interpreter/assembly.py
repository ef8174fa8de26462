"""The inline assembly that emitted kernels may use: fences, whose result is their first operand."""

from __future__ import annotations

from typing import Any

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
