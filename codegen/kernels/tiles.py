"""How kernels are cut on each target: tiles that pass the gate of `make kernels`.

No spills, within shared memory, on Hopper with wgmma. Which tiles are fast only a device can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels.attention import Attention
from msc.codegen.kernels.description import Target, Tiles, power_of_two
from msc.codegen.kernels.dtypes import on_tensor_cores
from msc.codegen.kernels.epilogue import Epilogue


def gemm_tiles(target: Target) -> Tiles:
    """Tiles of a product that stores its result and nothing more."""
    if target.has_tensor_memory_accelerator:
        return Tiles(128, 256, 64, warps=8, stages=4, parts=2)
    return Tiles(128, 256, 32, warps=8, stages=3)


def epilogue_tiles(target: Target) -> Tiles:
    """Tiles where an epilogue reads and stores more."""
    if target.has_tensor_memory_accelerator:
        return Tiles(128, 256, 64, warps=8, stages=3, parts=2)
    return Tiles(128, 128, 32, warps=8, stages=4)


def gated_tiles(target: Target) -> Tiles:
    """Tiles of two products at once, gate and up."""
    if target.has_tensor_memory_accelerator:
        return Tiles(128, 128, 64, warps=8, stages=3)
    return Tiles(128, 64, 32, warps=8, stages=4)


def scatter_tiles(target: Target) -> Tiles:
    """Tiles of a product whose tiles are not stored as they are, or go to other ranks."""
    if target.has_tensor_memory_accelerator:
        return Tiles(128, 256, 64, warps=8, stages=4)
    return Tiles(128, 128, 32, warps=8, stages=4)


def several_tiles(target: Target) -> Tiles:
    """Tiles for several weights, whose blocks are read through pointers."""
    if target.has_tensor_memory_accelerator:
        return Tiles(128, 128, 64, warps=8, stages=4)
    return Tiles(128, 128, 32, warps=8, stages=4)


def head_tiles(target: Target, size: tuple[int, int, int], dtype: str) -> Tiles:
    """Tiles of a head with its loss, [m, n] logits over k, on any target."""
    if target.interpreted or not on_tensor_cores(dtype):
        return product_tiles(target, size, dtype, Epilogue())
    return scatter_tiles(target)


@dataclass(frozen=True)
class AttentionTiles:
    """Of each of attention's kernels."""

    forward: Tiles
    delta: Tiles
    keys: Tiles
    queries: Tiles


def product_tiles(
    target: Target, size: tuple[int, int, int], dtype: str, epilogue: Epilogue
) -> Tiles:
    """Tiles of a product [m, n] over k with an epilogue, on any target."""
    if target.interpreted:
        m, n, k = (fitting(length, 128) for length in size)
        return Tiles(m, n, k)
    if not on_tensor_cores(dtype):
        return Tiles(64, 64, 32, warps=8, stages=3)
    if epilogue.gated:
        return gated_tiles(target)
    return gemm_tiles(target) if epilogue == Epilogue() else epilogue_tiles(target)


def product_space(target: Target) -> tuple[Tiles, ...]:
    """Tiles among which a product's fastest may be; not all pass the gate with every epilogue."""
    if target.interpreted:
        return (Tiles(64, 64, 64), Tiles(32, 64, 64))
    if target.has_tensor_memory_accelerator:
        return (
            Tiles(128, 256, 64, warps=8, stages=4, parts=2),
            Tiles(128, 256, 64, warps=8, stages=3, parts=2),
            Tiles(128, 256, 64, warps=8, stages=3),
            Tiles(256, 128, 64, warps=8, stages=3),
            Tiles(128, 128, 64, warps=8, stages=4),
            Tiles(128, 128, 64, warps=4, stages=4),
            Tiles(128, 128, 128, warps=8, stages=3),
            Tiles(64, 256, 64, warps=4, stages=4),
            Tiles(64, 128, 64, warps=4, stages=5),
            Tiles(64, 128, 128, warps=4, stages=4),
        )
    return (
        Tiles(128, 256, 32, warps=8, stages=3),
        Tiles(256, 128, 32, warps=8, stages=3),
        Tiles(128, 256, 64, warps=8, stages=3),
        Tiles(128, 128, 32, warps=8, stages=4),
        Tiles(128, 128, 32, warps=4, stages=4),
        Tiles(128, 128, 64, warps=4, stages=3),
        Tiles(128, 64, 32, warps=4, stages=4),
        Tiles(64, 128, 32, warps=4, stages=4),
        Tiles(64, 64, 64, warps=4, stages=4),
    )


def fitting(length: int, most: int) -> int:
    """The power of two from 16 to `most` that holds `length`, or `most`."""
    return min(most, max(16, power_of_two(length)))


def attention_tiles(attention: Attention) -> AttentionTiles:
    """Tiles of attention's kernels, on any target."""
    target = attention.target
    if target.interpreted:
        block = fitting(attention.length, 64)
        square = Tiles(block, block, 0)
        return AttentionTiles(square, square, square, square)
    # heads that share keys and values: a program adds up what all of them give
    grouped = attention.heads > attention.groups
    delta = Tiles(64, 0, 0, warps=4, stages=1)
    if target.has_tensor_memory_accelerator:
        forward, queries = Tiles(128, 128, 0, stages=2), Tiles(128, 64, 0, stages=2)
        keys = Tiles(32, 64 if grouped else 128, 0, stages=2)
    else:
        forward, queries = Tiles(128, 64, 0, stages=2), Tiles(128, 32, 0, stages=2)
        keys = Tiles(64, 64, 0, stages=2)
        if grouped and attention.lanes < 128:
            keys = Tiles(32, 32, 0, warps=4, stages=2)
    return AttentionTiles(forward, delta, keys, queries)
