"""Runs the fused kernels of one group of ranks: what is copied, flagged and launched, in order.

`msc.codegen.kernels.protocol` says how flags and buffers are used, and why two buffers are enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from msc.codegen.kernel_calls.fused_collectives import (
    BoundGather,
    BoundScatter,
    FusedCall,
    GatherPlan,
    ScatterPlan,
)
from msc.codegen.kernels import gemm_scatter
from msc.codegen.kernels.description import Kernel
from msc.codegen.kernels.launch import KernelError, prepare
from msc.codegen.kernels.protocol import buffer_of
from msc.runtime.fused_kernels.arena import Arena, layout_of
from msc.runtime.fused_kernels.queues import Connection, Queues

Connect = Callable[[int], Connection | str]
"""Connects the ranks by so many bytes each, or says why it cannot: on all ranks alike."""


class FusedGroup:
    """The fused kernels of a group of `size` ranks, as the process sees it that runs `positions`.

    calls: all of the group's (`KernelChoice.fused_over`). agree: takes what is wrong on the ranks
    of this process, "" for nothing, and gives what is wrong on any rank of the group; with
    `connect` it is all that ranks do together before their kernels meet. They are connected at the
    first call.
    """

    def __init__(
        self,
        calls: Sequence[FusedCall],
        size: int,
        positions: Sequence[int],
        connect: Connect,
        agree: Callable[[str], str],
    ) -> None:
        self._calls = calls
        self._size = size
        self._positions = positions
        self._connect = connect
        self._agree = agree
        self._arena: Arena | None = None
        self._ready: set[FusedCall] = set()
        self._gathers = 0
        self._scatters = 0
        self._uses: Counter[FusedCall] = Counter()

    def run(self, call: FusedCall, given: Sequence[Sequence[Any]]) -> list[Any] | None:
        """The results of this process's ranks, each given the op's operands; all ranks call it.

        None where kernels cannot do it: then on no rank of the group, now and later.
        """
        if call.failure:
            return None
        arena = self._connected()
        if arena is None:
            return None
        if isinstance(call.plan, GatherPlan):
            gathers = [call.plan.bind(*operands) for operands in given]
            return self._gather(arena, call, call.plan, gathers)
        scatters = [call.plan.bind(*operands) for operands in given]
        return self._scatter(arena, call, call.plan, scatters)

    def _gather(
        self, arena: Arena, call: FusedCall, plan: GatherPlan, sides: Sequence[BoundGather]
    ) -> list[list[Tensor]] | None:
        number = self._gathers + 1
        turn, chunk = buffer_of(number), plan.chunks.chunk
        own = [arena.gathered(position, turn, plan) for position in self._positions]
        launches = [
            [
                (
                    each.kernel,
                    {
                        each.gathered: rows,
                        **each.values,
                        "flags": arena.flags(position, plan),
                        "rank": position,
                        "want": number,
                    },
                )
                for each in side.launches
            ]
            for position, rows, side in zip(self._positions, own, sides, strict=True)
        ]
        if not self._compiled(call, launches):
            return None
        self._gathers = number
        with self._together() as ranks:
            for queues, rows, side in zip(ranks, own, sides, strict=True):
                first = queues.position * chunk
                queues.write(rows[first : first + chunk], side.shard)
                for rank in range(self._size):
                    if rank != queues.position:
                        queues.tell(arena.announced(rank), queues.position, number)
                queues.follow()  # kernels before this one have read the buffer that is filled
            for queues in ranks:
                self._pull(arena, queues, plan, number)
            for queues, kernels in zip(ranks, launches, strict=True):
                for kernel, values in kernels:
                    queues.launch(kernel, values)
                queues.join()
        return [side.finish(rows) for side, rows in zip(sides, own, strict=True)]

    def _pull(self, arena: Arena, queues: Queues, plan: GatherPlan, number: int) -> None:
        """Copy the shards of the next ranks, in the order in which kernels read them."""
        chunks, turn, here = plan.chunks, buffer_of(number), queues.position
        own, flags = arena.gathered(here, turn, plan), arena.flags(here, plan)
        for step in range(1, self._size):
            source = (here + step) % self._size
            queues.wait(arena.announced(here), source, number)
            there = arena.gathered(source, turn, plan)
            for part in range(chunks.splits):
                first = source * chunks.chunk + part * chunks.part
                last = min(first + chunks.part, (source + 1) * chunks.chunk)
                queues.copy(own[first:last], there[first:last])
                queues.raise_flag(flags, source * chunks.splits + part, number)

    def _scatter(
        self, arena: Arena, call: FusedCall, plan: ScatterPlan, sides: Sequence[BoundScatter]
    ) -> list[Tensor] | None:
        turn, use = buffer_of(self._scatters + 1), self._uses[call] + 1
        slots = [arena.slots(rank, turn, plan) for rank in range(self._size)]
        counters = [arena.counters(r, buffer_of(use), call, plan) for r in range(self._size)]
        common = {
            "slots_of": arena.addresses(slots),
            "counters_of": arena.addresses(counters),
            "want": gemm_scatter.want(self._size, use),
        }
        launches = []
        for position, side in zip(self._positions, sides, strict=True):
            own = {"slots": slots[position], "counters": counters[position], "rank": position}
            values = {**side.values, **common, **own}
            launches.append([(kernel, kernel.pick(values)) for kernel in plan.kernels])
        if not self._compiled(call, launches):
            return None
        self._scatters += 1
        self._uses[call] = use
        with self._together() as ranks:
            # nothing that waits is put into a queue before what it waits for
            for step in range(len(plan.kernels)):
                for queues, kernels in zip(ranks, launches, strict=True):
                    queues.launch(*kernels[step])
        return [side.finish() for side in sides]

    def _connected(self) -> Arena | None:
        if self._arena is None:
            layout = layout_of(self._calls)
            made = self._connect(layout.total)
            if isinstance(made, str):
                for number, call in enumerate(self._calls):  # one warning says it for all
                    call.fail(made, number == 0 and 0 in self._positions)
                return None
            self._arena = Arena(layout, made.parts)
            self._together = made.together
        return self._arena

    def _compiled(
        self, call: FusedCall, launches: Sequence[Sequence[tuple[Kernel, Mapping[str, Any]]]]
    ) -> bool:
        """Whether all ranks of the group have compiled the kernels of a call, before one runs."""
        if call in self._ready:
            return True
        problem = ""
        try:
            for kernel, values in (each for kernels in launches for each in kernels):
                prepare(kernel, values)
        except KernelError as error:
            problem = str(error)
        problem = self._agree(problem)
        if problem:
            call.fail(problem, 0 in self._positions)
            return False
        self._ready.add(call)
        return True
