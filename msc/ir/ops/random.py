"""Counter-based dropout: each element's fate depends on the seed, the step, the op instance and the
element's index in the whole tensor, never on how the tensor is sharded or split into micro-batches.

The hash is the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) on
`key + (index + 1) * golden`, in int64 arithmetic that wraps around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msc.ir.ops.library import define


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)

# The hash needs 8 bytes an element; blocks of rows keep that in the cache of a CPU.
_CPU_BLOCK_ELEMENTS = 1 << 16
_DEVICE_BLOCK_ELEMENTS = 1 << 26


def rng_key(rng: Tensor, instance: int) -> Tensor:
    """The key of one dropout: rng int64 `[2]` = (seed, step) -> 0-dim int64."""
    seed, step = rng[0], rng[1]
    key = mix_(seed * GOLDEN + GOLDEN)
    key = mix_((key ^ step) * GOLDEN + GOLDEN)
    return mix_((key ^ instance) * GOLDEN + GOLDEN)


def dropout(
    x: Tensor, p: float, key: Tensor, coordinates: Sequence[Tensor | None], shape: Sequence[int]
) -> Tensor:
    """x with each element zeroed with probability p, the others divided by 1 - p.

    x is all or a part of a whole tensor of `shape`: its element `[i, j, ..]` is the whole's element
    `[coordinates[0][i], coordinates[1][j], ..]`, where coordinates are 1-D int64, or None for a dim
    that is whole. key: 0-dim int64 from `rng_key`.
    """
    _check_part(x, coordinates, shape)
    result = x.new_empty(x.shape)
    if p >= 1.0:
        return result.zero_()
    if x.numel() == 0:
        return result
    rows, columns = flat_indices(coordinates, shape, x.device)
    row_hash = (rows + 1).mul_(GOLDEN).add_(key.to(x.device)).unsqueeze(1)
    column_hash = columns * GOLDEN
    x_2d, result_2d = x.reshape(len(rows), -1), result.view(len(rows), -1)
    # The hash is uniform over int64, so that comparing with p is comparing with its place there.
    threshold = math.ceil(p * 2.0**64) - (1 << 63)
    elements = _CPU_BLOCK_ELEMENTS if x.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    step = max(1, elements // len(columns))
    for first in range(0, len(rows), step):
        block = slice(first, first + step)
        dropped = mix_(row_hash[block] + column_hash) < threshold
        torch.mul(x_2d[block], 1.0 / (1.0 - p), out=result_2d[block])
        result_2d[block].masked_fill_(dropped, 0.0)
    return result


def global_coordinates(
    length: int, indices: Sequence[Tensor | None], sizes: Sequence[int], segments: Sequence[int]
) -> Tensor:
    """The global index of each local index of a sharded dim: 1-D int64.

    length: of the whole dim. Its axes, major to minor, have `sizes`; this rank is `indices[a]`
    (0-dim int64; None only for a size of 1) of axis a, which splits each of `segments[a]` equal
    runs of what the axes before it left.
    """
    device = next((index.device for index in indices if index is not None), None)
    result = torch.arange(length, device=device)
    for index, size, runs in zip(indices, sizes, segments, strict=True):
        if index is not None:
            parts = result.view(runs, size, -1)
            result = parts.index_select(1, index.reshape(1)).reshape(-1)
    return result


def mix_(z: Tensor) -> Tensor:
    """splitmix64's finalizer, in place."""
    _xor_shift_(z, 30).mul_(_MIX_1)
    _xor_shift_(z, 27).mul_(_MIX_2)
    return _xor_shift_(z, 31)


def _xor_shift_(z: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it the logical shift of the hash.
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def flat_indices(
    coordinates: Sequence[Tensor | None], shape: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row-major global index of element (row, column) of a part as `rows[row] + columns[column]`.

    The part is that of `dropout`. Rows are all dims but the last, flattened; a tensor without dims
    is one row and column.
    """
    rows = columns = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, (coordinate, length) in enumerate(zip(coordinates, shape, strict=True)):
        here = torch.arange(length, device=device)
        if coordinate is not None:
            here = coordinate.to(device)
        if dim == len(shape) - 1:
            rows, columns = rows * length, here
        else:
            rows = (rows.unsqueeze(1) * length + here).view(-1)
    return rows, columns


def _rng_key_fake(rng: Tensor, instance: int) -> Tensor:
    if tuple(rng.shape) != (2,) or rng.dtype != torch.int64:
        raise ValueError(
            f"rng_key: rng is int64 [2] = (seed, step), not {rng.dtype} {tuple(rng.shape)}"
        )
    return rng.new_empty(())


def _dropout_fake(
    x: Tensor, p: float, key: Tensor, coordinates: Sequence[Tensor | None], shape: Sequence[int]
) -> Tensor:
    _check_part(x, coordinates, shape)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p={p} is no probability")
    return x.new_empty(x.shape)


def _check_part(x: Tensor, coordinates: Sequence[Tensor | None], shape: Sequence[int]) -> None:
    if len(coordinates) != len(shape):
        raise ValueError(f"dropout: {len(coordinates)} coordinates for a whole of {tuple(shape)}")
    part = tuple(
        whole if coordinate is None else coordinate.shape[0]
        for coordinate, whole in zip(coordinates, shape, strict=True)
    )
    if part != tuple(x.shape):
        raise ValueError(
            f"dropout: coordinates describe a part {part} of {tuple(shape)}, "
            f"but x is {tuple(x.shape)}"
        )


def _global_coordinates_fake(
    length: int, indices: Sequence[Tensor | None], sizes: Sequence[int], segments: Sequence[int]
) -> Tensor:
    left = length
    for index, size, runs in zip(indices, sizes, segments, strict=True):
        if left % (runs * size) or (index is None and size != 1):
            raise ValueError(
                f"global_coordinates: {left} of {length} indices do not split into runs "
                f"{list(segments)} over axes of sizes {list(sizes)}, or an axis has no index"
            )
        left //= size
    device = next((index.device for index in indices if index is not None), None)
    return torch.empty(left, dtype=torch.int64, device=device)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.p, key, coordinates, ctx.shape = inputs
    ctx.save_for_backward(key, *coordinates)


def _dropout_backward(ctx: Any, gy: Tensor) -> tuple[Any, ...]:
    key, *coordinates = ctx.saved_tensors
    gx = DROPOUT(gy, ctx.p, key, coordinates, ctx.shape)
    # torch wants a list of gradients for a list of nothing but tensors, even for an empty list.
    listed = all(coordinate is not None for coordinate in coordinates)
    no_grads = [None] * len(coordinates) if listed else None
    return gx, None, None, no_grads, None if ctx.shape else []


RNG_KEY = define("rng_key(Tensor rng, int instance) -> Tensor", rng_key, _rng_key_fake)
GLOBAL_COORDINATES = define(
    "global_coordinates(int length, Tensor?[] indices, int[] sizes, int[] segments) -> Tensor",
    global_coordinates,
    _global_coordinates_fake,
)
DROPOUT = define(
    "dropout(Tensor x, float p, Tensor key, Tensor?[] coordinates, int[] shape) -> Tensor",
    dropout,
    _dropout_fake,
    setup=_dropout_setup,
    backward=_dropout_backward,
)
