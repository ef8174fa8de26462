"""Collectives between processes: start now, wait later.

NCCL runs each collective natively. On gloo some natives are slow, so they are composed of others.
Times for 2 and for 4 processes on 2 cores with torch 2.13, in microseconds (a figure carries noise
of a factor 2; compare within a row):

    bytes                      1 KiB           1 MiB            16 MiB
    reduce_scatter native      660 / 4840      1730 / 7010      15200 / 32400
      all_to_all, then add     340 / 1670       480 / 1780      10400 / 21000
    all_reduce native          490 / 6120      1040 / 5830      12900 / 35000
      exchange copies, add     400 / 2430      1220 / 4700      59000 / 203000
    all_gather native          410 / 3300      2030 / 6750      41500 / 203000
      pairwise send            570 / 2400       880 / 4090      37300 / 122000
    (the functional collectives of torch: within noise of the natives)

So on gloo a reduce-scatter is an exchange and sums in rank order; so is an all-reduce up to
`SMALL` bytes. Such sums equal those of the virtual executor bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msc.runtime import collectives
from msc.runtime.process_groups import Communicator

SMALL = 65536

REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# Since torch 2.13 these have new names, and the old ones warn.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class Pending:
    """A communication in flight: its result and all buffers stay alive until it is waited for."""

    __slots__ = ("_finish", "_kept", "_result", "_works")

    def __init__(
        self,
        works: Sequence[Any],
        result: Any,
        kept: Any = None,
        finish: Callable[[], Any] | None = None,
    ) -> None:
        self._works = works
        self._result = result
        self._kept = kept
        self._finish = finish

    def wait(self) -> Any:
        """Complete it and return the result. May be called once."""
        for work in self._works:
            work.wait()
        return self._result if self._finish is None else self._finish()


class Transport(ABC):
    """Starts collectives on a communicator with more than one member."""

    def all_gather(self, value: Tensor, to: Communicator) -> Pending:
        """Concatenate along dim 0."""
        value = value.contiguous()
        result = value.new_empty((value.shape[0] * len(to.members), *value.shape[1:]))
        work = _all_gather(result, value, group=to.handle, async_op=True)
        return Pending((work,), result, value)

    def all_to_all(
        self, value: Tensor, received: Sequence[int], sent: Sequence[int], to: Communicator
    ) -> Pending:
        """Exchange rows of dim 0."""
        value = value.contiguous()
        result = value.new_empty((sum(received), *value.shape[1:]))
        work = dist.all_to_all_single(
            result, value, list(received), list(sent), group=to.handle, async_op=True
        )
        return Pending((work,), result, value)

    @abstractmethod
    def all_reduce(self, value: Tensor, op: str, to: Communicator) -> Pending:
        """Reduce over the members."""

    @abstractmethod
    def reduce_scatter(self, value: Tensor, op: str, to: Communicator) -> Pending:
        """Reduce over the members and keep this member's part of dim 0."""


class NativeTransport(Transport):
    """Every collective as the backend has it."""

    def all_reduce(self, value: Tensor, op: str, to: Communicator) -> Pending:
        result = value.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(result, REDUCE_OPS[op], group=to.handle, async_op=True)
        return Pending((work,), result)

    def reduce_scatter(self, value: Tensor, op: str, to: Communicator) -> Pending:
        value = value.contiguous()
        result = value.new_empty((value.shape[0] // len(to.members), *value.shape[1:]))
        work = _reduce_scatter(result, value, REDUCE_OPS[op], group=to.handle, async_op=True)
        return Pending((work,), result, value)


class GlooTransport(NativeTransport):
    """Sums by exchange where that is faster than what gloo does."""

    def all_reduce(self, value: Tensor, op: str, to: Communicator) -> Pending:
        size = len(to.members)
        if value.numel() * value.element_size() * size > SMALL:
            return super().all_reduce(value, op, to)
        copies = value.expand(size, *value.shape).contiguous()
        return self._exchange(copies, op, to)

    def reduce_scatter(self, value: Tensor, op: str, to: Communicator) -> Pending:
        size = len(to.members)
        parts = value.contiguous().view(size, value.shape[0] // size, *value.shape[1:])
        return self._exchange(parts, op, to)

    @staticmethod
    def _exchange(parts: Tensor, op: str, to: Communicator) -> Pending:
        """Send part i to member i; then reduce what came, in rank order."""
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=to.handle, async_op=True)
        reduce = collectives.REDUCTIONS[op]
        return Pending((work,), None, parts, lambda: reduce(received.unbind(0)))
