"""The process executor: one rank of a mesh as a real process on `torch.distributed`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx

from msc.codegen.devices import on_device
from msc.codegen.emit import emit
from msc.codegen.inductor import compile_graph
from msc.codegen.kernel_calls.choice import choose
from msc.codegen.kernel_calls.fused_collectives import FusedCall
from msc.cost.measurements import Measurements
from msc.ir import actions
from msc.ir.communication import fused_nodes, used_channels, used_groups
from msc.ir.errors import InputError
from msc.ir.mesh import Mesh
from msc.runtime import fused_collectives as fused
from msc.runtime.actions import LocalActions
from msc.runtime.fused_kernels.process import ProcessKernels
from msc.runtime.process_groups import ProcessGroups, device_of
from msc.runtime.shared_memory import SharedMemory, share
from msc.runtime.transport import GlooTransport, NativeTransport, Pending

Backend = Literal["aten", "inductor"]

_IN_SHARED_MEMORY = (
    "between processes on the CPU ranks multiply in shared memory, or one after the other: no "
    "interpreter has the kernels of several processes"
)

WRITING = (actions.lamb_sums.__name__, *(action.__name__ for action in actions.UPDATES))
"""The actions that write into parameters or moments."""


class ProcessExecutor:
    """Runs one rank's graph in this process.

    backend: "aten" calls the ops one by one; "inductor" compiles each graph that computes only.
    timeout: of the groups that are created; None takes the default of `torch.distributed`.
    before_update: called before each action that writes into parameters or moments.
    rank_of: makes the rank's side of the program from (mesh, rank, groups, before_update), in place
        of `ProcessRank`: one that records what it does.
    measured: what `msc tune` found, to choose kernels by.

    Creating it is collective: every rank of `mesh` must do so.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank_graph: fx.GraphModule,
        backend: Backend = "aten",
        timeout: timedelta | None = None,
        before_update: Callable[[], None] | None = None,
        rank_of: Callable[..., ProcessRank] | None = None,
        measured: Measurements | None = None,
    ) -> None:
        self._graph = rank_graph
        self._timeout = timeout
        self._rank_of = functools.partial(
            rank_of or ProcessRank, mesh, dist.get_rank(), before_update=before_update
        )
        self._mesh = mesh
        device = device_of(str(dist.get_backend()))
        if device.type != "cpu":
            rank_graph = on_device(rank_graph, device)
        unfused = _IN_SHARED_MEMORY if device.type == "cpu" else ""
        self.choice = choose(device, [rank_graph], measured, unfused=unfused)
        self.join()
        compiler = compile_graph if backend == "inductor" else None
        self.emitted = emit(rank_graph, "process", compiler, self.choice)
        self._program = self.emitted.program
        self._names = [node.name for node in rank_graph.graph.find_nodes(op="placeholder")]

    def join(self) -> None:
        """Make the groups that the program uses, of the processes that are the ranks now.

        Collective. What was compiled stays.
        """
        graph = self._graph
        self.groups = ProcessGroups(
            self._mesh, dist.get_rank(), used_groups(graph), used_channels(graph), self._timeout
        )
        self.memories = _memories(self.groups, graph, self._timeout)
        kernels = ProcessKernels(self.choice, self.groups)
        self._rt = self._rank_of(groups=self.groups, memories=self.memories, kernels=kernels)

    def abort(self) -> None:
        """End every wait of this rank for another one with an error; any thread may call it."""
        for memory in self.memories.values():
            memory.abort()
        self.groups.abort()

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Run one step; `inputs` are the placeholders' values, in order.

        Optimizer actions write into the parameters and moments that are given.
        """
        if len(inputs) != len(self._names):
            raise InputError(
                f"Got {len(inputs)} inputs; the program takes {len(self._names)}: "
                f"{', '.join(self._names)}."
            )
        with torch.no_grad():
            return self._program(self._rt, list(inputs))


class ProcessRank(LocalActions):
    """`rt` of the process dialect.

    memories: of the groups whose fused collectives run in shared memory. kernels: runs those that
    generated code gives kernels for.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        groups: ProcessGroups,
        memories: Mapping[str, SharedMemory],
        before_update: Callable[[], None] | None = None,
        kernels: ProcessKernels | None = None,
    ) -> None:
        super().__init__(mesh, rank)
        if before_update is not None:
            for name in WRITING:
                setattr(self, name, _behind(before_update, getattr(self, name)))
        self._groups = groups
        self._memories = memories
        self._kernels = kernels
        self._transport = GlooTransport() if groups.backend == "gloo" else NativeTransport()

    @staticmethod
    def wait(pending: Pending) -> Any:
        """Complete a communication and return its result."""
        return pending.wait()

    def all_gather(self, value: Tensor, size: int, group: str, site: str) -> Pending:
        """Start an all-gather along dim 0."""
        to = self._groups.group(group)
        return _alone(value) if to.handle is None else self._transport.all_gather(value, to)

    def reduce_scatter(self, value: Tensor, op: str, size: int, group: str, site: str) -> Pending:
        """Start a reduce-scatter along dim 0."""
        to = self._groups.group(group)
        return _alone(value) if to.handle is None else self._transport.reduce_scatter(value, op, to)

    def all_reduce(self, value: Tensor, op: str, group: str, site: str) -> Pending:
        """Start an all-reduce."""
        to = self._groups.group(group)
        return _alone(value) if to.handle is None else self._transport.all_reduce(value, op, to)

    def all_to_all(
        self, value: Tensor, received: Sequence[int], sent: Sequence[int], group: str, site: str
    ) -> Pending:
        """Start an exchange of rows of dim 0: `sent[i]` of them to member i."""
        to = self._groups.group(group)
        if to.handle is None:
            return _alone(value)
        return self._transport.all_to_all(value, received, sent, to)

    def all_gather_matmul(
        self, x: Tensor, *operands: Any, kernel: FusedCall | None = None
    ) -> list[Tensor]:
        """Gather and multiply; operands as those of the op, then the site."""
        *rest, size, group, site = operands
        done: list[Tensor] | None = self._in_kernels(kernel, (x, *operands[:-1]))
        if done is not None:
            return done
        memory = self._memories.get(group)
        if memory is not None:
            return fused.all_gather_matmul(memory, site, x, *rest)

        def gather(value: Tensor) -> Tensor:
            result: Tensor = ProcessRank.all_gather(self, value, size, group, site).wait()
            return result

        return fused.gather_then_multiply(gather, size, x, *rest)

    def matmul_reduce_scatter(
        self, x: Tensor, *operands: Any, kernel: FusedCall | None = None
    ) -> Tensor:
        """Multiply and reduce; operands as those of the op, then the site."""
        *rest, size, group, site = operands
        done: Tensor | None = self._in_kernels(kernel, (x, *operands[:-1]))
        if done is not None:
            return done
        memory = self._memories.get(group)
        if memory is not None:
            return fused.matmul_reduce_scatter(memory, site, x, *rest)

        def reduce_scatter(value: Tensor) -> Tensor:
            pending = ProcessRank.reduce_scatter(self, value, "sum", size, group, site)
            result: Tensor = pending.wait()
            return result

        return fused.multiply_then_reduce(reduce_scatter, size, x, *rest)

    def _in_kernels(self, call: FusedCall | None, operands: Sequence[Any]) -> Any:
        """What the kernels of a fused collective give, or None where there are none to use."""
        if call is None or self._kernels is None:
            return None
        return self._kernels.run(call, operands)

    def send(self, values: Sequence[Tensor], stage: int, channel: str, site: str) -> Pending:
        """Start sending to the rank at pp coordinate `stage`."""
        to = self._groups.channel(channel, stage)
        kept = [value.contiguous() for value in values]
        works = [dist.isend(value, to.peer, group=to.handle, tag=to.tag) for value in kept]
        return Pending(works, None, kept)

    def recv(
        self,
        stage: int,
        channel: str,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        site: str,
    ) -> Pending:
        """Start receiving from the rank at pp coordinate `stage`."""
        source = self._groups.channel(channel, stage)
        pairs = zip(shapes, dtypes, strict=True)
        values = tuple(torch.empty(s, dtype=d, device=self._groups.device) for s, d in pairs)
        works = [
            dist.irecv(value, source.peer, group=source.handle, tag=source.tag) for value in values
        ]
        return Pending(works, values)


def _memories(
    groups: ProcessGroups, rank_graph: fx.GraphModule, timeout: timedelta | None
) -> dict[str, SharedMemory]:
    """Shared memory for the groups that have fused collectives, where all members can have it."""
    found: dict[str, SharedMemory] = {}
    if groups.backend != "gloo":
        return found  # on CUDA they run as collective and GEMM
    wanted = fused.shared_bytes(fused_nodes(rank_graph))
    # the order in which groups are made, so that no two ranks wait for each other in a ring
    for name in sorted(wanted, key=lambda name: (name, groups.group(name).members)):
        to = groups.group(name)
        if to.handle is not None:
            seconds = (timeout or dist.constants.default_pg_timeout).total_seconds()
            memory = share(to, name, wanted[name], seconds)
            if memory is not None:
                found[name] = memory
    return found


def _alone(value: Tensor) -> Pending:
    """A collective of one member; a copy, as a collective's result never shares its input."""
    return Pending((), value.clone(memory_format=torch.contiguous_format))


def _behind(first: Callable[[], None], action: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        first()
        return action(*args, **kwargs)

    return run
