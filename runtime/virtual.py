"""The virtual executor: all ranks of a mesh in one process, in lock-step.

Each rank's program is a generator that runs until it waits for something that has not happened yet;
then the next rank runs. Results are exact and do not depend on the order in which ranks run. If no
rank can go on, the error says who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from msc.codegen.emit import Emitter
from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.kernel_calls.fused_collectives import FusedCall
from msc.ir.errors import CommunicationError, InputError
from msc.ir.groups import Group
from msc.ir.mesh import Mesh
from msc.ir.ops.fused_collectives import (
    from_parts,
    into_parts,
    part_shape,
    product,
    products,
)
from msc.runtime.actions import LocalActions
from msc.runtime.fused_kernels.virtual import VirtualKernels
from msc.runtime.network import Network, Token

Pick = Callable[[Sequence[int]], int]
Program = Generator[Token, Any, Any]


class VirtualExecutor:
    """Runs the rank graphs of all ranks of `mesh` together.

    programs: a rank's graph; ranks that share a graph object share the code emitted for it.
    rendezvous: a send completes only when its receive was posted, as large messages do on NCCL.
    pick: chooses the next rank among those that can go on, for tests of the interleaving; without
        it they take turns in rank order.
    choice: which calls run in Triton kernels; without it, none.
    kernels: runs those of fused collectives, of all ranks of a group at once; without it they run
        unfused.
    """

    def __init__(
        self,
        mesh: Mesh,
        programs: Callable[[int], fx.GraphModule],
        *,
        rendezvous: bool = False,
        pick: Pick | None = None,
        choice: KernelChoice | None = None,
        kernels: VirtualKernels | None = None,
    ) -> None:
        self.mesh = mesh
        self._kernels = kernels
        self._rendezvous = rendezvous
        self._pick = pick
        emitter = Emitter("virtual", choice=choice)
        emitted: dict[int, Callable[..., Any]] = {}
        self._programs: list[tuple[fx.GraphModule, Callable[..., Any], bool]] = []
        for rank in range(mesh.size):
            graph = programs(rank)
            if id(graph) not in emitted:
                emitted[id(graph)] = emitter.emit(graph).program
            self._programs.append((graph, emitted[id(graph)], emitter.waits(graph)))

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Run one step of every rank; `inputs[rank]` are its placeholders' values, in order.

        Returns each rank's result. Optimizer actions write into the parameters and moments that are
        given; a tensor object given to several ranks is copied for all but the first, since every
        rank has memory of its own. Raises `CommunicationError` if the ranks do not fit together.
        """
        self._check(inputs)
        network = Network(self._rendezvous)
        seen: set[int] = set()
        ranks = [
            _Rank(
                VirtualRank(self.mesh, rank, network, self._kernels),
                function,
                waits,
                [_own(value, seen) for value in inputs[rank]],
            )
            for rank, (_, function, waits) in enumerate(self._programs)
        ]
        with torch.no_grad():
            self._loop(ranks)
        _complain(ranks, network)
        return [rank.result for rank in ranks]

    def _check(self, inputs: Sequence[Sequence[Tensor]]) -> None:
        if len(inputs) != self.mesh.size:
            raise InputError(f"Inputs for {len(inputs)} ranks; the mesh has {self.mesh.size}.")
        for rank, (graph, _, _) in enumerate(self._programs):
            names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
            if len(inputs[rank]) != len(names):
                raise InputError(
                    f"Rank {rank} got {len(inputs[rank])} inputs; its program takes {len(names)}: "
                    f"{', '.join(names)}."
                )

    def _loop(self, ranks: list[_Rank]) -> None:
        active = [rank for rank in ranks if not rank.finished]
        while able := [rank for rank in active if rank.can_go_on()]:
            if self._pick is None:
                for rank in able:  # each stays able: what has happened does not unhappen
                    rank.advance()
            else:
                chosen = self._pick([rank.number for rank in able])
                next(rank for rank in able if rank.number == chosen).advance(one=True)
            active = [rank for rank in active if not rank.finished]


class VirtualRank(LocalActions):
    """`rt` of one rank in the virtual dialect."""

    def __init__(
        self, mesh: Mesh, rank: int, network: Network, kernels: VirtualKernels | None = None
    ) -> None:
        super().__init__(mesh, rank)
        self._network = network
        self._kernels = kernels

    def _start(
        self, kind: str, value: Tensor, rest: tuple[Any, ...], group: str, site: str
    ) -> Token:
        members = Group.parse(group).members(self.mesh, self.rank)
        return self._network.collective(kind, value, rest, group, members, self.rank, site)

    def all_gather(self, value: Tensor, size: int, group: str, site: str) -> Token:
        """Start an all-gather along dim 0."""
        return self._start("all_gather", value, (size,), group, site)

    def reduce_scatter(self, value: Tensor, op: str, size: int, group: str, site: str) -> Token:
        """Start a reduce-scatter along dim 0."""
        return self._start("reduce_scatter", value, (op, size), group, site)

    def all_reduce(self, value: Tensor, op: str, group: str, site: str) -> Token:
        """Start an all-reduce."""
        return self._start("all_reduce", value, (op,), group, site)

    def all_to_all(
        self, value: Tensor, received: Sequence[int], sent: Sequence[int], group: str, site: str
    ) -> Token:
        """Start an exchange of rows of dim 0: `sent[i]` of them to member i."""
        return self._start("all_to_all", value, (tuple(received), tuple(sent)), group, site)

    def all_gather_matmul(
        self, x: Tensor, dim: int, *operands: Any, kernel: FusedCall | None = None
    ) -> Generator[Token, Any, list[Tensor]]:
        """Gather and multiply; operands as those of the op, then the site."""
        *rest, size, group, site = operands
        done: list[Tensor] | None
        done = yield from self._in_kernels(kernel, x, (dim, *rest, size, group), site)
        if done is not None:
            return done
        parts = yield self._start("all_gather", x.contiguous(), (size,), group, site)
        return products(from_parts(parts, x.shape, dim, size), *rest)

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, *operands: Any, kernel: FusedCall | None = None
    ) -> Generator[Token, Any, Tensor]:
        """Multiply and reduce; operands as those of the op, then the site."""
        add, transposed, dim, size, group, site = operands
        done: Tensor | None
        done = yield from self._in_kernels(kernel, x, (weight, *operands[:-1]), site)
        if done is not None:
            return done
        own = product(x, weight, add, transposed)
        shape = part_shape(own.shape, dim, size)
        parts = into_parts(own, dim, size)
        del own
        part: Tensor = yield self._start("reduce_scatter", parts, ("sum", size), group, site)
        return part.view(shape)

    def _in_kernels(
        self, call: FusedCall | None, x: Tensor, operands: tuple[Any, ...], site: str
    ) -> Generator[Token, Any, Any]:
        """What the kernels of a fused collective give, or None where it has to run unfused."""
        kernels = self._kernels
        if call is None or kernels is None or call.failure:
            return None
        group = operands[-1]
        members = Group.parse(group).members(self.mesh, self.rank)

        def together(given: Sequence[Any]) -> Sequence[Any]:
            return kernels.run(call, members, given)

        kind = call.op.removeprefix("msc.")
        return (
            yield self._network.collective(
                kind, x, (x, *operands), group, members, self.rank, site, together
            )
        )

    def send(self, values: Sequence[Tensor], stage: int, channel: str, site: str) -> Token:
        """Start sending to the rank at pp coordinate `stage`."""
        return self._network.send(values, channel, self.rank, self.stage_rank(stage), site)

    def recv(
        self,
        stage: int,
        channel: str,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        site: str,
    ) -> Token:
        """Start receiving from the rank at pp coordinate `stage`."""
        types = tuple((tuple(s), d) for s, d in zip(shapes, dtypes, strict=True))
        return self._network.recv(types, channel, self.stage_rank(stage), self.rank, site)


class _Rank:
    """One rank's program and where it stands."""

    def __init__(
        self, rt: VirtualRank, function: Callable[..., Any], waits: bool, inputs: list[Tensor]
    ) -> None:
        self.number = rt.rank
        self.finished = False
        self.result: Any = None
        self.token: Token | None = None
        self._program = _generator(function, waits, rt, inputs)

    def can_go_on(self) -> bool:
        return not self.finished and (self.token is None or self.token.done)

    def advance(self, one: bool = False) -> None:
        """Run until a wait that cannot complete yet, or only until the next wait."""
        while True:
            token = self.token
            try:
                if token is None:
                    self.token = next(self._program)
                else:
                    token.check_untouched()
                    self.token = self._program.send(token.result)
            except StopIteration as end:
                self.finished, self.token, self.result = True, None, end.value
                return
            except Exception as error:
                error.add_note(f"on rank {self.number} of the virtual executor")
                raise
            if one or not self.token.done:
                return


def _generator(
    function: Callable[..., Any], waits: bool, rt: VirtualRank, inputs: list[Tensor]
) -> Program:
    if waits:
        return (yield from function(rt, inputs))
    return function(rt, inputs)


def _own(value: Tensor, seen: set[int]) -> Tensor:
    if id(value) in seen:
        return value.clone()
    seen.add(id(value))
    return value


def _complain(ranks: Sequence[_Rank], network: Network) -> None:
    waiting = [rank for rank in ranks if not rank.finished]
    if waiting:
        lines = ["deadlock: no rank can go on."]
        for rank in ranks:
            if rank.token is None:
                lines.append(f"  rank {rank.number} has finished")
            else:
                why = network.explain(rank.token)
                lines.append(f"  rank {rank.number} waits in {rank.token}: {why}")
        raise CommunicationError("\n".join(lines))
    left = network.left_over()
    if left:
        raise CommunicationError("\n  ".join(["all ranks have finished, but:", *left]))
