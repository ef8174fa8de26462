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
from msc.codegen.kernels import (
    attention_backward,
    attention_forward,
    gather_gemm,
    gemm,
)
from msc.codegen.kernels.attention import Attention
from msc.codegen.kernels.description import SM_80, SM_90, Kernel, Target, Tiles
from msc.codegen.kernels.epilogue import Epilogue
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gemm import Gemm
from msc.codegen.kernels.launch import bind, function

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
    """Tiles of a plain product, as the catalogue has them."""
    if make.device == "cpu":
        return Tiles(16, 16, 16, group=2)
    if target.has_tensor_memory_accelerator:
        return Tiles(128, 256, 64, warps=8, stages=4, parts=2)
    return Tiles(128, 256, 32, warps=8, stages=3)


def launcher(kernel: Kernel, values: Values) -> Callable[[], None]:
    """A call of the kernel on these tensors; its arguments are made once."""
    entry, arguments = function(kernel), bind(kernel, values)
    options: dict[str, Any] = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    if kernel.cooperative:
        options["launch_cooperative_grid"] = True
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    if tensors[0].device.type == "cuda":
        return lambda: entry[kernel.grid](*arguments, **options)
    from msc.testing.interpreter import interpreted

    def run() -> None:
        with interpreted():
            entry[kernel.grid](*arguments, **options)

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
    expected = functools.partial(_product_float64, a, b)
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
        lambda: functional.gelu(_product_float64(a, b) + bias.double(), approximate="tanh"),
        lambda: functional.gelu(functional.linear(a, b, bias), approximate="tanh"),
    )


def _product_float64(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double().t()


def attention_kernel_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Flash attention, forward and both parts of the backward, beside torch's."""
    if dtype != torch.bfloat16:
        return
    batch, length, heads, size = shapes_of(sizes).attention
    target = target_of(make)
    scale = 1 / math.sqrt(size)
    hopper = target.has_tensor_memory_accelerator
    tiny = make.device == "cpu"
    forward = Tiles(16, 16, 0) if tiny else Tiles(128, 128 if hopper else 64, 0, stages=2)
    keys = forward if tiny else Tiles(32 if hopper else 64, 128 if hopper else 64, 0, stages=2)
    queries = forward if tiny else Tiles(128, 64 if hopper else 32, 0, stages=2)
    sums = forward if tiny else Tiles(64, 0, 0, warps=4, stages=1)
    shape = (batch, length, heads, size)
    q, k, v, gy = (make.normal(*shape, dtype=dtype) for _ in range(4))
    for window in (0, max(2, length // 8)):
        own = Attention(batch, length, heads, heads, size, "bfloat16", target, scale, window=window)
        out, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
        lse, delta = (q.new_empty(shape[:3], dtype=torch.float32) for _ in range(2))
        tensors = {"q": q, "k": k, "v": v, "gy": gy, "out": out, "dq": dq, "dk": dk, "dv": dv}
        values: dict[str, Any] = {**tensors, "lse": lse, "delta": delta}
        forward_run, *backward_runs = (
            launcher(kernel, _seen(kernel, values))
            for kernel in (
                attention_forward.emit(own, forward),
                attention_backward.emit_delta(own, sums),
                attention_backward.emit_keys(own, keys),
                attention_backward.emit_queries(own, queries),
            )
        )

        def backward(runs: list[Callable[[], None]] = backward_runs) -> None:
            for run in runs:
                run()

        flops = 2.0 * batch * heads * length * length * size
        if window:
            flops = 4.0 * batch * heads * length * window * size
        label = f"window {window}" if window else "causal"
        rivals = _attention_rivals(q, k, v, gy, scale) if not window else (None, None)
        expected = functools.partial(_attention_float64, q, k, v, gy, scale, window)
        yield Case(
            f"kernel attention {label}",
            gives(forward_run, out, lse),
            functools.partial(_part, expected, slice(0, 2)),
            rivals[0],
            flops,
            "TFLOP/s",
            dtype,
        )
        yield Case(
            f"kernel attention_backward {label}",
            gives(backward, dq, dk, dv),
            functools.partial(_part, expected, slice(2, 5)),
            rivals[1],
            2.5 * flops,
            "TFLOP/s",
            dtype,
        )


def _part(expected: Callable[[], tuple[Tensor, ...]], part: slice) -> tuple[Tensor, ...]:
    return expected()[part]


def _seen(kernel: Kernel, values: Values) -> dict[str, Any]:
    """What the kernel takes of these values, tensors of heads as descriptors see them."""
    return {
        argument.name: values[argument.name].flatten(0, 1).flatten(1)
        if argument.kind == "descriptor"
        else values[argument.name]
        for argument in kernel.arguments
    }


def _attention_rivals(
    q: Tensor, k: Tensor, v: Tensor, gy: Tensor, scale: float
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    query, key, value = leaves

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale
        )

    with torch.enable_grad():
        out = forward()
    given = gy.transpose(1, 2)
    return forward, lambda: torch.autograd.grad(out, leaves, given, retain_graph=True)


def _attention_float64(
    q: Tensor, k: Tensor, v: Tensor, gy: Tensor, scale: float, window: int
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv, one sample at a time."""
    length = q.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if window:
        visible = visible & ~visible.tril(-window)
    parts: list[tuple[Tensor, ...]] = []
    for i in range(q.shape[0]):
        leaves = [x[i].double().transpose(0, 1).requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            scores = scale * leaves[0] @ leaves[1].transpose(1, 2)
            scores = scores.masked_fill(~visible, float("-inf"))
            out = scores.softmax(-1) @ leaves[2]
            grads = torch.autograd.grad(out, leaves, gy[i].double().transpose(0, 1))
        lse = scores.detach().logsumexp(-1)
        parts.append(tuple(x.detach().transpose(0, 1) for x in (out, lse, *grads)))
    return tuple(torch.stack(found) for found in zip(*parts, strict=True))
