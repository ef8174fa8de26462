"""Collectives between processes: start now, wait later.

NCCL runs each collective natively. gloo's natives are slow for what they move, so on gloo members
send to each other directly, and sums are made here. Milliseconds of processor time of one of 2
processes, and in brackets of wall time, on 2 cores with torch 2.13 (best of 25):

    bytes                       8 KiB            768 KiB          6 MiB
    all_gather native         0.17 (0.21)      0.35 (0.59)      3.4 (6.4)
      send to each            0.11 (0.18)      0.20 (0.36)      2.4 (5.4)
    reduce_scatter native          -           1.12 (1.76)      6.1 (12.6)
      all_to_all, then add    0.15 (0.18)      0.27 (0.61)      3.2 (8.6)
      send to each, then add  0.09 (0.12)      0.19 (0.36)      2.3 (5.5)
    all_reduce native         0.21 (0.29)      0.54 (0.85)      2.0 (5.0)
      send to each, then add  0.09 (0.14)      0.56 (0.75)      1.9 (5.0)

With 4 processes on 2 cores a gather by sends took 0.6 to 0.75 of the native's wall time from 1 KiB
to 16 MiB. An all-reduce by sends moves more than a native one if there are more than two members,
so then it is for small values only. Sums by sends are added in rank order, and so equal those of
the virtual executor bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    """A communication in flight: its result and all buffers stay alive until it is waited for.

    token: what a recorder of communications calls it, if there is one.
    """

    __slots__ = ("_finish", "_kept", "_result", "_works", "token")

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
        self.token: int | None = None

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
    """Members send to each other directly where that is faster than what gloo does."""

    def all_gather(self, value: Tensor, to: Communicator) -> Pending:
        value = value.contiguous()
        result = value.new_empty((value.shape[0] * len(to.members), *value.shape[1:]))
        parts = result.view(len(to.members), *value.shape).unbind(0)
        works = _swap([value] * len(parts), parts, to)
        parts[to.position].copy_(value)  # while the others are on their way
        return Pending(works, result, value)

    def all_reduce(self, value: Tensor, op: str, to: Communicator) -> Pending:
        size = len(to.members)
        if size > 2 and value.numel() * value.element_size() * size > SMALL:
            return super().all_reduce(value, op, to)
        value = value.contiguous()
        return _reduced([value] * size, op, to)

    def reduce_scatter(self, value: Tensor, op: str, to: Communicator) -> Pending:
        size = len(to.members)
        parts = value.contiguous().view(size, value.shape[0] // size, *value.shape[1:])
        return _reduced(parts.unbind(0), op, to)


def _swap(given: Sequence[Tensor], taken: Sequence[Tensor], to: Communicator) -> list[Any]:
    """Start sending `given[i]` to member i and receiving `taken[i]` from it, all but our own.

    Messages between two members of one group meet in the order in which they start.
    """
    sent, received = [], []
    for position, member in enumerate(to.members):
        if position != to.position:
            sent.append(dist.isend(given[position], member, group=to.handle))
            received.append(dist.irecv(taken[position], member, group=to.handle))
    # Of a host that lost its power, gloo tells who waits to receive, but not always who sends.
    return received + sent


def _reduced(given: Sequence[Tensor], op: str, to: Communicator) -> Pending:
    """Give member i `given[i]`; the result is the reduction of what the members give to us."""
    own = given[to.position]
    taken = [own if i == to.position else torch.empty_like(own) for i in range(len(given))]
    works = _swap(given, taken, to)
    return Pending(works, None, given, lambda: _reduce(taken, to.position, op))


def _reduce(values: list[Tensor], position: int, op: str) -> Tensor:
    """The reduction in rank order, in memory of any value but the one at `position`."""
    total = values[1] if position == 0 else values[0]
    _REDUCE[op](values[0], values[1], out=total)
    for value in values[2:]:
        _REDUCE[op](total, value, out=total)
    return total.div_(len(values)) if op == "avg" else total


_REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
