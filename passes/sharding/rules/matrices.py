"""Linear algebra and Fourier transforms: on whole matrices or dims, in any number of batches."""

from __future__ import annotations

from torch import ops

from msc.passes.sharding.rules.notation import line
from msc.passes.sharding.rules.reductions import along, along_last, reduction

aten = ops.aten

MATRICES = [
    line("...ij->...ji", aten.linalg_inv, aten.inverse, aten.linalg_pinv, whole="ij"),
    line("...ij->...ij", aten.linalg_cholesky, aten.linalg_matrix_exp, whole="ij"),
    line("...ij->...ij", aten.matrix_exp, aten.linalg_matrix_power, whole="ij"),
    line("...ij->...", aten.linalg_det, aten.det, aten.logdet, whole="ij"),
    line("...ij->...,...", aten.linalg_slogdet, whole="ij"),
    line("...ij,...jk->...ik", aten.linalg_solve_triangular, whole="ij"),
    line("ij->", aten.trace, whole="ij", linear="self"),
    reduction(aten.linalg_norm, aten.linalg_matrix_norm.str_ord, over=None),
    along(aten.fft_fft, aten.fft_ifft, aten.fft_rfft, aten.fft_irfft, dims="dim"),
    along_last(aten.fft_fft2, aten.fft_ifft2, aten.fft_rfft2, aten.fft_irfft2, count=2),
]
