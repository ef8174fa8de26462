"""Linear algebra and Fourier transforms: on whole matrices or dims, in any number of batches."""

from __future__ import annotations

from typing import Any

from torch import ops

from msc.passes.sharding.rule import Rule
from msc.passes.sharding.rules.binding import Bound, Line, derived
from msc.passes.sharding.rules.notation import from_notation, line
from msc.passes.sharding.rules.reductions import along, along_last, reduction

aten = ops.aten


def over_last(text: str, *targets: Any, whole: str) -> Line:
    """A line for ops of two tensors along their dim `dim`; a rule if that is the last one."""

    def build(bound: Bound) -> Rule | None:
        names = bound.tensor_arguments()
        ranks = {len(bound.shape(name)) for name in names}
        last = {-1, *(rank - 1 for rank in ranks)} if len(ranks) == 1 else {-1}
        if bound.values["dim"] not in last:
            return None
        return from_notation(bound, text, whole=whole)

    return derived(build, *targets)


def _pairwise_distance(bound: Bound) -> Rule:
    """Over the last dim, which `keepdim` keeps with length 1."""
    kept = "z" if bound.values["keepdim"] else ""
    return from_notation(bound, f"...k,...k->...{kept}", whole="k" + kept)


MATRICES = [
    line("...ik,...jk->...ij", aten.cdist, whole="k"),
    over_last("...k,...k->...", aten.cosine_similarity, whole="k"),
    over_last("...k,...k->...k", aten.cross, aten.linalg_cross, whole="k"),
    derived(_pairwise_distance, aten.pairwise_distance),
    line("...ij->...ji", aten.linalg_inv, aten.inverse, whole="ij"),
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
