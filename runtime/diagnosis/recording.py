"""A rank whose communications are recorded in its ring, and their waits in its ledger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from msc.codegen.kernel_calls.fused_collectives import FusedCall
from msc.ir.mesh import Mesh
from msc.runtime.diagnosis.recorder import Recorder
from msc.runtime.diagnosis.schedule import collective_channel, message_channel
from msc.runtime.fused_kernels.process import ProcessKernels
from msc.runtime.process import ProcessRank
from msc.runtime.process_groups import ProcessGroups
from msc.runtime.shared_memory import SharedMemory
from msc.runtime.transport import Pending

_Result = TypeVar("_Result")


class RecordingRank(ProcessRank):
    """`rt` of the process dialect, with every start and wait in `recorder`."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        groups: ProcessGroups,
        memories: Mapping[str, SharedMemory],
        before_update: Callable[[], None] | None,
        recorder: Recorder,
        kernels: ProcessKernels | None = None,
    ) -> None:
        super().__init__(mesh, rank, groups, memories, before_update, kernels)
        self._recorder = recorder
        self._ring = recorder.ring

    def wait(self, pending: Pending) -> Any:  # type: ignore[override]
        if pending.token is None:
            return pending.wait()
        place = self._recorder.enter(pending.token)
        result = pending.wait()
        self._recorder.leave(place)  # not after an error: the ring then says what was waited for
        return result

    def _record(self, kind: str, group: str, value: Tensor, pending: Pending) -> Pending:
        to = self._groups.group(group)
        if to.handle is not None:
            channel = collective_channel(group, to.members)
            pending.token = self._ring.start(kind, channel, value.nbytes)
        return pending

    def all_gather(self, value: Tensor, size: int, group: str, site: str) -> Pending:
        return self._record(
            "all_gather", group, value, super().all_gather(value, size, group, site)
        )

    def reduce_scatter(self, value: Tensor, op: str, size: int, group: str, site: str) -> Pending:
        started = super().reduce_scatter(value, op, size, group, site)
        return self._record("reduce_scatter", group, value, started)

    def all_reduce(self, value: Tensor, op: str, group: str, site: str) -> Pending:
        return self._record("all_reduce", group, value, super().all_reduce(value, op, group, site))

    def all_to_all(
        self, value: Tensor, received: Sequence[int], sent: Sequence[int], group: str, site: str
    ) -> Pending:
        started = super().all_to_all(value, received, sent, group, site)
        return self._record("all_to_all", group, value, started)

    def all_gather_matmul(
        self, x: Tensor, *operands: Any, kernel: FusedCall | None = None
    ) -> list[Tensor]:
        run = functools.partial(super().all_gather_matmul, kernel=kernel)
        return self._at_once("all_gather_matmul", run, x, *operands)

    def matmul_reduce_scatter(
        self, x: Tensor, *operands: Any, kernel: FusedCall | None = None
    ) -> Tensor:
        run = functools.partial(super().matmul_reduce_scatter, kernel=kernel)
        return self._at_once("matmul_reduce_scatter", run, x, *operands)

    def _at_once(
        self, kind: str, run: Callable[..., _Result], x: Tensor, *operands: Any
    ) -> _Result:
        """Record what starts and ends in one call; most of it computes, which the ledger says."""
        group = operands[-2]
        to = self._groups.group(group)
        if to.handle is None:
            return run(x, *operands)
        token = self._ring.start(kind, collective_channel(group, to.members), x.nbytes)
        place = self._ring.enter(token)
        result = run(x, *operands)
        self._ring.leave(place)
        return result

    def send(self, values: Sequence[Tensor], stage: int, channel: str, site: str) -> Pending:
        pending = super().send(values, stage, channel, site)
        name = message_channel(channel, self.rank, self.stage_rank(stage))
        pending.token = self._ring.start("send", name, sum(value.nbytes for value in values))
        return pending

    def recv(
        self,
        stage: int,
        channel: str,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        site: str,
    ) -> Pending:
        pending = super().recv(stage, channel, shapes, dtypes, site)
        name = message_channel(channel, self.stage_rank(stage), self.rank)
        pairs = zip(shapes, dtypes, strict=True)
        nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in pairs)
        pending.token = self._ring.start("recv", name, nbytes)
        return pending
