"""The runs in which faults are made: how they are started, started again, and cleared up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fault_kinds import beside, faulty_files
from benchmarks.fault_kinds.helper import TOKEN
from benchmarks.fault_kinds.kinds import NAMES, Expected, Kind
from benchmarks.fault_kinds.saved import flip
from msc.runtime.checkpoint.catalog import checkpoints
from msc.runtime.checkpoint.manifest import data_name
from msc.runtime.checkpoint.storage import open_storage

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")
EVERY = 2
"""Steps between snapshots."""
FIRST = 8
SPOILT = "spoilt"
"""The checkpoints that a fault has damaged, a line each; a file beside their folder."""
TIMED_OUT = 124
_LONGEST_S, _FAULT_S = 300.0, 60.0
_ENDING_S = 8.0  # for writers, which may finish


@dataclass(frozen=True)
class Run:
    """A kind of run: `machine` has namespaces of its own, `faulty` a file system of fsspec's."""

    mesh: str
    ranks: int
    standbys: int = 0
    guard: bool = False
    reader: bool = False
    machine: bool = False
    faulty: bool = False
    monitored: bool = False


RUNS = {
    "ranks": Run("dp=2,tp=2", 4, standbys=1, guard=True, reader=True, monitored=True),
    "pipeline": Run("pp=2", 2, faulty=True),
    "machine": Run("pp=2", 2, machine=True),
    "order": Run("pp=2", 2),
    "send": Run("pp=2", 2),
}


def plan(
    kinds: Sequence[Kind], ranks: int, chance: random.Random, room: int = 0
) -> list[dict[str, Any]]:
    """The faults of a run: which ranks, at which steps; `room` steps between, or each kind's."""
    faults: list[dict[str, Any]] = []
    step = FIRST
    for kind in kinds:
        before = faults[-1] if faults else None
        chosen = chance.sample(range(ranks), min(kind.ranks, ranks))
        if kind.own is not None:
            chosen = [kind.own]
        if kind.chained and before is not None and before["chain"]:
            chosen = before["ranks"]
        faults.append(
            {
                "kind": kind.name,
                "number": len(faults),
                "ranks": chosen,
                "step": -1 if kind.chained else step,
                "after": len(faults) - 1 if kind.chained else None,
                "chain": kind.chained,
                "always": kind.expected is Expected.ENDS,
            }
        )
        if not kind.chained:
            step += max(room, kind.room)
    return faults


def last_step(faults: Sequence[dict[str, Any]]) -> int:
    """To which step a run with these faults goes."""
    return max(int(fault["step"]) + NAMES[fault["kind"]].room for fault in faults)


@dataclass
class Done:
    """How a run came out: its folder, exit code, stderr, seconds, and processes left behind."""

    folder: Path
    code: int
    text: str
    seconds: float
    orphans: list[str]


def perform(
    run: Run,
    folder: Path,
    program: Path,
    faults: Sequence[dict[str, Any]],
    steps: int,
    device_s: float = 0.0,
) -> Done:
    """Start a run, again when its agent was killed, and wait for its end.

    folder: a new one, for all that the run leaves; program: a saved one; device_s: what each step
    takes longer, as if a device computed.
    """
    folder.mkdir(parents=True)
    (folder / "done").mkdir()
    disk = folder / "disk"
    disk.mkdir()
    log = folder / "log"
    log.mkdir()
    control = folder / "control"
    control.write_text("")
    saves = f"faulty://{disk}/saves" if run.faulty else str(disk / "saves")
    settings = {
        "folder": str(folder),
        "program": str(program),
        "saves": saves,
        "log_disk": str(log),
        "disk": str(control),
        "every": EVERY,
        "steps": steps,
        "guard": run.guard,
        "reader": run.reader,
        "pause_s": 0.02,
        "device_s": device_s,
        "faults": list(faults),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    faulty_files.install(folder / "site")
    token = uuid.uuid4().hex
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site"), *sys.path]),
        "OMP_NUM_THREADS": "1",
        TOKEN: token,
        faulty_files.CONTROL: str(control),
    }
    count = sum(len(fault["ranks"]) for fault in faults) + 4 * len(faults)
    options = {
        "nproc": run.ranks,
        "standbys": run.standbys,
        "replacements": count,
        "restarts": len(faults) + 1,
        "run": str(log / "run"),
    }
    script = [str(JOB), str(folder / "settings.json")]
    command = [sys.executable, "-c", _LAUNCH, json.dumps(options), *script]
    longest = _LONGEST_S + steps + _FAULT_S * len(faults)
    started, starts, orphans = time.monotonic(), 0, []
    around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if run.monitored:
        unseen = {name: value for name, value in environment.items() if name != TOKEN}
        around = beside.watched(folder, log / "run", unseen)
    with around:
        while True:
            starts += 1
            code = _start(run, folder, command, environment, longest)
            orphans += _clear_up(token)
            if not _agent_was_killed(folder, starts) or code == 0:
                break
            _spoil_newest(saves)
    text = (folder / "stderr").read_text()
    return Done(folder, code, text, time.monotonic() - started, orphans)


_LAUNCH = """
import json, sys
from msc.launch import launch
sys.exit(launch(sys.argv[2:], **json.loads(sys.argv[1])))
"""
"""What `msc run` does, without the rest of the command."""


def _start(
    run: Run, folder: Path, command: Sequence[str], environment: dict[str, str], longest_s: float
) -> int:
    if run.machine:
        command = ["unshare", "--map-root-user", "--mount", "--net", "sh", "-c", _MACHINE, *command]
        environment = {**environment, "FOLDER": str(folder)}
    with (folder / "stderr").open("a") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            return process.wait(longest_s)
        except subprocess.TimeoutExpired:
            process.kill()  # what it leaves is cleared up
            process.wait()
            return TIMED_OUT


_MACHINE = """
set -e
ip link set lo up
ip rule add pref 100 lookup local
ip rule del pref 0
echo "nameserver 127.0.0.1" > "$FOLDER/resolv.conf"  # which refuses at once
cp /etc/hosts "$FOLDER/hosts"
for name in resolv.conf hosts; do
    mount --bind "$FOLDER/$name" /etc/$name
done
mount -t tmpfs -o size=16m none "$FOLDER/disk"
mount -t tmpfs -o size=16m none "$FOLDER/log"
code=0
"$0" "$@" || code=$?
mkdir "$FOLDER/kept"
cp -r "$FOLDER/disk" "$FOLDER/log" "$FOLDER/kept"
exit $code
"""
"""A machine of the run's own; what it leaves is kept when its disks are gone."""


def possible() -> str:
    """Why there can be no namespaces here; "" if there can."""
    words = "ip link set lo up && ip rule add pref 100 lookup local && mount -t tmpfs none /mnt"
    command = ["unshare", "--map-root-user", "--mount", "--net", "sh", "-c", words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def log_of(done: Done) -> Path:
    """The run's folder: rings, ledgers, events."""
    kept = done.folder / "kept" / "log" / "run"
    return kept if kept.exists() else done.folder / "log" / "run"


def saves_of(done: Done) -> Path:
    """The folder with checkpoints."""
    kept = done.folder / "kept" / "disk" / "saves"
    return kept if kept.exists() else done.folder / "disk" / "saves"


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of JSON in a file; none if there is no file."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return []


def _agent_was_killed(folder: Path, times: int) -> bool:
    made = [each for each in lines(folder, "injected.jsonl") if each["kind"] == "agent-death"]
    return len(made) >= times


def _spoil_newest(url: str) -> None:
    """The next start must not take the newest checkpoint."""
    storage = open_storage(url.removeprefix("faulty://"))
    newest = next(each.folder for each in checkpoints(storage) if each.complete)
    folder = Path(str(storage))
    flip(folder / newest / data_name(0), random.Random(0))
    with folder.with_name(SPOILT).open("a") as known:
        known.write(newest + "\n")


def _clear_up(token: str) -> list[str]:
    """The commands of processes that are left; those that write may finish. None stays."""
    end = time.monotonic() + _ENDING_S
    while (left := _with_token(token)) and time.monotonic() < end:
        time.sleep(0.05)
    found = []
    for pid in left:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            os.kill(pid, signal.SIGKILL)
    return found


def _with_token(token: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{TOKEN}={token}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
