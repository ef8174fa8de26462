"""bfloat16 in the interpreter: rounding and arithmetic as torch has them, and not without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from msc.codegen.kernels.description import SM_90, Argument, Kernel
from msc.codegen.kernels.launch import launch
from msc.codegen.kernels.numerics import to_bfloat16, widen
from msc.codegen.kernels.source import module
from msc.testing.interpreter import interpreted

SIZE = 256


def run(expression: str, **values: Tensor) -> Tensor:
    """The bfloat16 result of an expression of `a` and `b`, bfloat16 or float32 vectors."""
    result = torch.zeros(SIZE, dtype=torch.bfloat16)
    names = [*values, "result"]
    loads = "\n".join(f"    {name} = tl.load({name} + at)" for name in values)
    body = f"    at = tl.arange(0, {SIZE})\n{loads}\n    tl.store(result + at, {expression})"
    text = f"@triton.jit\ndef kernel({', '.join(names)}):\n{body}\n"
    dtypes = {**values, "result": result}
    arguments = tuple(
        Argument(name, "pointer", str(value.dtype).removeprefix("torch."))
        for name, value in dtypes.items()
    )
    kernel = Kernel("k", module("A test.", {}, text), "kernel", arguments, (1,), SM_90, 4, 1)
    launch(kernel, {**values, "result": result})
    return result


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, SIZE, generator=generator).bfloat16()
    return a, b


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a + b", lambda a, b: a + b),
        ("a * b", lambda a, b: a * b),
        ("a - b", lambda a, b: a - b),
        ("tl.where(a < b, a, b)", lambda a, b: torch.where(a < b, a, b)),
        ("a.to(tl.float32) * 3.0", lambda a, b: (a.float() * 3).bfloat16()),
    ],
)
def test_arithmetic(expression: str, expected: Any) -> None:
    a, b = vectors()
    with interpreted():
        assert torch.equal(run(expression, a=a, b=b), expected(a, b))


def test_a_store_rounds_to_the_nearest() -> None:
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    with interpreted():
        assert torch.equal(run("x", x=x), x.bfloat16())


def test_without_it_the_interpreter_is_wrong() -> None:
    """If this fails, Triton has learnt bfloat16, and the replacement can go."""
    a, b = vectors()
    assert not torch.equal(run("a * b", a=a, b=b), a * b)
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(run("x", x=x), x.bfloat16())


def test_every_bit_pattern_survives() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = widen(bits)
    kept = ~np.isnan(numbers)
    assert np.array_equal(to_bfloat16(numbers)[kept], bits[kept])
    assert np.isnan(widen(to_bfloat16(numbers[~kept]))).all()


def test_ties_go_to_even() -> None:
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, float("inf")])
    found = torch.from_numpy(widen(to_bfloat16(x.numpy())).copy())
    assert torch.equal(found, x.bfloat16().float())
