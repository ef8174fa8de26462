"""Faults that a rank makes in itself, or in what it has started; `job.py` calls them."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.fault_kinds import helper, zombie
from msc.runtime.checkpoint.marks import read_marks
from msc.runtime.process import ProcessExecutor
from msc.runtime.process_groups import ProcessGroups
from msc.runtime.recovery import sockets
from msc.runtime.recovery.link import current
from msc.runtime.transport import Pending

if TYPE_CHECKING:
    from benchmarks.fault_kinds.job import Faults

_STEP_S = 0.05  # about that of a step


def kill(number: int = signal.SIGKILL) -> None:
    """End this process by a signal."""
    os.kill(os.getpid(), number)
    time.sleep(1)


def kill_soon(faults: Faults, step: int) -> None:
    """Be killed at a random moment of the step."""
    wait = faults.chance.random() * _STEP_S
    threading.Timer(wait, kill).start()


def kill_at(where: str, due: Callable[[], bool]) -> None:
    """Be killed at a place of the start, if it is `due` then."""

    def before(owner: Any, name: str) -> None:
        action = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            setattr(owner, name, action)
            if due():
                kill()
            return action(*args, **options)

        setattr(owner, name, run)

    if where == "at-start" and due():
        kill()
    elif where == "in-connect":
        before(dist, "init_process_group")
    elif where == "in-groups":
        before(ProcessGroups, "__init__")
    elif where == "at-first":
        before(ProcessExecutor, "run")


def compute_longer(trainer: Any, seconds: float) -> None:
    """Let each step take longer, as if a device computed."""
    if seconds:
        run = trainer._run.executor.run

        def longer(inputs: Any) -> Any:
            time.sleep(seconds)
            return run(inputs)

        trainer._run.executor.run = longer


def _once(faults: Faults, action: Callable[[Any], Any]) -> None:
    """Do `action` in place of the next step of the program, or before it."""
    executor = faults.trainer._run.executor
    run = executor.run

    def instead(inputs: Any) -> Any:
        executor.run = run
        result = action(inputs)
        return run(inputs) if result is None else result

    executor.run = instead


def _exception(faults: Faults, step: int) -> None:
    def fail(inputs: Any) -> NoReturn:
        raise ValueError("on purpose")

    _once(faults, fail)


def _early_exit(faults: Faults, step: int) -> None:
    os._exit(0)


def _held_gil(faults: Faults, step: int) -> None:
    _once(faults, lambda inputs: ctypes.PyDLL(None).sleep(600))


def _live_lock(faults: Faults, step: int) -> None:
    def spin(inputs: Any) -> None:
        while True:
            sum(range(1000))

    _once(faults, spin)


def _segfault(faults: Faults, step: int) -> None:
    _once(faults, lambda inputs: ctypes.string_at(8))


def _no_memory(faults: Faults, step: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    _once(faults, lambda inputs: torch.ones(1 << 28).zero_() and None)


def _memory_kill(faults: Faults, step: int) -> None:
    def grow(inputs: Any) -> None:
        held = [torch.ones(1 << 22) for _ in range(16)]
        kill()
        held.clear()

    _once(faults, grow)


def _nan(faults: Faults, step: int) -> None:
    def spoil(inputs: Any) -> None:
        _norm_weight(faults).view(-1)[0] = float("nan")

    _once(faults, spoil)


def _flipped_replica(faults: Faults, step: int) -> None:
    _norm_weight(faults).view(torch.int32)[0] ^= 1 << 21


def _norm_weight(faults: Faults) -> torch.Tensor:
    """What all ranks have a copy of, and every step reads."""
    parameters = faults.trainer._run.state.parameters
    found: torch.Tensor = next(value for name, value in parameters.items() if "norm" in name)
    return found


def _flipped_snapshot(faults: Faults, step: int) -> None:
    """When all ranks have the copy of a step for sure."""
    other = (faults.rank + 1) % faults.trainer.program.mesh.size
    pid = int((faults.folder / f"pid.{other}").read_text())

    def flip() -> None:
        arena = faults.trainer._run.checkpoints._arena
        marks = read_marks(arena.handle, arena.marks_start)
        newest = max(range(len(marks)), key=lambda slot: getattr(marks[slot], "step", -1))
        image = arena.slots[newest]
        image[faults.chance.randrange(len(image))] ^= 1 << faults.chance.randrange(8)
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)

    every = faults.settings["every"]
    faults.later(step + every - step % every + 1, flip)


def _reader_death(faults: Faults, step: int) -> None:
    faults.data.reader.process.kill()


def _reader_stall(faults: Faults, step: int) -> None:
    stop_for(faults.data.reader.process.pid, 4.0)


def stop_for(pid: int, seconds: float) -> None:
    """Stop a process, which is continued even if this one is gone then."""
    os.kill(pid, signal.SIGSTOP)
    helper.start("continue", pid, seconds)


def _writer(faults: Faults) -> int:
    return int(faults.trainer._run.checkpoints.writer.pid)


def _writer_death(faults: Faults, step: int) -> None:
    """It is stopped before a save is handed over, and killed with it in hand."""
    pid = _writer(faults)
    os.kill(pid, signal.SIGSTOP)
    faults.later(step + faults.settings["every"] + 1, lambda: os.kill(pid, signal.SIGKILL))


def _zombie_writer(faults: Faults, step: int) -> None:
    pid = _writer(faults)
    stop_for(pid, 3.0)
    faults.later(step + faults.settings["every"] + 1, kill)


def _zombie_rank(faults: Faults, step: int) -> None:
    zombie.leave(faults, step)
    kill_soon(faults, step)


def _standby_death(faults: Faults, step: int) -> None:
    """The last that has said that it is warm."""
    link = current()
    assert link is not None
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        lines = (link.folder / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        warm = [each["pid"] for each in events if each["event"] == "standby is warm"]
        ranks = {int(path.read_text()) for path in faults.folder.glob("pid.*")}
        for pid in reversed(warm):
            if pid not in ranks and Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.05)


def _agent_freeze(faults: Faults, step: int) -> None:
    stop_for(os.getppid(), 4.0)


def _agent_death(faults: Faults, step: int) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1)


def _reset(faults: Faults, step: int) -> None:
    sockets.shut()


def _wrong_order(faults: Faults, step: int) -> None:
    """In every step from here on the first collective is made twice."""
    rank = faults.trainer._run.executor._rt
    start = type(rank).all_reduce

    def twice(value: Any, *rest: Any) -> Any:
        start(rank, value, *rest).wait()
        return start(rank, value, *rest)

    rank.all_reduce = twice


def _no_send(faults: Faults, step: int) -> None:
    rank = faults.trainer._run.executor._rt
    send = rank.send

    def nothing(values: Any, *rest: Any) -> Any:
        rank.send = send
        return Pending((), None)

    rank.send = nothing


ACTIONS: dict[str, Callable[[Faults, int], None]] = {
    "kill": kill_soon,
    "kill-rank-0": kill_soon,
    "kill-two": lambda faults, step: kill(),
    "kill-all": lambda faults, step: kill(),
    "freeze": lambda faults, step: kill(signal.SIGSTOP),
    "exception": _exception,
    "early-exit": _early_exit,
    "held-gil": _held_gil,
    "live-lock": _live_lock,
    "segfault": _segfault,
    "abort": lambda faults, step: os.abort(),
    "no-memory": _no_memory,
    "memory-kill": _memory_kill,
    "nan": _nan,
    "flipped-replica": _flipped_replica,
    "flipped-snapshot": _flipped_snapshot,
    "reader-death": _reader_death,
    "reader-stall": _reader_stall,
    "writer-death": _writer_death,
    "zombie-rank": _zombie_rank,
    "zombie-writer": _zombie_writer,
    "standby-death": _standby_death,
    "agent-freeze": _agent_freeze,
    "agent-death": _agent_death,
    "connections-reset": _reset,
    "wrong-order": _wrong_order,
    "no-send": _no_send,
}
