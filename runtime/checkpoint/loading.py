"""Loading a checkpoint into the ranks of any mesh: read once, checked, broadcast, checked again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from msc.ir.pieces import row_major
from msc.runtime.checkpoint.reading import Bucket, Overlap, ReadPlan
from msc.runtime.checkpoint.storage import Storage
from msc.runtime.member_groups import member_group
from msc.runtime.recovery.sockets import recording

Target = Mapping[str, Tensor]
"""This rank's part of each tensor that it holds, by the tensor's name; contiguous."""

Share = Callable[[Bucket, Tensor], Tensor]


@dataclass
class LoadReport:
    """Bytes that this rank read from storage and got from other ranks, and what was damaged."""

    bytes_read: int = 0
    bytes_received: int = 0
    damage: str = ""


class Loader:
    """One rank of a load; all ranks of the plan's mesh make one with an equal plan.

    share: gives what a bucket's reader has read to its other ranks (see `Broadcast`).
    """

    def __init__(
        self, storage: Storage, folder: str, plan: ReadPlan, rank: int, share: Share
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._plan = plan
        self._rank = rank
        self._share = share

    def load(self, target: Target) -> LoadReport:
        """Fill `target`; collective. What is damaged is reported, and the target then of no use."""
        report = LoadReport()
        assembly = _Assembly(self._plan, self._rank, target)
        for bucket in self._plan.buckets():
            if self._rank in bucket.ranks:
                assembly.take(bucket, self._bucket(bucket, report))
        if not report.damage and assembly.missing:
            report.damage = f"'{assembly.missing}' is not whole in the data files"
        return report

    def _bucket(self, bucket: Bucket, report: LoadReport) -> Tensor:
        start, end = bucket.span(self._plan.parts)
        data = torch.zeros(end - start, dtype=torch.uint8)
        if bucket.reader == self._rank:
            self._read(bucket, data, report)
        if len(bucket.ranks) > 1:
            data = self._share(bucket, data)
            if bucket.reader != self._rank:
                report.bytes_received += len(data)
        self._check(bucket, data, report)
        return data

    def _read(self, bucket: Bucket, data: Tensor, report: LoadReport) -> None:
        part = self._plan.parts[bucket.part]
        start, end = bucket.span(self._plan.parts)
        try:
            found = self._storage.read(f"{self._folder}/{part.file}", start, end - start)
        except OSError as error:
            report.damage = report.damage or f"{part.file} cannot be read ({error})"
            return
        report.bytes_read += len(found)
        if len(found) < end - start:
            report.damage = report.damage or f"{part.file} ends at byte {start + len(found)}"
        else:
            data.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))

    def _check(self, bucket: Bucket, data: Tensor, report: LoadReport) -> None:
        part = self._plan.parts[bucket.part]
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        for index in range(bucket.first, bucket.last):
            at = (index - bucket.first) * part.chunk
            problem = part.damaged(index, view[at : at + part.chunk])
            if problem and not report.damage:
                report.damage = problem


class Broadcast:
    """Shares buckets over `torch.distributed`, which is initialized.

    Groups of ranks that need the same bytes are created when they are first used, in one order on
    all ranks, and dropped by `close`.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._device = device
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def __call__(self, bucket: Bucket, data: Tensor) -> Tensor:
        """The bytes that the bucket's reader gives; the others' `data` has the right size."""
        moved = data.to(self._device)
        dist.broadcast(moved, bucket.reader, group=self._group(bucket.ranks))
        return moved.cpu()

    def close(self) -> None:
        """Destroy the groups."""
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """None is the default group."""
        if ranks not in self._groups:
            self._groups[ranks] = None
            if len(ranks) < dist.get_world_size():
                with recording():
                    self._groups[ranks] = member_group(ranks, self._timeout)
        return self._groups[ranks]


class _Assembly:
    """Puts a rank's parts together from chunks, in whatever order they come."""

    def __init__(self, plan: ReadPlan, rank: int, target: Target) -> None:
        self._plan = plan
        self._target = target
        self._open: dict[int, list[_Open]] = {}
        covered: dict[str, int] = {}
        wanted: dict[str, int] = {}
        for overlap in plan.needed_by(rank):
            name = overlap.tensor.name
            covered[name] = covered.get(name, 0) + overlap.box.numel
            if name in target:
                self._open.setdefault(overlap.part, []).append(_Open(overlap))
        for tensor in plan.wanted.tensors:
            for pieces, ranks in tensor.parts(plan.wanted.mesh):
                if rank in ranks:
                    count = sum(piece.box.numel for piece in pieces)
                    wanted[tensor.name] = count
                    if tensor.name in target and count < target[tensor.name].numel():
                        target[tensor.name].zero_()  # what pads it is in no file
        self.missing = next((n for n, count in wanted.items() if covered.get(n, 0) != count), "")

    def take(self, bucket: Bucket, data: Tensor) -> None:
        """Take what is needed out of a bucket; a piece that is complete goes to its place."""
        start, end = bucket.span(self._plan.parts)
        left = []
        for item in self._open.get(bucket.part, ()):
            if item.take(start, end, data):
                self._finish(item)
            else:
                left.append(item)
        self._open[bucket.part] = left

    def _finish(self, item: _Open) -> None:
        overlap = item.overlap
        dtype = overlap.tensor.dtype
        assert item.bytes is not None
        values = item.bytes.view(dtype)
        strides = row_major(overlap.stored.lengths)
        found = values.as_strided(overlap.box.lengths, strides)
        overlap.piece.of(self._target[overlap.tensor.name], overlap.box).copy_(found)


class _Open:
    """An overlap of which bytes are missing."""

    def __init__(self, overlap: Overlap) -> None:
        self.overlap = overlap
        self.bytes: Tensor | None = None
        self._left = overlap.end - overlap.start

    def take(self, start: int, end: int, data: Tensor) -> bool:
        """Take bytes `start` to `end` of the file; whether all are there now."""
        first, last = max(start, self.overlap.start), min(end, self.overlap.end)
        if first < last:
            if self.bytes is None:
                self.bytes = torch.empty(self.overlap.end - self.overlap.start, dtype=torch.uint8)
            here = first - self.overlap.start
            self.bytes[here : here + last - first] = data[first - start : last - start]
            self._left -= last - first
        return self._left == 0
