"""A copy of a rank's process that is not killed with it, and wakes up after the eviction."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from msc.runtime.checkpoint.committing import Committer
from msc.runtime.checkpoint.manifest import folder_name
from msc.runtime.checkpoint.storage import LocalStorage
from msc.runtime.checkpoint.writer import PartWriter
from msc.runtime.recovery.link import current

if TYPE_CHECKING:
    from benchmarks.fault_kinds.job import Faults

_LATER = 1000  # steps ahead: newer than all that the run has saved when it wakes up


def leave(faults: Faults, step: int) -> None:
    """Fork a process that has this rank's connections and memory, in a session of its own."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        os.setsid()
        end = time.monotonic() + 20.0
        while os.getppid() == parent and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(1.5)  # the others have met again
        done = [text for text in (_join(faults), _speak(), _commit(faults)) if text]
        faults.say(f"zombie of step {step}: {', '.join(done) or 'could do nothing'}")
    finally:
        os._exit(0)


def _join(faults: Faults) -> str:
    """Connect to the store of its generation."""
    generation = faults.trainer._run.job.generation
    try:
        socket.create_connection((generation.host, generation.port), 1.0).close()
    except OSError:
        return ""
    return "reached the store"


def _speak() -> str:
    """Tell the agent that it is ready."""
    link = current()
    assert link is not None
    return "spoke with the agent" if link._channel.send("ready", wait=False, trainer=1) else ""


def _commit(faults: Faults) -> str:
    """Write its part of a later step, and commit it."""
    checkpoints = faults.trainer._run.checkpoints
    attempt = checkpoints.writer._plan["attempt"]
    step = faults.trainer.step + _LATER
    storage = LocalStorage(faults.settings["saves"])
    image = memoryview(checkpoints._arena.slots[0].numpy())
    world = faults.trainer.program.mesh.size
    PartWriter(storage, faults.rank, attempt, (), len(image)).write(step, image)
    committer = Committer(storage, world, attempt, {}, None, (), lambda *_, **__: None, 0.2)
    committer.expect(step, {}, {})
    while committer.poll():
        time.sleep(0.05)
    committed = "commit.json" in storage.names(folder_name(step, attempt))
    storage.remove(folder_name(step, attempt))
    return "committed a checkpoint" if committed else ""
