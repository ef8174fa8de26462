"""The process that writes one rank's checkpoints: `python -m msc.runtime.checkpoint.writer FD`.

FD is the memory that it shares with the trainer, in which every slot is the image of a data file.
Requests come as lines of JSON on stdin, first the plan, then `{"attempt", "step", "slot", "state",
"files"}` for each save, and `{"attempt"}` alone where the ranks have met again; reports go as lines
of JSON to stdout. When stdin ends, what was asked for is finished first: a trainer that was killed
loses no step that it has handed over.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from msc.runtime.checkpoint.committing import Committer, Tell
from msc.runtime.checkpoint.manifest import (
    Part,
    chunk_digests,
    data_name,
    folder_name,
    part_name,
    part_to_bytes,
    tensors_from_data,
)
from msc.runtime.checkpoint.storage import LocalStorage, Storage, in_blocks, open_storage

PATIENCE_S = 600.0
ORPHAN_PATIENCE_S = 3.0  # for other ranks' parts to grow, once the trainer is gone
_POLL_S = 0.02
_REMOTE_POLL_S = 1.0


class PartWriter:
    """Writes one rank's data file and its record.

    image: a slot's bytes -> the data file, as it will be; tensors: what lies where in it.
    """

    def __init__(self, storage: Storage, rank: int, attempt: str, tensors: Any, size: int) -> None:
        self._storage = storage
        self._part = Part(
            rank=rank,
            step=0,
            attempt=attempt,
            file=data_name(rank),
            size=size,
            tensors=tensors,
        )

    def write(self, step: int, image: memoryview) -> None:
        """Write the part of `step`; it is durable when this returns.

        Raises `OSError`; what was written of the data file is removed then.
        """
        folder = folder_name(step, self._part.attempt)
        data = f"{folder}/{self._part.file}"
        digests: list[str] = []
        self._storage.make_folder(folder)
        try:
            blocks = in_blocks(image, lambda block: digests.extend(chunk_digests(block)))
            self._storage.write(data, blocks)
            part = replace(self._part, step=step, digests=tuple(digests))
            self._storage.put(f"{folder}/{part_name(part.rank)}", part_to_bytes(part))
        except OSError:
            self._storage.remove(data)  # so that a full disk has room for what is smaller
            raise


def _of_write(error: OSError, storage: Storage, size: int) -> str:
    """What went wrong, where, and what was to be written there; writes themselves name no file."""
    if error.filename is not None:
        return str(error)
    return f"{error}: {size:,} bytes were to be written below {storage}"


class _Reports:
    """Lines of JSON to the trainer; silent once it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, event: str, **facts: Any) -> None:
        with self._lock:
            try:
                sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
                sys.stdout.flush()
            except (BrokenPipeError, ValueError):
                sys.stdout = open(os.devnull, "w")


def serve(memory: int) -> None:
    """Answer requests until stdin ends and all is written."""
    tell = _Reports()
    first = sys.stdin.readline()
    if not first.endswith("\n"):
        return  # the trainer was gone before it had said what to write
    plan = json.loads(first)
    storage = open_storage(plan["url"])
    size = plan["size"]
    arena = memoryview(mmap.mmap(memory, plan["slots"] * plan["stride"]))
    tensors = tensors_from_data(plan["tensors"])
    parts = PartWriter(storage, plan["rank"], plan["attempt"], tensors, size)
    commits = _Commits(storage, plan, tell) if plan["rank"] == 0 else None
    attempt = plan["attempt"]
    tell("ready")
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    ended = threading.Event()
    pause = _POLL_S if isinstance(storage, LocalStorage) else _REMOTE_POLL_S
    poller = None
    if commits is not None:
        poller = threading.Thread(target=_poll, args=(commits, ended, pause, tell), daemon=True)
        poller.start()
    while (line := requests.get()) is not None:
        request = json.loads(line)
        if request["attempt"] != attempt:
            attempt = request["attempt"]
            parts = PartWriter(storage, plan["rank"], attempt, tensors, size)
            if commits is not None:
                commits.begin(attempt)
        if "step" not in request:
            continue
        step, slot = request["step"], request["slot"]
        facts = {"step": step, "attempt": attempt, "slot": slot}
        started = time.monotonic()
        try:
            if slot is not None:  # else it was written by the process before this one
                start = slot * plan["stride"]
                parts.write(step, arena[start : start + size])
                tell("written", seconds=time.monotonic() - started, **facts)
            if commits is not None:
                commits.expect(step, request["state"], request["files"])
        except OSError as error:
            tell("failed", error=_of_write(error, storage, size), **facts)
    ended.set()
    if poller is not None:
        poller.join()


def _receive(requests: queue.SimpleQueue[str | None]) -> None:
    """Take requests at once, also while a file is being written: the trainer must not wait."""
    for line in sys.stdin:
        requests.put(line)
    requests.put(None)


class _Commits:
    """The committer of this attempt, and those of attempts of which steps still wait.

    Any thread may use it.
    """

    def __init__(self, storage: Storage, plan: Mapping[str, Any], tell: Tell) -> None:
        self._storage = storage
        self._plan = plan
        self._tell = tell
        self._lock = threading.Lock()
        self._all = [self._new(plan["attempt"], plan["verified"])]

    def _new(self, attempt: str, verified: Iterable[str]) -> Committer:
        return Committer(
            self._storage,
            self._plan["world"],
            attempt,
            {name: base64.b64decode(text) for name, text in self._plan["files"].items()},
            self._plan["keep"],
            verified,
            self._tell,
            PATIENCE_S,
        )

    def begin(self, attempt: str) -> None:
        """The ranks have met again: what follows is of another attempt."""
        with self._lock:
            for older in self._all:
                older.hurry(ORPHAN_PATIENCE_S)
            self._all.append(self._new(attempt, self._all[-1].verified))

    def expect(self, step: int, state: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """As `Committer.expect`, of this attempt."""
        with self._lock:
            self._all[-1].expect(step, state, texts)

    def poll(self) -> bool:
        """Commit what is complete; whether steps are still waiting."""
        with self._lock:
            waiting = [each.poll() for each in self._all]
            self._all = [
                each
                for each, waits in zip(self._all, waiting, strict=True)
                if waits or each is self._all[-1]
            ]
            return any(waiting)

    def progress(self) -> int:
        """Bytes that are there of the data of steps that wait."""
        with self._lock:
            return sum(each.progress() for each in self._all)


def _poll(commits: _Commits, ended: threading.Event, pause: float, tell: Tell) -> None:
    left, progress = ORPHAN_PATIENCE_S, -1
    while True:
        last = ended.is_set()
        try:
            waiting = commits.poll()
        except OSError as error:
            tell("warning", error=f"committing failed and is tried again: {error}")
            waiting = True
        if last:
            before, progress = progress, commits.progress()
            left = left - pause if progress == before else ORPHAN_PATIENCE_S
            if not waiting or left <= 0:
                return
        time.sleep(pause)


def main() -> None:
    """Run as a process; stops of the terminal are for the trainer, which ends this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, 5)  # behind the training loop where both want a core
    serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
