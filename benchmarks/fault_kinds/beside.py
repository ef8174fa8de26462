"""`msc beat` and `msc monitor` beside a run; a monitor that was killed is started again."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

MONITOR = "monitor.pid"
EVENTS = "monitor.jsonl"
_CODE = "import sys, typer, msc.monitor; typer.run(getattr(msc.monitor, sys.argv.pop(1)))"


@contextlib.contextmanager
def watched(folder: Path, run: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Watch the run whose rings are in `run`; FOLDER/monitor.jsonl gets what the monitor tells."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    over = threading.Event()
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _CODE, *words, "--period", "0.2"]
        quiet = subprocess.DEVNULL
        running.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
        return running[-1]

    def keep() -> None:
        while not over.is_set():
            monitor = start("monitor", "--listen", place, "--events", str(folder / EVENTS))
            (folder / MONITOR).write_text(str(monitor.pid))
            monitor.wait()

    run.mkdir(parents=True, exist_ok=True)
    start("beat", str(run), "--to", place)
    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        while keeper.is_alive():
            for process in list(running):
                process.kill()
            keeper.join(0.05)
        for process in running:
            process.kill()
            process.wait()


def kill_monitor(folder: Path) -> None:
    """Kill the one that runs now."""
    os.kill(int((folder / MONITOR).read_text()), 9)
