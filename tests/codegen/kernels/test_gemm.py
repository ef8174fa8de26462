"""GEMM kernels in the interpreter against float64: layouts, epilogues, odd sizes, both targets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from msc.codegen.kernels.description import SM_80, SM_90, Target, Tiles
from msc.codegen.kernels.epilogue import GATED, Epilogue
from msc.codegen.kernels.gemm import Gemm, emit
from msc.codegen.kernels.launch import bind, launch
from msc.ir.errors import PlanError
from msc.testing.interpreter import interpreted
from tests.codegen.kernels.fused import error, poisoned

TILES = Tiles(32, 32, 32, group=2)
FEW = [dataclasses.replace(target, processors=3) for target in (SM_80, SM_90)]
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}
EVERYTHING = Epilogue(bias=True, activation="gelu", residual=True, keep=True)


def operands(gemm: Gemm) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Arguments of the kernel, the value before the activation, and the result, in float64."""
    dtype = getattr(torch, gemm.dtype)
    generator = torch.Generator().manual_seed(0)
    name, gated, apart = gemm.epilogue.activation, gemm.epilogue.gated, gemm.epilogue.apart

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    stored = 2 * gemm.n if gated else gemm.n
    a, b = random(gemm.m, gemm.k), random(stored, gemm.k)
    values: dict[str, Tensor] = {
        "a": a if gemm.a_layout == "mk" else a.t().contiguous(),
        "c": poisoned(gemm.m, gemm.n, dtype=dtype),
    }
    for right, weight in zip(("b", "b_up"), b.chunk(2) if apart else (b,), strict=False):
        values[right] = weight if gemm.b_layout == "nk" else weight.t().contiguous()
    before = a.double() @ b.double().t()
    if gemm.epilogue.bias:
        values["bias"] = random(gemm.n)
        before += values["bias"].double()
    activations: dict[str, Any] = {
        "": lambda x: x,
        "relu": torch.relu,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }
    gate, up = torch.split(before, gemm.n, 1) if gated else (before, 1.0)
    result = activations[GATED.get(name, name)](gate) * up
    if gemm.epilogue.residual:
        values["residual"] = random(gemm.m, gemm.n)
        result = result + values["residual"].double()
    if gemm.epilogue.keep:
        for kept in ("kept", "kept_up") if apart else ("kept",):
            values[kept] = poisoned(gemm.m, gemm.n if apart else stored, dtype=dtype)
    return values, before, result


def check(gemm: Gemm) -> None:
    values, before, result = operands(gemm)
    with interpreted():
        launch(emit(gemm), values)
    assert error(values["c"], result) <= TOLERANCE[gemm.dtype]
    if gemm.epilogue.keep:
        kept = torch.cat([values[each] for each in ("kept", "kept_up") if each in values], 1)
        assert error(kept, before) <= TOLERANCE[gemm.dtype]


@pytest.mark.parametrize("target", FEW, ids=lambda target: target.name)
@pytest.mark.parametrize("layouts", ["mk nk", "mk kn", "km nk", "km kn"])
@pytest.mark.parametrize("size", [(64, 96, 64), (72, 40, 48), (33, 17, 21)])
def test_layouts(target: Target, layouts: str, size: tuple[int, int, int]) -> None:
    a, b = layouts.split()
    check(Gemm(*size, "bfloat16", target, TILES, a, b))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "epilogue",
    [
        EVERYTHING,
        Epilogue(activation="gelu_tanh"),
        Epilogue(activation="relu", keep=True),
        Epilogue(activation="silu", residual=True),
        Epilogue(activation="swiglu", keep=True),
        Epilogue(activation="geglu_tanh", residual=True),
        Epilogue(activation="swiglu", keep=True, apart=True),
    ],
    ids=lambda epilogue: epilogue.label,
)
def test_epilogues(dtype: str, parts: int, epilogue: Epilogue) -> None:
    tiles = dataclasses.replace(TILES, parts=parts)
    check(Gemm(40, 48, 32, dtype, FEW[1], tiles, epilogue=epilogue))


def test_the_text() -> None:
    """What a reader of a dump finds: whole, since any line may go wrong."""
    kernel = emit(Gemm(256, 512, 128, "bfloat16", SM_90, Tiles(128, 256, 64, parts=2)))
    assert (
        kernel.source
        == '''"""c[256, 512] = a @ b over 128, for sm_90."""

import triton
import triton.language as tl

M = tl.constexpr(256)
N = tl.constexpr(512)
K = tl.constexpr(128)
BM = tl.constexpr(128)
BN = tl.constexpr(256)
BK = tl.constexpr(64)
GROUP = tl.constexpr(8)
TILES_M = tl.constexpr(2)
TILES_N = tl.constexpr(2)
PROGRAMS = tl.constexpr(4)


@triton.jit
def tile_at(index):
    # groups of GROUP rows of tiles, column after column inside a group
    first = index // (GROUP * TILES_N) * GROUP
    inside = index % (GROUP * TILES_N)
    height = min(TILES_M - first, GROUP)
    return first + inside % height, inside // height


@triton.jit
def gemm(a, b, c):
    for tile in tl.range(tl.program_id(0), TILES_M * TILES_N, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_at(tile)
        row = tile_m * BM
        column = tile_n * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            left = a.load([row, k])
            right = b.load([column, k])
            acc = tl.dot(left, right.T, acc)
        acc_left, acc_right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        c.store([row, column], acc_left.to(tl.bfloat16))
        c.store([row, column + BN // 2], acc_right.to(tl.bfloat16))
'''
    )


def test_what_cannot_be_described_has_pointers_and_masks() -> None:
    text = emit(Gemm(33, 17, 21, "bfloat16", SM_90, TILES)).source
    assert "mask=(rows[:, None] < M) & (steps[None, :] < K - k)" in text
    assert ".load([" not in text


def test_offsets_beyond_32_bits_are_wide() -> None:
    small, large = (Gemm(m, 4096, 4096, "bfloat16", SM_80, TILES) for m in (2**18, 2**20))
    assert "int64" not in emit(small).source
    assert "rows[:, None].to(tl.int64) * 4096" in emit(large).source


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: emit(Gemm(8, 8, 8, "float64", SM_80, TILES)),
            "gemm: no kernel computes on float64",
        ),
        (lambda: Epilogue(activation="elu"), "no activation 'elu'"),
        (lambda: Epilogue(activation="gelu", apart=True), "two weights only where one gates"),
        (lambda: Epilogue(bias=True, activation="swiglu"), "swiglu has no bias"),
        (lambda: Epilogue(keep=True), "keeps what its activation reads"),
        (lambda: emit(Gemm(8, 8, 8, "float32", SM_80, TILES, "nm")), "no layout 'nm'"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_arguments_are_checked() -> None:
    kernel = emit(Gemm(32, 32, 32, "float32", SM_80, TILES))
    a = torch.zeros(32, 32)
    with pytest.raises(ValueError, match=r"takes \['a', 'b', 'c'\], and was given \['a'\]"):
        bind(kernel, {"a": a})
    with pytest.raises(ValueError, match=r"a must be a contiguous tensor of torch\.float32"):
        bind(kernel, {"a": a.double(), "b": a, "c": a})
    with pytest.raises(ValueError, match=r"with strides \(1, 32\)"):
        bind(kernel, {"a": a.t(), "b": a, "c": a})
