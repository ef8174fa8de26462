"""Sample calls of ops on images and sequences, and on whole matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import ops

from msc.ir.torch_private import OpOverload
from msc.testing.samples.draw import Draw, samples

aten = ops.aten


def _image(draw: Draw, rank: int, length: int = 4) -> torch.Tensor:
    """`[n, c, ...]` with `rank` places of that length."""
    return draw.normal([draw.pick([1, 2, 3, 6]), draw.pick([1, 2, 3, 6]), *[length] * rank])


def _rank(op: OpOverload) -> int:
    """The number of places in an op's name: 2 in `avg_pool2d`."""
    return next(int(digit) for digit in str(op) if digit.isdigit())


@samples(
    aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d,
    aten.max_pool1d, aten.max_pool2d, aten.max_pool3d, aten.max_pool1d_with_indices,
    aten.max_pool2d_with_indices, aten.max_pool3d_with_indices,
)  # fmt: skip
def _pool(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rank = _rank(op)
    window, stride = draw.pick([2, 3]), draw.pick([1, 2])
    return _image(draw, rank), [window] * rank, [stride] * rank, [draw.count(0, 1)] * rank


@samples(
    aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d,
    aten.adaptive_max_pool1d, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d,
)  # fmt: skip
def _adaptive_pool(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rank = _rank(op)
    return _image(draw, rank), [draw.count(1, 3)] * rank


@samples(
    aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
    aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact2d.vec,
    aten._upsample_nearest_exact3d.vec,
)  # fmt: skip
def _nearest(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rank = _rank(op)
    return _image(draw, rank), *draw.pick([([3] * rank, None), (None, [2.0] * rank)])


@samples(
    aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec,
    aten.upsample_trilinear3d.vec, aten._upsample_bilinear2d_aa.vec,
    aten._upsample_bicubic2d_aa.vec,
)  # fmt: skip
def _interpolate(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rank = _rank(op)
    size, scale = draw.pick([([3] * rank, None), (None, [2.0] * rank)])
    return _image(draw, rank), size, draw.flag(), scale


@samples(aten.grid_sampler)
def _grid_sampler(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    x = _image(draw, 2)
    grid = draw.normal([x.shape[0], 3, 2, 2])
    return x, grid, draw.pick([0, 1]), draw.pick([0, 1]), draw.flag()


@samples(aten.im2col)
def _im2col(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return _image(draw, 2), [2, 2], [1, 1], [draw.count(0, 1)] * 2, [draw.pick([1, 2])] * 2


@samples(aten.col2im)
def _col2im(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    columns = draw.normal([draw.pick([1, 2, 6]), draw.pick([1, 2, 3, 6]) * 4, 9])
    return columns, [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]


@samples(aten.pixel_shuffle)
def _pixel_shuffle(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal([*draw.shape(0, 2), draw.pick([1, 2, 6]) * 4, 2, 3]), 2


@samples(aten.pixel_unshuffle)
def _pixel_unshuffle(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal([*draw.shape(0, 2), draw.pick([1, 2, 6]), 4, 2]), 2


@samples(aten.channel_shuffle)
def _channel_shuffle(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    groups = draw.pick([1, 2, 3])
    return draw.normal([draw.pick([1, 2, 3]), groups * draw.length(), 2, 2]), groups


@samples(aten.unfold)
def _unfold(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    dim = draw.dim(shape)
    return draw.normal(shape), dim, draw.count(1, shape[dim]), draw.pick([1, 2])


def _matrices(draw: Draw) -> torch.Tensor:
    """Positive definite ones, well conditioned."""
    root = draw.unit([*draw.shape(0, 2), 3, 3])
    return root @ root.mT / 3 + torch.eye(3, dtype=root.dtype)


@samples(
    aten.linalg_inv, aten.inverse, aten.linalg_cholesky, aten.linalg_matrix_exp,
    aten.matrix_exp, aten.linalg_det, aten.det, aten.logdet, aten.linalg_slogdet,
)  # fmt: skip
def _of_matrices(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (_matrices(draw),)


@samples(aten.linalg_matrix_power)
def _matrix_power(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return _matrices(draw), draw.count(0, 3)


@samples(aten.linalg_solve_triangular)
def _solve_triangular(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    matrix = _matrices(draw).tril()
    right = draw.normal([*matrix.shape[:-1], draw.length()])
    return matrix, right, {"upper": False}


@samples(aten.trace)
def _trace(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal([draw.length(), draw.length()]),)


@samples(aten.linalg_norm)
def _linalg_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), None, [draw.dim(shape)], draw.flag()


@samples(aten.linalg_matrix_norm.str_ord)
def _matrix_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape(2)), "fro", [-2, -1], draw.flag()


@samples(aten.fft_fft, aten.fft_ifft, aten.fft_rfft)
def _fft(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), None, draw.dim(shape)


@samples(aten.fft_irfft)
def _irfft(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal([*draw.shape(0, 2), 6]), None, -1


@samples(aten.fft_fft2, aten.fft_ifft2, aten.fft_rfft2)
def _fft2(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape(2)),)


@samples(aten.fft_irfft2)
def _irfft2(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal([*draw.shape(0, 2), 4, 6]),)


@samples(aten.cdist)
def _cdist(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    lead, k = draw.shape(0, 1), draw.length()
    return draw.normal([*lead, draw.length(), k]), draw.normal([*lead, draw.length(), k])


@samples(aten.cosine_similarity)
def _cosine_similarity(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    # Of vectors of one element, or short ones, the gradient is rounding.
    shape = [*draw.shape(0, 3), draw.pick([2, 3, 4])]
    return draw.unit(shape), draw.unit(draw.pick([shape, shape[-1:]])), -1


@samples(aten.pairwise_distance)
def _pairwise_distance(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.normal(shape), 2, 1e-6, draw.flag()


@samples(aten.cross, aten.linalg_cross)
def _cross(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = [*draw.shape(0, 3), 3]
    return draw.normal(shape), draw.normal(shape), {"dim": -1}
