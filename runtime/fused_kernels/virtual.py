"""Fused kernels of ranks that are all in one process: they share memory, and meet before a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.kernel_calls.fused_collectives import FusedCall
from msc.runtime.fused_kernels.group import FusedGroup
from msc.runtime.fused_kernels.queues import Connection, Together


class VirtualKernels:
    """The fused kernels of all groups of a program that runs in one process.

    choice: what its calls run in. together: makes the queues of so many ranks.
    """

    def __init__(
        self, choice: KernelChoice, device: torch.device, together: Callable[[int], Together]
    ) -> None:
        self._choice = choice
        self._device = device
        self._together = together
        self._groups: dict[tuple[str, tuple[int, ...]], FusedGroup] = {}

    def run(
        self, call: FusedCall, members: tuple[int, ...], given: Sequence[Sequence[Any]]
    ) -> Sequence[Any]:
        """The results of all members of a group, given the op's operands of each.

        None for each of them where the call has to run unfused.
        """
        key = (call.group, members)
        if key not in self._groups:
            self._groups[key] = self._new_group(call.group, len(members))
        try:
            results = self._groups[key].run(call, given)
        except BaseException:
            del self._groups[key]  # flags may have been raised for some ranks and not for others
            raise
        return [None] * len(members) if results is None else results

    def _new_group(self, group: str, size: int) -> FusedGroup:
        def connect(nbytes: int) -> Connection:
            parts = [
                torch.zeros(nbytes, dtype=torch.uint8, device=self._device) for _ in range(size)
            ]
            return Connection(parts, self._together(size))

        calls = self._choice.fused_over(group)
        return FusedGroup(calls, size, range(size), connect, lambda problem: problem)
