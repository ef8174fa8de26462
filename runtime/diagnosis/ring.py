"""A ring of a rank's last communications in a mapped file, which outlives the process.

    48 bytes   sizes, the step, the phase and since when, and how many records there were when the
               step began
    JSON       the rank, its process, the names of its channels
    counts     how many communications each channel had when the step began
    records    (number, sequence, channel, kind, bytes, enter, leave), the oldest overwritten

A record takes under a microsecond, since it is all that is written: what a step has had is counted
when the ring is read. So the ring must hold the records of a whole step. `leave` is 0 while the
rank waits; of starts it is `enter`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from msc.ir.communication import FUSED, STARTS
from msc.runtime.diagnosis.process_facts import alive, process_facts
from msc.runtime.diagnosis.schedule import WAIT

KINDS = (WAIT, *STARTS.values(), *FUSED.values())
PHASES = ("idle", "data", "step", "save", "failed", "lost", "ended", "load")
CAPACITY = 4096
_HEAD = struct.Struct("<8sIIQIIQQ")  # magic, JSON's size, channels, step, phase, -, since, first
_RECORD = struct.Struct("<QQIIQQQ")
_COUNT = struct.Struct("<Q")
_MAGIC = b"MSCRING1"
_CODES = {kind: code for code, kind in enumerate(KINDS)}


class Ring:
    """Written by its rank alone.

    channels: all that its program uses; others are not recorded.
    """

    def __init__(
        self, file: Path, rank: int, channels: Sequence[str], capacity: int = CAPACITY
    ) -> None:
        self._numbers = {channel: number for number, channel in enumerate(channels)}
        facts = {
            "rank": rank,
            **process_facts(),
            "channels": list(channels),
            "capacity": capacity,
        }
        text = json.dumps(facts).encode()
        self._counts = _HEAD.size + len(text)
        self._records = self._counts + len(channels) * _COUNT.size
        size = self._records + capacity * _RECORD.size
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(handle, 0, size)  # a full disk must not end who writes into it later
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self._started = [0] * len(channels)
        self._capacity = capacity
        self._count = 0
        self._map[_HEAD.size : self._counts] = text
        self._sizes = (_MAGIC, len(text), len(channels))
        self._step = self._first = 0
        self.phase("idle")

    def begin(self) -> None:
        """Forget all communications: the ranks have met again, and count from 0."""
        self._started = [0] * len(self._started)
        self._count = self._step = self._first = 0
        self._map[self._counts : len(self._map)] = bytes(len(self._map) - self._counts)
        self.phase("idle")

    def phase(self, name: str, step: int | None = None) -> None:
        """What the rank does now; with a step's number where one begins."""
        if step is not None:
            self._step, self._first = step, self._count
            counts = struct.pack(f"<{len(self._started)}Q", *self._started)
            self._map[self._counts : self._records] = counts
        number = PHASES.index(name)
        now = time.time_ns()
        _HEAD.pack_into(self._map, 0, *self._sizes, self._step, number, 0, now, self._first)

    def start(self, kind: str, channel: str, nbytes: int) -> int:
        """A communication is started; a token for `enter`."""
        code = self._numbers[channel]
        sequence = self._started[code]
        self._started[code] = sequence + 1
        number = self._count
        self._count = number + 1
        place = self._records + number % self._capacity * 48
        now = _now()
        _pack(self._map, place, number + 1, sequence, code, _CODES[kind], nbytes, now, now)
        return sequence << 20 | code

    def enter(self, token: int) -> int:
        """A wait for what was started begins; a token for `leave`."""
        number = self._count
        self._count = number + 1
        place = self._records + number % self._capacity * 48
        _pack(self._map, place, number + 1, token >> 20, token & 0xFFFFF, 0, 0, _now(), 0)
        return place

    def leave(self, place: int) -> None:
        """The wait is over."""
        _pack_count(self._map, place + 40, _now())


_now = time.time_ns
_pack = _RECORD.pack_into
_pack_count = _COUNT.pack_into


@dataclass(frozen=True)
class Record:
    """A communication that was started, or waited for.

    sequence: how many were started on the channel before; of a wait, before the one waited for.
    """

    kind: str
    channel: str
    sequence: int
    nbytes: int
    enter_ns: int
    leave_ns: int


@dataclass(frozen=True)
class RankView:
    """What one rank's ring says.

    pid: of its process. alive: "running", "stopped", "dead", or "unknown" for a process of another
    machine. in_step: how many records the step has so far; started: per channel, all of the run;
    records: the last ones.
    """

    rank: int
    pid: int
    alive: str
    phase: str
    step: int
    in_step: int
    started: dict[str, int]
    records: tuple[Record, ...]

    @property
    def open_wait(self) -> Record | None:
        """What the rank waits for."""
        last = self.records[-1] if self.records else None
        return last if last is not None and last.kind == WAIT and not last.leave_ns else None


def read_pulse(file: Path) -> tuple[bytes, int] | None:
    """What differs whenever the rank goes from one phase to the next, and its step.

    Cheaper than `read_ring`; None of a ring that is just being made.
    """
    with file.open("rb") as handle:
        raw = handle.read(_HEAD.size)
    return (raw, _HEAD.unpack(raw)[3]) if len(raw) == _HEAD.size else None


def read_ring(file: Path, last: int | None = None) -> RankView:
    """Read the ring of a rank that may be writing it, or be dead; `ValueError` for another file.

    last: how many records, in place of all; `started` is then as it was when the step began.
    """
    raw = file.read_bytes()
    if len(raw) < _HEAD.size or raw[:8] != _MAGIC:
        raise ValueError(f"{file} is no ring of a rank")
    _, size, channels, step, phase, _, _, first = _HEAD.unpack_from(raw)
    facts: dict[str, Any] = json.loads(raw[_HEAD.size : _HEAD.size + size])
    names = facts["channels"]
    counts = _HEAD.size + size
    place, capacity = counts + 8 * channels, facts["capacity"]
    if len(raw) < place + _RECORD.size * capacity:
        raise ValueError(f"{file} is cut off")
    started = dict(zip(names, struct.unpack_from(f"<{channels}Q", raw, counts), strict=True))
    wanted: Sequence[int] = range(capacity)
    if last is not None:
        numbers = struct.unpack(f"<{6 * capacity}Q", raw[place : place + 48 * capacity])[::6]
        newest = max(numbers)
        wanted = [
            number % capacity for number in range(max(newest - min(last, capacity), 0), newest)
        ]
    found = sorted(_RECORD.unpack_from(raw, place + _RECORD.size * index) for index in wanted)
    records = []
    for number, sequence, code, kind, nbytes, enter, leave in found:
        if number:  # 0 is a record that was never written
            records.append(Record(KINDS[kind], names[code], sequence, nbytes, enter, leave))
            if kind and last is None:
                started[names[code]] = max(started[names[code]], sequence + 1)
    in_step = (found[-1][0] if found else 0) - first
    state = alive(facts)
    return RankView(
        facts["rank"],
        facts["pid"],
        state,
        PHASES[phase],
        step,
        in_step,
        started,
        tuple(records),
    )


def view_to_data(view: RankView) -> dict[str, Any]:
    """As JSON has it, with the records of the rank's step."""
    found = vars(view) | {"records": []}
    if view.in_step:
        found["records"] = [astuple(each) for each in view.records[-view.in_step :]]
    return found


def view_from_data(data: Mapping[str, Any]) -> RankView:
    """What `view_to_data` has made."""
    records = tuple(Record(*each) for each in data["records"])
    return RankView(**{**data, "records": records})
