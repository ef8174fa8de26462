"""The agent's side of one process that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msc.runtime.recovery.channel import Channel

_MODULE = "msc.runtime.recovery.worker"


class Worker:
    """A process, a rank or a standby, in a session of its own.

    Must be made by the agent's main thread: the kernel kills it when the thread that has started it
    ends.
    """

    def __init__(self) -> None:
        ours, theirs = Channel.pair()
        self.channel = ours
        handle = theirs.fileno()
        command = [sys.executable, "-u", "-m", _MODULE, str(handle), str(os.getpid())]
        self._process = subprocess.Popen(command, pass_fds=[handle], start_new_session=True)
        theirs.close()
        self.warm = False

    def stand_by(self, modules: Sequence[str]) -> None:
        """Import modules, and wait to be started."""
        self.channel.send("stand by", modules=list(modules))

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        journal: int | None,
    ) -> None:
        """Run a script as a rank; with `journal`, as one that takes part in bringing runs back."""
        self.channel.send(
            "start",
            [] if journal is None else [journal],
            arguments=list(arguments),
            environment=dict(environment),
            folder=str(folder),
            recovers=journal is not None,
        )

    @property
    def pid(self) -> int:
        """Its number, which is also that of its session."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, as of `subprocess`; None while it runs."""
        return self._process.poll()

    def stopped(self) -> bool:
        """Whether it was stopped by a signal."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill it, stopped or not, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def children(self) -> bool:
        """Whether it is gone and processes that it has started are not."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def end_children(self, number: signal.Signals) -> None:
        """Send a signal to all that it has started and that is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
