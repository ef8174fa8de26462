"""Faults of the machine: its network, its names, its disks. `job.py` calls them.

Network and disks need namespaces of the run's own (`unshare`): there a rule of routing drops the
packets of a connection in one direction, as a cut does (nobody is told), and a tmpfs is full, or
read-only. EIO and stalls come from a file system of fsspec (`faulty_files.py`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fault_kinds import beside, helper
from msc.runtime.recovery import sockets

if TYPE_CHECKING:
    from benchmarks.fault_kinds.job import Faults

_CUT_S = 5.0
_DNS_S = 1  # for which the resolver waits for each answer


def _cut(
    both: bool, new: bool, on_s: float, off_s: float = 0.0, times: int = 1
) -> Callable[[Faults, int], None]:
    """By a process of its own, as this one may be replaced meanwhile."""

    def act(faults: Faults, step: int) -> None:
        other = (faults.rank + 1) % faults.trainer.program.mesh.size
        pid = (faults.folder / f"pid.{other}").read_text()
        helper.start("cut", os.getpid(), pid, int(both), int(new), on_s, off_s, times)
        time.sleep(0.3)  # it has begun

    return act


def _dns_stall(faults: Faults, step: int) -> None:
    """The resolver asks a server that takes every question and answers none."""
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 53))
    files = Path("/etc/resolv.conf"), Path("/etc/hosts")
    before = [path.read_text() for path in files]
    files[0].write_text(f"nameserver 127.0.0.1\noptions timeout:{_DNS_S} attempts:1\n")
    files[1].write_text("")

    def answer() -> None:
        for path, text in zip(files, before, strict=True):
            path.write_text(text)
        silent.close()

    faults.later(step + 2, answer)
    sockets.shut()


def _store_cut(faults: Faults, step: int) -> None:
    """Shut what is connected to the generation's store."""
    port = faults.trainer._run.job.generation.port
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:["):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    if found.getpeername()[1] == port:
                        found.shutdown(socket.SHUT_RDWR)


def _after_a_save(faults: Faults, step: int, action: Callable[[], object]) -> None:
    """When a save has failed, so that the next one is as it should be."""
    faults.later(step + faults.settings["every"] + 2, action)


def _saves_disk(faults: Faults) -> Path:
    return Path(faults.settings["saves"]).parent


def _disk_full(faults: Faults, step: int) -> None:
    disk = _saves_disk(faults)
    helper.fill(disk)
    _after_a_save(faults, step, (disk / helper.BALLAST).unlink)


def _read_only(faults: Faults, step: int) -> None:
    disk = str(_saves_disk(faults))

    def mount(how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", disk]
        while subprocess.run(command, check=False, capture_output=True).returncode:
            time.sleep(0.01)  # a file is open

    mount("ro")
    _after_a_save(faults, step, lambda: mount("rw"))


def _quota(faults: Faults, step: int) -> None:
    pid, none = faults.trainer._run.checkpoints.writer.pid, resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, none))
    _after_a_save(faults, step, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (none, none)))


def _log_full(faults: Faults, step: int) -> None:
    """The run must be brought back without a byte of room for its records."""
    helper.start("fill", faults.settings["log_disk"], 8.0)
    time.sleep(0.3)
    os.kill(os.getpid(), 9)


def _files(what: str, saves: int) -> Callable[[Faults, int], None]:
    """What the file system of `faulty_files.py` does, for so many saves."""

    def act(faults: Faults, step: int) -> None:
        control = Path(faults.settings["disk"])
        control.write_text(what)
        until = step + saves * faults.settings["every"] + 2
        faults.later(until, lambda: control.write_text(""))

    return act


ACTIONS: dict[str, Callable[[Faults, int], None]] = {
    "cut-both-ways": _cut(True, True, _CUT_S),
    "cut-one-way": _cut(False, False, 60.0),
    "slow-link": _cut(True, True, 0.3, 0.7, 3),
    "dns-stall": _dns_stall,
    "store-cut": _store_cut,
    "disk-full": _disk_full,
    "read-only": _read_only,
    "quota": _quota,
    "log-full": _log_full,
    "monitor-death": lambda faults, step: beside.kill_monitor(faults.folder),
    "disk-error": _files("EIO", 1),
    "disk-stall": _files("stall", 3),
}
