"""What goes on beside a rank while it is dead or stopped: `python -S helper.py WHAT ARGS..`.

continue PID SECONDS              continue a stopped process after a while
cut PID PID BOTH NEW ON OFF TIMES  lose all packets from the first process to the second (and
                                  back), if NEW also of connections that they make meanwhile;
                                  ON and OFF seconds in turn. Needs a network namespace of the
                                  run.
fill FOLDER SECONDS               keep the disk of a folder full
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TOKEN = "MSC_FAULTS"
"""In the environment of all processes of a run, by which those that are left are found."""
BALLAST = "ballast"
Ends = tuple[int, int]
"""The ports of a connection: of the one process, and of the other."""


def start(*words: object) -> None:
    """Start a helper that outlives this process, and is none of the run's."""
    command = [sys.executable, "-S", __file__, *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    subprocess.Popen(command, env=environment, start_new_session=True)


def connections(one: int, other: int) -> set[Ends]:
    """The TCP connections between two processes of this network namespace."""
    ours, theirs = _inodes(one), _inodes(other)
    ports: dict[int, Ends] = {}  # of each socket
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        near, far = (int(word.partition(":")[2], 16) for word in words[1:3])
        ports[int(words[9])] = near, far
    back = {ends for inode, ends in ports.items() if inode in theirs}
    return {ends for inode, ends in ports.items() if inode in ours and ends[::-1] in back}


def _inodes(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(int(target[len("socket:[") : -1]))
    return found


def cut(one: int, other: int, both: bool, new: bool, on_s: float, off_s: float, times: int) -> None:
    """Lose the packets between two processes."""
    for _ in range(times):
        known: set[Ends] = set()
        end = time.monotonic() + on_s
        while time.monotonic() < end:
            for ends in connections(one, other) - known if new or not known else ():
                known.add(ends)
                _rules("add", ends, both)
            time.sleep(0.02)
        for ends in known:
            _rules("del", ends, both)
        time.sleep(off_s)


def _rules(what: str, ends: Ends, both: bool) -> None:
    """A rule of routing that drops what is sent, so that nobody is told."""
    for source, target in (ends, ends[::-1])[: 1 + both]:
        words = f"ip rule {what} pref 10 ipproto tcp sport {source} dport {target} blackhole"
        subprocess.run(words.split(), check=True)


def fill(folder: Path) -> None:
    """Write until the disk is full."""
    with (folder / BALLAST).open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def main(words: list[str]) -> None:
    """Do what is asked."""
    what, *rest = words
    if what == "continue":
        time.sleep(float(rest[1]))
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(rest[0]), signal.SIGCONT)
    elif what == "cut":
        one, other, both, new, on_s, off_s, times = map(float, rest)
        cut(int(one), int(other), bool(both), bool(new), on_s, off_s, int(times))
    elif what == "fill":
        end = time.monotonic() + float(rest[1])
        while time.monotonic() < end:
            fill(Path(rest[0]))
            time.sleep(0.01)
        (Path(rest[0]) / BALLAST).unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
