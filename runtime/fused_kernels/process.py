"""Fused kernels of ranks that are processes, each with a CUDA device of one host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.kernel_calls.fused_collectives import FusedCall
from msc.ir.torch_private import symmetric_memory
from msc.runtime.fused_kernels import stream_memory
from msc.runtime.fused_kernels.cuda import process_together
from msc.runtime.fused_kernels.group import FusedGroup
from msc.runtime.fused_kernels.queues import Connection
from msc.runtime.process_groups import Communicator, ProcessGroups


class ProcessKernels:
    """The fused kernels of one process's rank, in all of its groups."""

    def __init__(self, choice: KernelChoice, groups: ProcessGroups) -> None:
        self._choice = choice
        self._groups = groups
        self._made: dict[str, FusedGroup] = {}

    def run(self, call: FusedCall, operands: Sequence[Any]) -> Any:
        """The op's result, or None where it has to run unfused, as then on all ranks of the group.

        Collective, and so are the first calls of each group in more than their kernels.
        """
        if call.group not in self._made:
            self._made[call.group] = self._new_group(call.group)
        results = self._made[call.group].run(call, [operands])
        return None if results is None else results[0]

    def _new_group(self, name: str) -> FusedGroup:
        to = self._groups.group(name)
        return FusedGroup(
            self._choice.fused_over(name),
            len(to.members),
            [to.position],
            lambda nbytes: _connect(to, self._groups.device, nbytes),
            lambda problem: _agree(to, problem),
        )


def _connect(to: Communicator, device: torch.device, nbytes: int) -> Connection | str:
    """See `msc.runtime.fused_kernels.group.Connect`."""
    hosts = len(set(_exchange(to, socket.gethostname())))
    if hosts > 1:
        return f"its ranks are on {hosts} hosts, and kernels reach the memory of one"
    assert to.handle is not None  # a group of one has no kernels
    parts: list[Tensor] = []
    problem = ""
    try:
        parts = symmetric_memory(nbytes, device, to.handle)
        own = parts[to.position][:4].view(torch.int32)
        stream_memory.write(own, 0, 0)  # whether the driver can do it
        stream_memory.wait(own, 0, 0)
    except RuntimeError as error:
        problem = f"its devices have no memory in common: {str(error).splitlines()[0]}"
    return _agree(to, problem) or Connection(parts, process_together(to.position))


def _agree(to: Communicator, problem: str) -> str:
    """The first problem of any rank of a group, "" if there is none; the same on all of them."""
    return next(filter(None, _exchange(to, problem)), "")


def _exchange(to: Communicator, value: str) -> list[str]:
    found: list[Any] = [None] * len(to.members)
    dist.all_gather_object(found, value, group=to.handle)
    return found
