"""The Triton kernels that `gpu_check` runs: alone beside torch's ops, then between virtual ranks.

On the CPU, at tiny sizes, Triton's interpreter runs them. Virtual ranks are buffers on the one
device, each with a kernel of its own that takes its part of the processors, so that flags between
kernels that run at the same time are really waited for. Where the link is PCIe, peers' shards lie
in pinned host memory, and a copy engine brings them while the kernel runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_cases import TINY, Case, Make, Sizes
from benchmarks.gpu_references import attention_float64, linear_float64, sdpa, window_mask
from msc.codegen.kernels import attention_backward, attention_forward, gather_gemm, gemm
from msc.codegen.kernels.attention import Attention, operands
from msc.codegen.kernels.description import SM_80, SM_90, Kernel, Target, Tiles
from msc.codegen.kernels.epilogue import Epilogue
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gemm import Gemm
from msc.codegen.kernels.launch import bind, function
from msc.codegen.kernels.tiles import AttentionTiles, attention_tiles, gated_tiles, gemm_tiles

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Shapes:
    """A square product, one with a gathered factor (per rank), ranks, and the product over PCIe."""

    square: int
    fused: tuple[int, int, int]
    ranks: int
    pcie: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int, int]


FULL = Shapes(
    8192, (8192, 4096, 4096), 4, ((8192, 24576, 12288), (8192, 49152, 12288)), (2, 4096, 16, 128)
)
SMALL = Shapes(64, (64, 48, 32), 2, ((64, 48, 32),), (1, 32, 2, 16))


def shapes_of(sizes: Sizes) -> Shapes:
    """The shapes of a run: small ones on the CPU."""
    return SMALL if sizes == TINY else FULL


def target_of(make: Make) -> Target:
    """What to emit kernels for: the device, or a small Hopper in the interpreter."""
    if make.device == "cpu":
        return dataclasses.replace(SM_90, processors=4)
    properties = torch.cuda.get_device_properties(make.device)
    known = SM_90 if (properties.major, properties.minor) >= (9, 0) else SM_80
    return dataclasses.replace(known, processors=properties.multi_processor_count)


def tiles_of(make: Make, target: Target) -> Tiles:
    """Tiles of a plain product, as the catalogue has them; small ones in the interpreter."""
    return Tiles(16, 16, 16, group=2) if make.device == "cpu" else gemm_tiles(target)


def launcher(kernel: Kernel, values: Values) -> Callable[[], None]:
    """A call of the kernel on these tensors; its arguments are made once."""
    entry, arguments = function(kernel), bind(kernel, values)
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    if tensors[0].device.type == "cuda":
        return lambda: entry[kernel.grid](*arguments, **kernel.options)
    from msc.testing.interpreter import interpreted

    def run() -> None:
        with interpreted():
            entry[kernel.grid](*arguments, **kernel.options)

    return run


def gives(run: Callable[[], None], *results: Tensor) -> Callable[[], list[Tensor]]:
    """A call that returns what the kernel wrote."""

    def call() -> list[Tensor]:
        run()
        return list(results)

    return call


def product_kernel_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """A product beside cuBLAS, then with waits on flags that are set: the protocol's tax."""
    if dtype != torch.bfloat16:
        return
    size, target = shapes_of(sizes).square, target_of(make)
    tiles = tiles_of(make, target)
    a, b = make.normal(size, size, dtype=dtype), make.normal(size, size, dtype=dtype)
    c = torch.empty_like(a)
    flops = 2.0 * size**3
    rival = functools.partial(torch.mm, a, b.t())
    plain = launcher(
        gemm.emit(Gemm(size, size, size, "bfloat16", target, tiles)), {"a": a, "b": b, "c": c}
    )
    case = functools.partial(Case, work=flops, unit="TFLOP/s", dtype=dtype)
    expected = functools.partial(linear_float64, a, b)
    yield case("kernel gemm", gives(plain, c), expected, rival)
    fused = GatherGemm(size, size, (size,), 8 if size > 64 else 2, "bfloat16", target, tiles)
    flags = torch.ones(fused.chunks.flags, dtype=torch.int32, device=make.device)
    values = {"a": a, "b": b, "c": c, "flags": flags, "rank": 0, "want": 1}
    waits = gives(launcher(gather_gemm.emit(fused), values), c)
    yield case("kernel gather_gemm, flags set, over gemm", waits, expected, plain)
    bias = make.normal(size, dtype=dtype)
    epilogue = Epilogue(bias=True, activation="gelu_tanh")
    made = Gemm(size, size, size, "bfloat16", target, tiles, epilogue=epilogue)
    run = gives(launcher(gemm.emit(made), {"a": a, "b": b, "c": c, "bias": bias}), c)
    yield case(
        "kernel gemm + bias + gelu",
        run,
        lambda: functional.gelu(linear_float64(a, b) + bias.double(), approximate="tanh"),
        lambda: functional.gelu(functional.linear(a, b, bias), approximate="tanh"),
    )
    up, kept = make.normal(size, size, dtype=dtype), (torch.empty_like(a), torch.empty_like(a))
    epilogue = Epilogue(activation="swiglu", keep=True, apart=True)
    tiles = tiles if make.device == "cpu" else gated_tiles(target)
    made = Gemm(size, size, size, "bfloat16", target, tiles, epilogue=epilogue)
    values = {"a": a, "b": b, "b_up": up, "c": c, "kept": kept[0], "kept_up": kept[1]}
    yield Case(
        "kernel gemm + swiglu, two weights",
        gives(launcher(gemm.emit(made), values), c),
        lambda: functional.silu(linear_float64(a, b)) * linear_float64(a, up),
        lambda: functional.silu(functional.linear(a, b)) * functional.linear(a, up),
        2 * flops,
        "TFLOP/s",
        dtype,
    )


def attention_kernel_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Flash attention, forward and both parts of the backward, beside torch's."""
    if dtype != torch.bfloat16:
        return
    batch, length, heads, size = shapes_of(sizes).attention
    target = target_of(make)
    scale = 1 / math.sqrt(size)
    shape = (batch, length, heads, size)
    q, k, v, gy = (make.normal(*shape, dtype=dtype) for _ in range(4))
    for window in (0, max(2, length // 8)):
        own = Attention(batch, length, heads, heads, size, "bfloat16", target, scale, window=window)
        small = AttentionTiles(*[Tiles(16, 16, 0)] * 4)
        tiles = small if make.device == "cpu" else attention_tiles(own)
        out, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
        lse, delta = (q.new_empty(shape[:3], dtype=torch.float32) for _ in range(2))
        tensors = {"q": q, "k": k, "v": v, "gy": gy, "out": out, "dq": dq, "dk": dk, "dv": dv}
        values: dict[str, Any] = {**tensors, "lse": lse, "delta": delta}
        forward_run, *backward_runs = (
            launcher(kernel, operands(kernel, values))
            for kernel in (
                attention_forward.emit(own, tiles.forward),
                attention_backward.emit_delta(own, tiles.delta),
                attention_backward.emit_keys(own, tiles.keys),
                attention_backward.emit_queries(own, tiles.queries),
            )
        )

        def backward(runs: list[Callable[[], None]] = backward_runs) -> None:
            for run in runs:
                run()

        flops = 2.0 * batch * heads * length * length * size
        if window:
            flops = 4.0 * batch * heads * length * window * size
        label = f"window {window}" if window else "causal"
        mask = window_mask(length, window, q.device) if window else None
        given: tuple[Any, ...] = (*(x.transpose(1, 2) for x in (q, k, v, gy)), mask, scale, True)
        rivals = (None, None) if window else sdpa(*given)
        yield Case(
            f"kernel attention {label}",
            gives(forward_run, out, lse),
            functools.partial(_attention_part, slice(0, 2), *given),
            rivals[0],
            flops,
            "TFLOP/s",
            dtype,
        )
        yield Case(
            f"kernel attention_backward {label}",
            gives(backward, dq, dk, dv),
            functools.partial(_attention_part, slice(2, 5), *given),
            rivals[1],
            2.5 * flops,
            "TFLOP/s",
            dtype,
        )


def _attention_part(part: slice, *given: Any) -> list[Tensor]:
    return [x.transpose(1, 2) for x in attention_float64(*given)[part]]
