"""A rank's side of the agent: it says what it does, and hears when its group is over."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from msc.runtime.checkpoint.marks import Mark
from msc.runtime.recovery import sockets
from msc.runtime.recovery.channel import Channel
from msc.runtime.recovery.journal import Journal

_AGAIN_S = 0.02


@dataclass(frozen=True)
class MemorySource:
    """A snapshot that there is of all ranks in host memory.

    text: how it is told where that is; here: for ranks whose snapshot is on this host, the open
    file and the slot in it; elsewhere: for the others, the address of an agent that has it; token:
    by which that answers.
    """

    mark: Mark
    text: str
    here: Mapping[int, tuple[int, int]]
    elsewhere: Mapping[int, tuple[str, int]]
    token: str

    @property
    def step(self) -> int:
        """Whose state it is."""
        return self.mark.step

    def close(self) -> None:
        """Close the files."""
        for handle, _ in self.here.values():
            os.close(handle)


@dataclass(frozen=True)
class Generation:
    """One forming of a job's group.

    host, port: of the store, which no other generation uses; source: where the state comes from,
    None if from storage; last: the step up to which ranks train that are inside of `fit`, None if
    none is; reached: the last step that was ever taken; may_grow: whether these are fewer ranks
    than the run was started for; keeps_journal: whether this rank writes the journal of its host.
    """

    number: int
    host: str
    port: int
    source: MemorySource | None
    last: int | None
    reached: int
    may_grow: bool = False
    keeps_journal: bool = True


class Link:
    """This rank's connection with the agent.

    folder: of the run; journal: of its losses; grows: whether the agent has asked that the ranks
    stop at a saved step, since more of them can go on. `tell` may be called by any thread.
    """

    def __init__(self, channel: Channel, folder: Path, journal: Journal) -> None:
        self.folder = folder
        self.journal = journal
        self.grows = threading.Event()
        self._channel = channel
        self._joins: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        self._out = threading.Event()
        self._out.set()
        self._wake: Callable[[], None] = sockets.shut
        threading.Thread(target=self._listen, name="msc-agent", daemon=True).start()

    def tell(self, event: str, files: Sequence[int] = (), **facts: Any) -> None:
        """Send the agent a message."""
        self._channel.send(event, files, **facts)

    def meet(self, **facts: Any) -> Generation:
        """Wait until all ranks of the job are here; the generation that they form.

        Whatever this rank had of an earlier generation must be given up before.
        """
        self._out.set()
        self.grows.clear()
        self.tell("ready", **facts)
        generation = self._joins.get()
        self._out.clear()
        return generation

    def on_leave(self, wake: Callable[[], None]) -> None:
        """Call `wake` in another thread, again and again, when this rank is to leave its group."""
        self._wake = wake

    def surrender(self, event: str, **facts: Any) -> NoReturn:
        """Tell the agent that this process cannot go on, and wait to be ended by it."""
        self.tell(event, **facts)
        while True:
            time.sleep(1)

    def _listen(self) -> None:
        while (received := self._channel.receive()) is not None:
            message, files = received
            event = message.pop("event")
            if event == "join":
                self._joins.put(_generation(message, files))
                continue
            if event == "grow":
                self.grows.set()
                continue
            while not self._out.is_set():  # connections are opened while it waits to be heard
                self._wake()
                self._out.wait(_AGAIN_S)
        os._exit(1)  # the agent is gone, and nobody would hear of this rank


def send_join(
    channel: Channel,
    facts: Mapping[str, Any],
    here: Mapping[int, tuple[int, int]],
    elsewhere: Sequence[Sequence[Any]],
) -> None:
    """Tell a rank to join a generation: the other end of `Link.meet`.

    Where snapshots are may be too much for a message, so that goes in a file.
    """
    files = [handle for handle, _ in here.values()]
    slots = [(rank, slot) for rank, (_, slot) in here.items()]
    directory = os.memfd_create("msc-directory")
    try:
        os.pwrite(directory, json.dumps([slots, elsewhere]).encode(), 0)
        channel.send("join", [directory, *files], **facts)
    finally:
        os.close(directory)


def _generation(message: dict[str, Any], files: list[int]) -> Generation:
    directory, *handles = files
    slots, elsewhere = json.loads(os.pread(directory, os.fstat(directory).st_size, 0))
    os.close(directory)
    found = message.pop("source")
    source = None
    if found is not None:
        here = {rank: (handle, slot) for (rank, slot), handle in zip(slots, handles, strict=True)}
        away = {rank: (host, port) for rank, host, port in elsewhere}
        source = MemorySource(Mark(*found["mark"]), found["text"], here, away, found["token"])
    return Generation(source=source, **message)


_link: Link | None = None


def install(link: Link) -> None:
    """Make `link` that of this process."""
    global _link
    _link = link


def current() -> Link | None:
    """This process's link; None if it was not started by an agent that brings runs back."""
    return _link
