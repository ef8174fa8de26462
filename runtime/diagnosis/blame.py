"""Who blocks whom, and who is the first cause: rings of all ranks joined with their schedules.

A rank that waits for a communication waits for the ranks that have not started it. Who waits so
leads to a rank that waits for nobody: it is dead, frozen, busy, or has no data. Where a rank has
done what its schedule does not have, that comes before everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msc.ir.mesh import Mesh
from msc.runtime.diagnosis.ring import RankView, Record
from msc.runtime.diagnosis.schedule import WAIT, Act, members_of

MISMATCH = "runs another program"
FROZEN = "is frozen"
DEAD = "is dead"
DATA = "waits for data"
SAVING = "waits for a checkpoint"
FAILED = "has failed"
LOST = "has lost another rank"
ENDED = "has left the job"
BUSY = "computes, or hangs outside of communication"
SILENT = "does not tell"
STUCK = "waits for a message that was sent"
RING = "waits in a ring"

_VAGUE = (BUSY, STUCK, SILENT, LOST)
"""What is said of a rank only if nothing better is found."""
_LAST_PHASES = {"failed": FAILED, "lost": LOST, "ended": ENDED}
"""What a process may end in by itself; in all others one that is dead was killed."""
_PHASES = {"data": DATA, "save": SAVING, "load": SAVING}


@dataclass(frozen=True)
class Cause:
    """A rank that holds others up: `what` is one of the texts above, `detail` says more."""

    rank: int
    what: str
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """causes: the first ones; waits: for each rank that waits, what for, and who has not come."""

    causes: tuple[Cause, ...]
    waits: Mapping[int, tuple[Record, tuple[int, ...]]]

    def victims(self, cause: int) -> list[int]:
        """The ranks that wait for a rank, directly or through others."""
        found = {cause}
        while True:
            more = {r for r, (_, blockers) in self.waits.items() if found.intersection(blockers)}
            if more <= found:
                return sorted(found - {cause})
            found |= more


def blame(
    views: Mapping[int, RankView], schedules: Mapping[int, Sequence[Act]], world: int
) -> Verdict:
    """Judge what the ranks' rings say; a rank without a ring never started."""
    waits = {}
    for rank, view in views.items():
        wait = view.open_wait
        if wait is not None:
            waits[rank] = wait, _blockers(rank, wait, views)
    causes = [
        Cause(rank, MISMATCH, text)
        for rank, view in sorted(views.items())
        if (text := _deviation(view, schedules.get(rank)))
    ]
    if not causes:
        ends = sorted(_ends(waits, views, world))
        causes = [_cause(rank, views.get(rank), rank in waits) for rank in ends]
        firm = [each for each in causes if each.what not in _VAGUE]
        causes = firm or causes
    if not causes and waits:
        causes = [Cause(rank, RING, _doing(views[rank], schedules)) for rank in _ring(waits)]
    return Verdict(tuple(causes), waits)


def _blockers(rank: int, wait: Record, views: Mapping[int, RankView]) -> tuple[int, ...]:
    """Who has not started what `rank` waits for; else who has, but cannot carry it out."""
    others = [member for member in members_of(wait.channel) if member != rank]
    late = [m for m in others if m not in views or _started(views[m], wait) <= wait.sequence]
    if late:
        return tuple(late)
    return tuple(m for m in others if views[m].alive in ("dead", "stopped"))


def _started(view: RankView, wait: Record) -> int:
    return view.started.get(wait.channel, 0)


def _ends(
    waits: Mapping[int, tuple[Record, tuple[int, ...]]],
    views: Mapping[int, RankView],
    world: int,
) -> set[int]:
    """Where the chains of waiting end, and ranks that are gone or frozen with nobody waiting."""
    ends = set()
    for rank in range(world):
        view = views.get(rank)
        if view is None or view.alive == "stopped":
            ends.add(rank)
        elif rank not in waits:
            gone = view.alive == "dead" and view.phase != "ended"
            if gone or any(rank in blockers for _, blockers in waits.values()):
                ends.add(rank)
        elif not waits[rank][1]:
            ends.add(rank)
    return ends


def _cause(rank: int, view: RankView | None, waits: bool) -> Cause:
    if view is None:
        return Cause(rank, DEAD, "it has never begun")
    where = f"step {view.step}"
    if view.alive == "stopped":
        return Cause(rank, FROZEN, where)
    if view.phase in _LAST_PHASES:
        return Cause(rank, _LAST_PHASES[view.phase], where)
    if view.alive == "dead":
        return Cause(rank, DEAD, where)
    if view.phase in _PHASES:
        return Cause(rank, _PHASES[view.phase], where)
    if waits:
        return Cause(rank, STUCK, where)
    return Cause(rank, SILENT if view.alive == "unknown" else BUSY, where)


def _deviation(view: RankView, schedule: Sequence[Act] | None) -> str:
    """Where the rank's step differs from its schedule; "" if it does not so far."""
    if schedule is None or not view.in_step:
        return ""
    records = view.records[-view.in_step :]
    offset = view.in_step - len(records)
    for place, record in enumerate(records, offset):
        if place >= len(schedule):
            return f"in step {view.step} it goes on with {_text(record)} after its program's end"
        act = schedule[place]
        same = (record.kind, record.channel) == (act.kind, act.channel)
        if not same or (record.kind != WAIT and record.nbytes != act.nbytes):
            return (
                f"in step {view.step} it has {_text(record)} where its program has {act.kind} on "
                f"{act.channel}, {act.nbytes} bytes, at {act.site}"
            )
    return ""


def _text(record: Record) -> str:
    size = "" if record.kind == WAIT else f", {record.nbytes} bytes"
    return f"{record.kind} on {record.channel}{size}"


def _doing(view: RankView, schedules: Mapping[int, Sequence[Act]]) -> str:
    schedule = schedules.get(view.rank, ())
    place = view.in_step - 1
    return f"at {schedule[place].site}" if 0 <= place < len(schedule) else ""


def _ring(waits: Mapping[int, tuple[Record, tuple[int, ...]]]) -> list[int]:
    """The ranks of one ring of waits."""
    rank = min(waits)
    seen: list[int] = []
    while rank in waits and rank not in seen:
        seen.append(rank)
        rank = waits[rank][1][0]
    return sorted(seen[seen.index(rank) :]) if rank in seen else sorted(seen)


def describe(
    verdict: Verdict,
    views: Mapping[int, RankView],
    schedules: Mapping[int, Sequence[Act]],
    mesh: Mesh,
) -> str:
    """The verdict in words: causes, their victims, what comes next in the causes' programs."""
    if not verdict.causes:
        return "No rank waits for another."
    lines = []
    for cause in verdict.causes:
        detail = f" ({cause.detail})" if cause.detail else ""
        lines.append(f"{_name(cause.rank, mesh)} {cause.what}{detail}")
        view = views.get(cause.rank)
        schedule = schedules.get(cause.rank, ())
        if view is not None and view.in_step < len(schedule):
            act = schedule[view.in_step]
            lines.append(f"  next in its program: {act.kind} on {act.channel} at {act.site}")
        victims = verdict.victims(cause.rank)
        direct = [r for r in victims if cause.rank in verdict.waits[r][1]]
        for rank in direct:
            record = verdict.waits[rank][0]
            what = _waited(views[rank], schedules, record)
            lines.append(f"  {_name(rank, mesh)} waits for it: {what}")
        others = [str(rank) for rank in victims if rank not in direct]
        if others:
            lines.append(f"  and through these: ranks {', '.join(others)}")
    if len(views) == mesh.size and all(view.alive == "dead" for view in views.values()):
        lines.append("No rank is there any more: all were stopped, or ended after the first cause.")
    return "\n".join(lines)


def _waited(view: RankView, schedules: Mapping[int, Sequence[Act]], record: Record) -> str:
    schedule = schedules.get(view.rank, ())
    place = view.in_step - 1
    if 0 <= place < len(schedule) and schedule[place].kind == WAIT:
        start = schedule[schedule[place].started]
        return f"{start.kind} on {start.channel} at {start.site}"
    return f"number {record.sequence} on {record.channel}"


def _name(rank: int, mesh: Mesh) -> str:
    place = ",".join(f"{axis}={index}" for axis, index in mesh.coordinate(rank).items())
    return f"rank {rank} ({place})" if place else f"rank {rank}"
