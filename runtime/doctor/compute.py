"""Checks of processors and memory: a product with a known answer, and the speed of a copy."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from msc.runtime.checkpoint.manifest import digest
from msc.runtime.doctor.check import Check, Value, failed, measured, passed

SIZE = 512
DEPTHS = {torch.float64: SIZE, torch.float32: SIZE, torch.bfloat16: 32}
"""How many terms each sum has: in bfloat16 so few that all sums are whole numbers up to 256."""

ANSWERS = {512: "7a7db3fc7df3d6cf", 32: "3a8f39eb8f4d7d2a"}
"""Digests of the products as int64, row by row, for each depth."""

Multiply = Callable[[Tensor, Tensor], Tensor]


def operands(depth: int) -> tuple[Tensor, Tensor]:
    """Matrices `[512,depth]` and `[depth,512]` of whole numbers from -2 to 2, int64.

    Every partial sum of their product is exact in every dtype of `DEPTHS`, in whatever order it is
    added, so that no rounding excuses a difference.
    """
    index = torch.arange(2 * SIZE * SIZE, dtype=torch.int64)
    mixed = (index * 2654435761 + 12345) & 0xFFFFFFFF
    mixed = mixed ^ (mixed >> 15)
    mixed = (mixed * 2246822519) & 0xFFFFFFFF
    left, right = ((mixed ^ (mixed >> 13)) % 5 - 2).view(2, SIZE, SIZE)
    return left[:, :depth].contiguous(), right[:depth].contiguous()


def check_gemm(device: torch.device, repeats: int, multiply: Multiply = torch.matmul) -> Check:
    """Multiply in every dtype, again and again: each result must be the answer, bit for bit."""
    name = f"gemm {device}"
    work, spent = 0, 0.0
    for dtype, depth in DEPTHS.items():
        left, right = operands(depth)
        answer = left @ right
        if digest(answer.numpy().tobytes()) != ANSWERS[depth]:
            return failed(name, "the product in whole numbers on the CPU is not the stored answer")
        given = left.to(device, dtype), right.to(device, dtype)
        for turn in range(repeats):
            started = time.perf_counter()
            found = multiply(*given).cpu().to(torch.int64)
            spent += time.perf_counter() - started
            work += 2 * SIZE * SIZE * depth
            wrong = (found != answer).nonzero()
            if len(wrong):
                row, column = wrong[0].tolist()
                return failed(
                    name,
                    f"{len(wrong)} of {answer.numel()} elements of product {turn + 1} in {dtype} "
                    f"are wrong, first [{row},{column}]: {int(found[row, column])} instead of "
                    f"{int(answer[row, column])}",
                )
    rate = Value(work / spent / 1e9, "GFLOP/s")
    return passed(name, f"{repeats} products in each of {len(DEPTHS)} dtypes are exact", rate=rate)


def check_memory(size: int, repeats: int = 5) -> Check:
    """Copy `size` bytes from one buffer to another, and look at the copy."""
    source = torch.arange(size // 8, dtype=torch.int64)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    wrong = int((source != target).sum())
    if wrong:
        return failed("memory", f"{wrong} of {source.numel()} words of a copy differ")
    return measured("memory", bandwidth=Value(2 * size / best / 1e9, "GB/s", floor=0.5))
