"""Run the rank graphs of all classes of ranks in modelled time.

Ranks of equal graphs, whose groups and peers are of equal classes, do the same at the same time, so
one rank of each class is simulated: with 12,288 ranks as few as with 8. An operation begins when
every class of its group has started it; a peer is the class of the rank at the other pp coordinate.
What happens does not depend on the order in which classes are advanced, since communicators carry
out their operations in order and begin them when the last member has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import fx

from msc.cost import Cluster
from msc.ir.errors import CommunicationError
from msc.ir.mesh import Mesh
from msc.runtime.memory.predict import MemoryPredictor
from msc.runtime.simulate.network import Communication, Network
from msc.runtime.simulate.rank import SimulatedRank
from msc.runtime.simulate.result import ClassResult, SimulationResult, Transfer
from msc.runtime.simulate.templates import Template, Templates


@dataclass(frozen=True)
class RankClass:
    """Ranks that run one graph: their name, the first of them, and how many they are."""

    name: str
    rank: int
    count: int
    graph: fx.GraphModule


def simulate(
    mesh: Mesh,
    cluster: Cluster,
    classes: Sequence[RankClass],
    class_of: Callable[[int], int],
    axes: Collection[str] = ("pp", "tp"),
    model_flops: float | None = None,
) -> SimulationResult:
    """Simulate one step.

    class_of: the index in `classes` of a rank. axes: those whose coordinates decide it.
    model_flops: of a step on one device without recomputation, for the model FLOPs utilization.
    Raises `CommunicationError` if the ranks do not fit together, and `VerifyError` for what no
    executor runs.
    """
    templates = Templates(cluster)
    network = Network(mesh, cluster, [each.rank for each in classes], class_of, axes)
    ranks = [
        SimulatedRank(own, templates.of(each.graph), network) for own, each in enumerate(classes)
    ]
    _run(ranks, classes, network)
    memory = MemoryPredictor()
    return SimulationResult(
        mesh=mesh,
        cluster=cluster,
        step_seconds=max(rank.clock for rank in ranks),
        classes=tuple(
            _result(rank, each, mesh, ranks, memory)
            for rank, each in zip(ranks, classes, strict=True)
        ),
        model_flops=model_flops,
    )


def _run(ranks: Sequence[SimulatedRank], classes: Sequence[RankClass], network: Network) -> None:
    """Advance every class as far as it goes, until all have ended."""
    able = deque(ranks)
    waiting: dict[Communication, list[SimulatedRank]] = {}
    while able:
        rank = able.popleft()
        for operation in rank.waits:
            if not operation.done:
                waiting.setdefault(operation, []).append(rank)
                break
        for operation in [each for each in waiting if each.done]:
            able.extend(waiting.pop(operation))
    lines = [
        f"  {classes[rank.own].name} waits in {operation.kind} on "
        f"'{operation.communicator.name}' (%{operation.node}), which "
        f"{' and '.join(classes[c].name for c in operation.missing())} has not started"
        for operation, stuck in waiting.items()
        for rank in stuck
    ]
    if lines:
        raise CommunicationError("\n".join(["deadlock: no rank can go on.", *lines]))
    left = [
        f"  {each.kind} on '{communicator.name}' (%{each.node}), which "
        f"{' and '.join(classes[c].name for c in each.missing())} never started"
        for communicator in network.communicators
        for each in communicator.operations
        if not each.done
    ]
    if left:
        raise CommunicationError("\n".join(["all ranks have finished, but:", *left]))


def _result(
    rank: SimulatedRank,
    each: RankClass,
    mesh: Mesh,
    ranks: Sequence[SimulatedRank],
    memory: MemoryPredictor,
) -> ClassResult:
    rest = max(other.clock for other in ranks) - rank.clock  # it has ended, others have not
    staged = mesh.axis_size("pp") > 1
    return ClassResult(
        name=each.name,
        rank=each.rank,
        count=each.count,
        compute_seconds=rank.template.seconds,
        bubble_seconds=rank.bubble + (rest if staged else 0.0),
        skew_seconds=rank.skew + (0.0 if staged else rest),
        flops=dict(rank.template.flops),
        memory=_memory(memory.timeline(each.graph), rank.template, rank.times),
        slices=tuple(rank.slices),
        transfers=tuple(
            Transfer(
                name=operation.communicator.name,
                kind=kind,
                payload_bytes=operation.payload_bytes,
                module=operation.module,
                node=operation.node,
                begin=operation.begin,
                end=operation.end,
                exposed_seconds=operation.exposed.get(rank.own, 0.0),
            )
            for kind, operation in rank.communications
        ),
    )


def _memory(
    live: Sequence[int], template: Template, times: Sequence[float]
) -> tuple[tuple[float, int], ...]:
    curve: list[tuple[float, int]] = []
    for (step, offset), size in zip(template.positions, live, strict=True):
        if not curve or size != curve[-1][1]:
            curve.append((times[step] + offset, size))
    return tuple(curve)
