"""Where the time of a rank goes: every nanosecond in exactly one class, in a mapped file.

    rank-00003.ledger   one record for each attempt (a life of the rank's process), oldest first

An attempt has one clock. Changing class adds what has passed to the class that was, so the times of
all classes always sum to the time since the attempt began, and nothing else is stored of it. A
process that is killed at any moment leaves what it had, up to its last change of class. Attempts
are appended: no restart overwrites what came before.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msc.runtime.diagnosis.process_facts import alive, process_age_ns, process_facts

INIT = "init"
LOAD = "load"
COMPUTE = "compute"
COMMUNICATION = "communication"
DATA = "data"
SNAPSHOT = "snapshot"
DETECT = "detect"
REPAIR = "repair"
REPEATED = "repeated"
IDLE = "idle"

CLASSES = (
    INIT,
    LOAD,
    COMPUTE,
    COMMUNICATION,
    DATA,
    SNAPSHOT,
    DETECT,
    REPAIR,
    REPEATED,
    IDLE,
)
STEP_CLASSES = (COMPUTE, COMMUNICATION, DATA)
"""What a step is made of: of a step that was done before, or is cut off, it is repeated work."""

_NUMBERS = {name: number for number, name in enumerate(CLASSES)}
_MAGIC = b"MSCLEDG1"
_FACTS_BYTES = 256
_FIELDS = ("began_ns", "class", "in_step", "last_step", "noticed_ns", "ended")
_BEGAN, _CLASS, _IN_STEP, _LAST_STEP, _NOTICED, _ENDED = range(len(_FIELDS))
_TOTALS = len(_FIELDS)
_BASES = _TOTALS + len(CLASSES)
_WORDS = _BASES + len(STEP_CLASSES)
RECORD_BYTES = _FACTS_BYTES + 8 * _WORDS
_opened = False  # whether this process has had an attempt


class Ledger:
    """A rank's attempt; written by the rank alone, a change of class takes under a microsecond.

    It begins where the process did, in class "init"; a second one of a process begins now.

    file: of the rank in the run's folder. rank_0: that of rank 0, which knows what was done before
    where this rank has no file.
    """

    def __init__(self, file: Path, rank_0: Path) -> None:
        global _opened
        now = time.monotonic_ns()
        age = 0 if _opened else process_age_ns()
        _opened = True
        earlier = read_ledger(file) or read_ledger(rank_0)
        self._done = max((attempt.last_step for attempt in earlier), default=0)
        self._words = _append(file, process_facts(), time.time_ns() - age)
        self._totals = [0] * len(CLASSES)
        self._bases = [0] * len(STEP_CLASSES)
        self._since = now - age
        self._class = _NUMBERS[INIT]
        self._again = False

    def switch(self, name: str) -> None:
        """What the rank does from now on is of this class.

        Inside of a step that was done before, what a step is made of is repeated work.
        """
        if self._again and name in STEP_CLASSES:
            name = REPEATED
        now = time.monotonic_ns()
        self._add(self._class, now - self._since)
        self._since = now
        self._words[_CLASS] = self._class = _NUMBERS[name]

    def begin_step(self, step: int) -> None:
        """A step begins (counted from 1), in class "compute"."""
        self.switch(IDLE)
        if self._words[_IN_STEP]:
            self._give_up_step()
        self._bases = [self._totals[_NUMBERS[name]] for name in STEP_CLASSES]
        for place, base in enumerate(self._bases, _BASES):
            self._words[place] = base
        self._words[_IN_STEP] = step
        self._again = step <= self._done
        self.switch(COMPUTE)

    def end_step(self) -> None:
        """The step is done; class "idle"."""
        self.switch(IDLE)
        step = self._words[_IN_STEP]
        self._again = False
        if step:
            self._words[_LAST_STEP] = self._done = max(step, self._done)
            self._words[_IN_STEP] = 0

    def fail(self, waited: bool) -> None:
        """The rank knows of a failure from now on, its own or another's; class "repair".

        waited: what it has done since the last change of class was to wait for the rank that
            failed, which is class "detect" whatever it was called.
        """
        if waited:
            self._class = _NUMBERS[DETECT]
        self.switch(REPAIR)
        self._words[_NOTICED] = time.time_ns()

    def end(self) -> None:
        """The attempt ends as it should; what comes later is not of the run."""
        self.switch(IDLE)
        self._words[_ENDED] = 1

    def _add(self, number: int, elapsed: int) -> None:
        self._totals[number] += elapsed
        self._words[_TOTALS + number] = self._totals[number]

    def _give_up_step(self) -> None:
        """What was done of a step that is begun again, or that others go back behind."""
        for name, base in zip(STEP_CLASSES, self._bases, strict=True):
            spent = self._totals[_NUMBERS[name]] - base
            self._add(_NUMBERS[name], -spent)
            self._add(_NUMBERS[REPEATED], spent)


@dataclass(frozen=True)
class Attempt:
    """What one record says.

    began_s: by the machine's clock. seconds: of each class; they sum to `end_s - began_s`. last:
    the class at the end. last_step: the last step that was done. noticed_s: when the rank knew of a
    failure; 0 for never. ended: it left the job as it should. alive: as of a ring.
    """

    began_s: float
    seconds: dict[str, float]
    last: str
    last_step: int
    noticed_s: float
    ended: bool
    alive: str
    host: str

    @property
    def end_s(self) -> float:
        """Until when it is known; of a process that runs, now."""
        return self.began_s + sum(self.seconds.values())


def read_ledger(file: Path) -> list[Attempt]:
    """A rank's attempts, oldest first; none if there is no file.

    The rank may be writing. Raises `ValueError` for another file.
    """
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return []
    if raw and raw[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{file} is no ledger of a rank")
    starts = range(0, len(raw) - RECORD_BYTES + 1, RECORD_BYTES)
    return [_attempt(raw[start : start + RECORD_BYTES], start == starts[-1]) for start in starts]


def _attempt(raw: bytes, newest: bool) -> Attempt:
    length = int.from_bytes(raw[len(_MAGIC) : len(_MAGIC) + 2], "little")
    start = len(_MAGIC) + 2
    facts: dict[str, Any] = json.loads(raw[start : start + length])
    words = struct.unpack_from(f"<{_WORDS}q", raw, _FACTS_BYTES)
    totals = dict(zip(CLASSES, words[_TOTALS:_BASES], strict=True))
    last = CLASSES[words[_CLASS]]
    state = alive(facts) if newest else "dead"
    if state in ("running", "stopped") and not words[_ENDED]:
        totals[last] += max(time.time_ns() - words[_BEGAN] - sum(totals.values()), 0)
    elif words[_IN_STEP] and state == "dead":  # cut off: another attempt has to do it again
        for name, base in zip(STEP_CLASSES, words[_BASES:], strict=True):
            totals[REPEATED] += totals[name] - base
            totals[name] = base
    return Attempt(
        words[_BEGAN] / 1e9,
        {name: total / 1e9 for name, total in totals.items()},
        last,
        words[_LAST_STEP],
        words[_NOTICED] / 1e9,
        bool(words[_ENDED]),
        state,
        facts["host"],
    )


def _append(file: Path, facts: dict[str, Any], began_ns: int) -> memoryview[int]:
    """Add a record; its words, which are 8 bytes each, in the mapped file."""
    text = json.dumps(facts).encode()
    head = _MAGIC + len(text).to_bytes(2, "little") + text
    if len(head) > _FACTS_BYTES:
        raise ValueError(f"the name of this host is too long for a ledger: {facts['host']}")
    words = [0] * _WORDS
    words[_BEGAN], words[_CLASS] = began_ns, _NUMBERS[INIT]
    record = head.ljust(_FACTS_BYTES, b"\0") + struct.pack(f"<{_WORDS}q", *words)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        start = os.fstat(handle).st_size // RECORD_BYTES * RECORD_BYTES  # less one that was cut off
        os.pwrite(handle, record, start)
        mapped = mmap.mmap(handle, start + RECORD_BYTES)
    finally:
        os.close(handle)
    return memoryview(mapped)[start + _FACTS_BYTES :].cast("q")
