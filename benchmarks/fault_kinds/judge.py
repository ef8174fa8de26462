"""What came of each fault of a run: from its events, its lines, and what it has ended with."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_kinds import beside
from benchmarks.fault_kinds.kinds import NAMES, Expected
from benchmarks.fault_kinds.runs import EVERY, SPOILT, TIMED_OUT, Done, lines, log_of, saves_of
from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.manifest import DamagedError
from msc.runtime.checkpoint.storage import LocalStorage


@dataclass
class Finding:
    """What came of one fault. seconds: until the first new step, of those that are mended.

    problem: what is not as it should be; "" if all is.
    """

    kind: str
    detected: bool = False
    recovered: bool = False
    same: bool | None = None
    seconds: float | None = None
    lost: int | None = None
    problem: str = ""

    def blame(self, text: str) -> None:
        """Add a problem."""
        self.problem = f"{self.problem}; {text}" if self.problem else text


def judge(done: Done, faults: Sequence[dict[str, Any]], whole: Done | None) -> list[Finding]:
    """All faults of a run; whole: the undisturbed run, None if it must end early."""
    made = {each["number"]: each for each in reversed(lines(done.folder, "injected.jsonl"))}
    events = lines(log_of(done), "events.jsonl")
    told = sorted(
        [(each["time"], _text(each)) for each in events]
        + [(each["time"], each["line"]) for each in lines(done.folder, "lines.jsonl")]
    )
    ends = whole is None
    same = None if whole is None else _same(done, whole)
    problems = _whole_run(done, ends, same)
    found = []
    for fault in faults:
        finding = Finding(fault["kind"], same=same)
        found.append(finding)
        if fault["number"] not in made:
            finding.blame("was not made")
            continue
        begun = made[fault["number"]]["time"]
        later = [
            made[each["number"]]["time"]
            for each in faults[fault["number"] + 1 :]
            if each["after"] is None and each["number"] in made
        ]
        until = min(later, default=float("inf"))
        if NAMES[fault["kind"]].late:
            window = [text for time, text in told if begun <= time]
        else:
            window = [text for time, text in told if begun <= time < until]
        happened = [each for each in events if begun <= each["time"] < until]
        says = NAMES[fault["kind"]].says.replace("{step}", str(fault["step"]))
        _judge_one(finding, says, begun, window, happened, done)
    for finding in found:
        for problem in problems:
            finding.blame(problem)
    return found


def _judge_one(
    finding: Finding,
    says: str,
    begun: float,
    window: Sequence[str],
    events: Sequence[dict[str, Any]],
    done: Done,
) -> None:
    kind = NAMES[finding.kind]
    if finding.kind == "monitor-death":
        window = [json.dumps(each) for each in _monitored(done, begun)]
    if kind.expected is Expected.ENDS:
        window = done.text.strip().splitlines()[-1:]
    finding.detected = not says or any(re.search(says, text) for text in window)
    if not finding.detected:
        finding.blame(f"nothing said '{says}'")
    if not kind.changes:
        for event in events:
            if event["event"] == "mismatch":
                finding.blame(f"step {event['step']} came out otherwise when it was repeated")
    brought_back = [each for each in events if each["event"] == "recovered"]
    given_up = [each for each in events if each["event"] == "fault"]
    if kind.expected is Expected.RECOVERS:
        finding.recovered = bool(brought_back)
        if not brought_back:
            finding.blame("the run was not brought back")
    elif kind.expected is Expected.GOES_ON:
        finding.recovered = not given_up
        if given_up:
            finding.blame(f"a rank was given up: {_text(given_up[0])}")
    elif kind.expected is Expected.RESUMES:
        finding.recovered = done.code == 0
    else:
        finding.recovered = done.code not in (0, TIMED_OUT)
    if brought_back and kind.expected is not Expected.ENDS:
        event = brought_back[0]
        finding.seconds = event["time"] - begun
        if kind.expected is Expected.RECOVERS:
            finding.lost = event["step"] - 1 - event["restored"]
            if event["source"] == "memory" and finding.lost > EVERY * kind.snapshots:
                finding.blame(f"{finding.lost} steps were lost")


def _whole_run(done: Done, ends: bool, same: bool | None) -> list[str]:
    """What is wrong with a run, whichever fault it was."""
    found = [f"left behind: {orphan}" for orphan in done.orphans]
    if done.code == TIMED_OUT:
        found.append("the run did not end")
    elif ends is (done.code == 0):
        found.append(f"exit code {done.code}: {done.text.strip().splitlines()[-1:]}")
    if same is False:
        found.append("the weights are not those of the undisturbed run")
    if not ends:
        found += _saves(saves_of(done))
    return found


def _saves(folder: Path) -> list[str]:
    """Complete checkpoints that are not intact, but for those that a fault has spoiled."""
    storage = LocalStorage(folder)
    spoilt = folder.with_name(SPOILT)
    known = spoilt.read_text().split() if spoilt.exists() else []
    complete = [each.folder for each in catalog.checkpoints(storage) if each.complete]
    found = [] if complete else ["no checkpoint is complete"]
    for name in complete:
        try:
            catalog.verify(storage, name)
        except DamagedError as error:
            if name not in known:
                found.append(f"{name} is complete and damaged: {error}")
    return found


def _same(done: Done, whole: Done) -> bool:
    file = done.folder / "found.pt"
    return file.exists() and _equal(torch.load(file), torch.load(whole.folder / "found.pt"))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _monitored(done: Done, begun: float) -> list[dict[str, Any]]:
    """What a monitor has told that was started after the fault."""
    return [each for each in lines(done.folder, beside.EVENTS) if each["time_s"] > begun]


def _text(event: dict[str, Any]) -> str:
    if event["event"] != "fault":
        return json.dumps(event)
    who = "the group" if event["rank"] is None else f"rank {event['rank']}"
    return f"{who} {event['what']}, {event['doing']}"
