"""Ranks as real processes whose communication takes the time of a modelled link, and no processor.

A transfer is ready at the time when all who take part had started it, or the one before it on the
same group or channel was over, plus latency and bytes over bandwidth (`msc.cost.collectives`); a
rank that waits for it sleeps until then. Nothing is sent: results are zeros, so that the time of a
step is measured and nothing else. The clock is shared through memory that all processes map.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msc.cost import Cluster
from msc.cost.collectives import collective_seconds, send_seconds
from msc.cost.topology import crosses_nodes, group_spans
from msc.ir.groups import Group
from msc.ir.mesh import Mesh
from msc.runtime import fused_collectives
from msc.runtime.actions import LocalActions

_TICK = 5e-5
"""Seconds between two looks at whether the others have started."""


@dataclass
class Board:
    """When each rank started each operation: `[communicator, operation, rank]`, 0 before.

    names: the number of each communicator, the same in all processes.
    """

    started: Tensor
    names: dict[str, int]

    @classmethod
    def of(cls, names: Sequence[str], ranks: int, operations: int) -> Board:
        """An empty board that processes can share."""
        shape = (len(names), operations, ranks)
        started = torch.zeros(shape, dtype=torch.float64)
        started.share_memory_()  # type: ignore[no-untyped-call]
        return cls(started, {name: index for index, name in enumerate(names)})


@dataclass(eq=False)
class Transfer:
    """One operation that this rank has started."""

    link: VirtualLink
    name: str
    number: int
    members: tuple[int, ...]
    seconds: float
    result: Any
    before: Transfer | None
    begun: float | None = None

    def begin(self) -> float:
        """When it began: all had started it, and the one before it was over.

        All members come to the same time, since it follows from what stands on the board.
        """
        if self.begun is None:
            over = 0.0 if self.before is None else self.before.begin() + self.before.seconds
            self.begun = max(over, self._started())
            self.before = None
        return self.begun

    def _started(self) -> float:
        """When the last member started it, once all have."""
        row = self.link.board.started[self.link.board.names[self.name], self.number]
        while True:
            starts = [float(row[member]) for member in self.members]
            if all(starts):
                return max(starts)
            time.sleep(_TICK)

    def wait(self) -> Any:
        """Sleep until it is ready."""
        _sleep_until(self.begin() + self.seconds)
        return self.result


class VirtualLink(LocalActions):
    """`rt` of the process dialect, on links of a cluster.

    board: where the ranks write when they started what.
    """

    def __init__(self, mesh: Mesh, rank: int, cluster: Cluster, board: Board) -> None:
        super().__init__(mesh, rank)
        self.cluster = cluster
        self.board = board
        self._counts: Counter[str] = Counter()
        self._last: dict[str, Transfer] = {}
        self._rooms: dict[Any, Tensor] = {}

    @staticmethod
    def wait(transfer: Transfer) -> Any:
        """Complete a transfer and return its result."""
        return transfer.wait()

    def all_gather(self, value: Tensor, size: int, group: str, site: str) -> Transfer:
        """Start an all-gather along dim 0."""
        result = self.zeros((size * value.shape[0], *value.shape[1:]), value.dtype)
        return self.collective("all_gather", group, result.nbytes, result)

    def reduce_scatter(self, value: Tensor, op: str, size: int, group: str, site: str) -> Transfer:
        """Start a reduce-scatter along dim 0."""
        result = self.zeros((value.shape[0] // size, *value.shape[1:]), value.dtype)
        return self.collective("reduce_scatter", group, value.nbytes, result)

    def all_reduce(self, value: Tensor, op: str, group: str, site: str) -> Transfer:
        """Start an all-reduce."""
        result = self.zeros(value.shape, value.dtype)
        return self.collective("all_reduce", group, value.nbytes, result)

    def all_gather_matmul(self, x: Tensor, *operands: Any) -> list[Tensor]:
        """Gather and multiply, shard by shard as shards arrive."""
        *rest, size, group, site = operands
        memory: Any = _Room(self, group, "all_gather", size * x.nbytes, size)
        return fused_collectives.all_gather_matmul(memory, site, x, *rest)

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, *operands: Any) -> Tensor:
        """Multiply and reduce, part by part."""
        *rest, size, group, site = operands
        rows = x.numel() // x.shape[-1]
        columns = weight.shape[1 if rest[1] else 0]
        memory: Any = _Room(self, group, "reduce_scatter", rows * columns * x.itemsize, size)
        return fused_collectives.matmul_reduce_scatter(memory, site, x, weight, *rest)

    def send(self, values: Sequence[Tensor], stage: int, channel: str, site: str) -> Transfer:
        """Start sending to the rank at pp coordinate `stage`."""
        return self._message(stage, channel, sum(value.nbytes for value in values), None)

    def recv(
        self,
        stage: int,
        channel: str,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        site: str,
    ) -> Transfer:
        """Start receiving from the rank at pp coordinate `stage`."""
        values = tuple(self.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True))
        return self._message(stage, channel, sum(value.nbytes for value in values), values)

    def collective(self, kind: str, group: str, payload_bytes: float, result: Any) -> Transfer:
        """Start a collective of a kind."""
        parsed = Group.parse(group)
        members = parsed.members(self.mesh, self.rank)
        stages = [self._coordinate.get("pp", 0)]
        spans = group_spans(self.mesh, parsed, stages, self.cluster.devices_per_node)
        seconds = max(collective_seconds(self.cluster, kind, payload_bytes, s) for s in spans)
        return self._start(f"{group} {members}", members, seconds, result)

    def _message(self, stage: int, channel: str, payload_bytes: float, result: Any) -> Transfer:
        here = self._coordinate.get("pp", 0)
        across = crosses_nodes(self.mesh, here, stage, self.cluster.devices_per_node)
        seconds = send_seconds(self.cluster, payload_bytes, across)
        members = tuple(sorted((self.rank, self.stage_rank(stage))))
        return self._start(f"{channel} {members}", members, seconds, result)

    def _start(self, name: str, members: tuple[int, ...], seconds: float, result: Any) -> Transfer:
        number = self._counts[name]
        self._counts[name] += 1
        self.board.started[self.board.names[name], number, self.rank] = time.monotonic()
        before = self._last.get(name)
        self._last[name] = Transfer(self, name, number, members, seconds, result, before)
        return self._last[name]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros, which cost no time from the second call on."""
        key = tuple(shape), dtype
        if key not in self._rooms:
            self._rooms[key] = torch.zeros(key[0], dtype=dtype)
        return self._rooms[key]


class _Room:
    """The memory of a fused collective, whose parts arrive one after the other."""

    def __init__(
        self, link: VirtualLink, group: str, kind: str, payload_bytes: float, size: int
    ) -> None:
        self._link = link
        self.size = size
        self._start: Any = lambda: link.collective(kind, group, payload_bytes, None)
        self.position = Group.parse(group).members(link.mesh, link.rank).index(link.rank)

    def begin(self, what: str) -> None:
        self._transfer: Transfer = self._start()

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._link.zeros(shape, dtype)

    def put(self) -> None:
        pass

    def put_for(self, owner: int) -> None:
        pass

    def wait_for_shard(self, source: int) -> None:
        step = (source - self.position) % self.size
        part = step / (self.size - 1)
        _sleep_until(self._transfer.begin() + part * self._transfer.seconds)

    def wait_for_summand(self, source: int) -> None:
        self._transfer.wait()


def _sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)
