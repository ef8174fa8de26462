"""bfloat16 in Triton's interpreter, as a GPU computes it.

The interpreter of Triton 3.6 keeps bfloat16 as 16-bit integers. It multiplies and compares those
integers, and its conversion from float32 truncates, all without a warning. Here every operation
goes through float32, and the result is rounded to the nearest, ties to even.

Reductions of bfloat16 are not covered: emitted kernels reduce in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msc.codegen.kernels.patching import replaced

_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 numbers that bfloat16 bits stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 numbers, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


@contextmanager
def exact_bfloat16() -> Iterator[None]:
    """Kernels that run inside the block compute bfloat16 right."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def narrow(value: Any) -> bool:
        return bool(value.dtype.scalar == tl.bfloat16)

    def wide(value: Any) -> Any:
        return handle(widen(value.data), tl.float32) if narrow(value) else value

    def cast(self: Any, source: Any, wanted: Any) -> Any:
        if wanted.scalar == tl.bfloat16:
            return handle(to_bfloat16(wide(source).data), tl.bfloat16)
        return original["cast_impl"](self, wide(source), wanted)

    def convert(self: Any, source: Any, wanted: Any, rounding: Any) -> Any:
        if wanted.scalar == tl.bfloat16 or narrow(source):
            return cast(self, source, wanted)
        return original["create_fp_to_fp"](self, source, wanted, rounding)

    def binary(self: Any, left: Any, right: Any, op: Callable[..., Any]) -> Any:
        if not narrow(left) or left.data.dtype != np.uint16 or op in _BITWISE:
            return original["binary_op"](self, left, right, op)
        result = op(widen(left.data), widen(right.data))
        if result.dtype == np.bool_:
            return handle(result, tl.int1)
        return handle(to_bfloat16(result), tl.bfloat16)

    def unary(self: Any, value: Any, op: Callable[..., Any]) -> Any:
        if not narrow(value):
            return original["unary_op"](self, value, op)
        return handle(to_bfloat16(op(widen(value.data))), tl.bfloat16)

    def dot(self: Any, left: Any, right: Any, total: Any, *rest: Any) -> Any:
        return original["create_dot"](self, wide(left), wide(right), total, *rest)

    methods: dict[str, Callable[..., Any]] = {
        "cast_impl": cast,
        "create_fp_to_fp": convert,
        "binary_op": binary,
        "unary_op": unary,
        "create_dot": dot,
    }
    original = {name: getattr(builder, name) for name in methods}
    # numpy warns of what a GPU computes without a word: exp of a large number is infinite
    with replaced(builder, methods), np.errstate(all="ignore"):
        yield
