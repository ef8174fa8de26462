"""Seconds of one call on one device: the slower of its FLOPs and its bytes, and a launch floor.

Williams, Waterman and Patterson, "Roofline", CACM 2009. Bytes are those of operands and results,
each moved once, as in a kernel per op that keeps nothing in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msc.cost.cluster import Cluster
from msc.cost.flops import call_flops, is_gemm, nbytes
from msc.ir.torch_private import OpOverload, may_alias

_aten = torch.ops.aten

_READS_SOME = {
    _aten.embedding.default,
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.index_select.default,
}
"""Ops that read as many elements of their first operand as they return; with `msc.embedding`."""


@dataclass(frozen=True)
class Work:
    """What a call does: FLOPs on the matrix units in `dtype`, and bytes moved.

    `launched` is False for what runs no kernel, such as a view. emitted: its GEMM is no library's,
    and runs at the cluster's `fused_gemm_rate`. passes: bytes of what follows, a launch each.
    """

    flops: float = 0.0
    dtype: torch.dtype | None = None
    memory_bytes: float = 0.0
    launched: bool = True
    emitted: bool = False
    passes: tuple[float, ...] = ()

    def seconds(self, cluster: Cluster) -> float:
        """How long one device takes."""
        if not self.launched:
            return 0.0
        after = sum(
            max(cluster.launch_s, moved / cluster.memory_bytes_per_s) for moved in self.passes
        )
        moving = self.memory_bytes / cluster.memory_bytes_per_s
        if self.dtype is None:
            return max(cluster.launch_s, moving) + after
        computing = self.flops / (cluster.peak(self.dtype) * cluster.gemm_efficiency)
        rate = cluster.fused_gemm_rate if self.emitted else 1.0
        return max(cluster.launch_s, moving, computing / rate) + after


NOTHING = Work(launched=False)


def op_work(
    target: Any, operands: Sequence[Tensor], results: Sequence[Tensor], window: int = 0
) -> Work:
    """The work of a call of an op on these operands, which are in the order of its arguments.

    window: that of an attention.
    """
    if is_view(target, operands, results):
        return NOTHING
    read = [nbytes(operand) for operand in operands]
    written = sum(map(nbytes, results))
    if read and (target in _READS_SOME or str(target).startswith("msc.embedding.")):
        read[_table(target)] = written
    if not is_gemm(target):
        return Work(memory_bytes=sum(read) + written)
    flops = call_flops(target, operands, results, window)
    return Work(flops, operands[0].dtype, sum(read) + written)


def streamed_work(operands: Sequence[Tensor], results: Sequence[Tensor]) -> Work:
    """The work of what reads its operands and writes its results, such as an optimizer."""
    return Work(memory_bytes=sum(map(nbytes, operands)) + sum(map(nbytes, results)))


def is_view(target: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Whether a call only says otherwise how memory is read.

    Of an op that copies where it must (`reshape`), it is one whose operand is contiguous or whose
    result has the strides of a view.
    """
    if target is _aten._unsafe_view.default:
        return True
    if not isinstance(target, OpOverload) or not may_alias(target) or not operands:
        return False
    operand = operands[0]
    if target is _aten.contiguous.default:
        return operand.is_contiguous()
    if target is not _aten.reshape.default:
        return not results or operand.dtype == results[0].dtype
    return _reshapes_in_place(operand, results[0].shape)


def _reshapes_in_place(operand: Tensor, shape: torch.Size) -> bool:
    if operand.is_contiguous():
        return True
    try:
        torch.empty_strided(operand.shape, operand.stride(), device="meta").view(shape)
    except RuntimeError:
        return False
    return True


def _table(target: Any) -> int:
    """The position of the operand that is read in part."""
    return 1 if str(target).startswith("msc.embedding.") else 0
