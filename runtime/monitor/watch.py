"""What the monitor makes of beats: events that name rank and node. It keeps no clock of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msc.runtime.monitor.beat import Beat, RankBeat
from msc.runtime.monitor.usual import Band, Traffic

MISSED = "missed beats"
PROCESS = "process"
STEP_TIME = "step time"
TRAFFIC = "traffic"
PORT = "port"
LOG = "log"
RECOVERED = "recovered"

PERIOD_S = 1.0
MISSES = 3  # beats that may be lost before anybody is told
_STEPS = 4  # of a window, at least, for a beat comes in the middle of a step
_PERIODS = 4  # of a window, at least
_STUCK = 5  # times the usual step


@dataclass(frozen=True)
class Event:
    """What is wrong, or right again, with a node or with one rank of it (-1: with the node)."""

    kind: str
    node: str
    rank: int
    detail: str
    time_s: float

    def __str__(self) -> str:
        who = f"node {self.node}" if self.rank < 0 else f"rank {self.rank} on {self.node}"
        return f"{self.kind}: {who}: {self.detail}"


@dataclass(slots=True)
class _Rank:
    """What is known of a rank. at_s, beat: when its window began; stepped_s: when its step did.

    Of its newest beat a few fields alone: to keep all beats of all ranks costs more time, in memory
    that is out of the caches, than to read them.
    """

    at_s: float
    beat: RankBeat
    stepped_s: float
    step: int
    phase: str
    waits_s: float
    last: str
    state: str = "running"
    stuck: bool = False
    step_time: Band = field(default_factory=Band)
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(slots=True)
class _Node:
    heard_s: float
    sent_s: float
    ports: dict[str, tuple[int, int, int]]
    ports_at: tuple[float, int, dict[str, tuple[int, int, int]]]
    errors: int = 0
    missing: bool = False
    bands: dict[str, Band] = field(default_factory=dict)
    ranks: dict[int, _Rank] = field(default_factory=dict)


class Watch:
    """All nodes of a job. Give it beats as they come, and ask it now and then who is late."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._full_s = (_PERIODS - 0.5) * period_s  # of a window
        self._nodes: dict[str, _Node] = {}
        self._looked_s: float | None = None

    @property
    def ranks(self) -> int:
        """How many ranks have been heard of."""
        return sum(len(node.ranks) for node in self._nodes.values())

    def hear(self, beat: Beat, now_s: float) -> list[Event]:
        """A beat has come; what it says that is new."""
        node = self._nodes.get(beat.node)
        if node is None:
            step = max((r.step for r in beat.ranks), default=0)
            ports = dict(beat.ports)
            node = _Node(now_s, beat.sent_s, ports, (beat.sent_s, step, ports))
            node.errors = _errors(beat)
            self._nodes[beat.node] = node
        found = []
        if node.missing:
            node.missing = False
            for number in node.ranks:
                found.append(Event(RECOVERED, beat.node, number, "beats come again", now_s))
        sent_s = beat.sent_s
        node.heard_s, node.sent_s = now_s, sent_s
        ranks, old_s = node.ranks, sent_s - self._full_s
        for rank in beat.ranks:
            number, state, phase, step, waits_s, last, _ = rank
            known = ranks.get(number)
            if (
                known is None
                or known.stuck
                or state != known.state
                or step < known.beat.step
                or (known.at_s < old_s and step - known.beat.step >= _STEPS)
            ):
                found += self._rank(beat, node, rank, now_s)
            else:  # nearly always: there is nothing to say of it
                if step > known.step:
                    known.step, known.stepped_s = step, sent_s
                known.waits_s = waits_s
                if phase != known.phase:
                    known.phase = phase
                if last != known.last:
                    known.last = last
        errors = _errors(beat)
        if errors != node.errors or node.ports_at[0] < old_s:
            node.errors = errors
            found += self._ports(beat, node, now_s)
        found += [Event(LOG, beat.node, -1, line, now_s) for line in beat.lines]
        return found

    def late(self, now_s: float) -> list[Event]:
        """What is late now and was not before: beats, an event for each rank, and steps."""
        if self._looked_s is not None:
            # a monitor that could not run, or was stopped, has heard nobody meanwhile
            absent = now_s - self._looked_s - 2 * self._period_s
            if absent > 0:
                for node in self._nodes.values():
                    node.heard_s += absent
        self._looked_s = now_s
        return [*self._silent(now_s), *self._stuck(now_s)]

    def _stuck(self, now_s: float) -> list[Event]:
        """Steps that do not end. Of ranks that wait for each other, who does not wait is told."""
        stuck = []
        for name, node in self._nodes.items():
            for rank in () if node.missing else node.ranks.values():
                usual = rank.step_time.usual
                # by the node's own clock: its last beat against the first one with this step
                lasts = node.sent_s - rank.stepped_s
                if usual is not None and rank.phase not in ("ended", "idle"):
                    if lasts > max(_STUCK * usual, MISSES * self._period_s):
                        stuck.append((name, rank, lasts, usual))
        busy = [each for each in stuck if each[1].waits_s < each[2] / 2]
        found = []
        for name, rank, lasts, usual in busy or stuck[:1]:
            if not rank.stuck:
                rank.stuck = True
                doing = f"phase {rank.phase}" if busy else f"all ranks wait, it in {rank.last}"
                detail = f"step {rank.step} lasts {lasts:.1f} s, usually {usual:.3g} s; {doing}"
                found.append(Event(STEP_TIME, name, rank.beat.rank, detail, now_s))
        return found

    def _silent(self, now_s: float) -> list[Event]:
        found = []
        for name, node in self._nodes.items():
            silent = now_s - node.heard_s
            if not node.missing and silent > MISSES * self._period_s:
                node.missing = True
                for rank, known in node.ranks.items():
                    detail = f"none for {silent:.1f} s, last in step {known.beat.step}"
                    found.append(Event(MISSED, name, rank, detail, now_s))
        return found

    def _rank(self, beat: Beat, node: _Node, new: RankBeat, now_s: float) -> Iterator[Event]:
        known = node.ranks.get(new.rank)
        if known is None or new.step < known.beat.step:  # it begins, or goes back
            state = "running" if known is None else known.state
            known = node.ranks[new.rank] = _Rank(
                beat.sent_s, new, beat.sent_s, new.step, new.phase, new.waits_s, new.last, state
            )
        if new.state != known.state:
            well = new.state in ("running", "unknown")
            kind = RECOVERED if well else PROCESS
            where = f"{new.state} in step {new.step}, phase {new.phase}, last {new.last or 'none'}"
            if well or new.phase != "ended":
                yield Event(kind, beat.node, new.rank, where, now_s)
            known.state = new.state
        if new.step > known.step:
            known.stepped_s = beat.sent_s
            if known.stuck:
                known.stuck = False
                yield Event(RECOVERED, beat.node, new.rank, f"step {new.step} has begun", now_s)
        known.step, known.phase = new.step, new.phase
        known.waits_s, known.last = new.waits_s, new.last
        steps = new.step - known.beat.step
        if self._is_window(steps, beat.sent_s - known.at_s):
            yield from self._window(beat, known, new, steps, now_s)
            known.at_s, known.beat = beat.sent_s, new

    def _is_window(self, steps: int, seconds: float) -> bool:
        return steps >= _STEPS and seconds > self._full_s

    def _window(
        self, beat: Beat, known: _Rank, new: RankBeat, steps: int, now_s: float
    ) -> Iterator[Event]:
        said = known.step_time.look((beat.sent_s - known.at_s) / steps)
        yield from _told(STEP_TIME, beat.node, new.rank, "seconds a step", said, now_s)
        before = known.beat.started
        if before.keys() == new.started.keys():
            pairs = zip(new.started.items(), before.values(), strict=True)
            counts = {axis: (n - old) / steps for (axis, n), old in pairs}
        else:
            counts = {axis: (n - before.get(axis, 0)) / steps for axis, n in new.started.items()}
        said = known.traffic.look(counts)
        yield from _told(TRAFFIC, beat.node, new.rank, "communications a step", said, now_s)

    def _ports(self, beat: Beat, node: _Node, now_s: float) -> Iterator[Event]:
        for name, (_, _, errors) in beat.ports.items():
            before = node.ports.get(name, (0, 0, errors))[2]
            if errors > before:
                yield Event(PORT, beat.node, -1, f"{name} has {errors - before} new errors", now_s)
        node.ports = dict(beat.ports)
        began_s, step, ports = node.ports_at
        here = max((rank.step for rank in beat.ranks), default=0)
        if here < step or not beat.ranks:
            node.ports_at = beat.sent_s, here, node.ports
        elif self._is_window(here - step, beat.sent_s - began_s):
            for name, (received, sent, _) in beat.ports.items():
                if name in ports:
                    moved = received - ports[name][0] + sent - ports[name][1]
                    said = node.bands.setdefault(name, Band()).look(moved / (here - step))
                    what = f"bytes a step on {name}"
                    yield from _told(TRAFFIC, beat.node, -1, what, said, now_s)
            node.ports_at = beat.sent_s, here, node.ports


def _errors(beat: Beat) -> int:
    total = 0
    for _, _, errors in beat.ports.values():
        total += errors
    return total


def _told(kind: str, node: str, rank: int, unit: str, said: str, now_s: float) -> Iterator[Event]:
    if said == "again":
        yield Event(RECOVERED, node, rank, f"{kind} is as usual ({unit})", now_s)
    elif said:
        yield Event(kind, node, rank, f"{unit}: {said}", now_s)
