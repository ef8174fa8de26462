"""A run on several hosts, each with a network and names of its own, comes through their losses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from msc.runtime.recovery.events import read_events
from tests.checkpoint.runs import equal, program

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")
MESH = "dp=2"
_SPACE = ["unshare", "--map-root-user", "--net", "--mount"]


def possible() -> str:
    """Why there can be no such hosts here; "" if there can."""
    words = (
        "mount -t tmpfs none /mnt && ip link add switch type bridge && ip link set lo up && "
        "unshare --net --uts --mount --pid --mount-proc --fork sh -c 'hostname other'"
    )
    try:
        done = subprocess.run([*_SPACE, "sh", "-c", words], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


class Hosts:
    """A run on two hosts, and a third one that waits."""

    def __init__(self, folder: Path, faults: str) -> None:
        self._folder = folder
        script = [str(JOB), str(folder), MESH, "12", "found", faults]
        hosts = [sys.executable, str(Path(__file__).with_name("hosts.py")), str(folder), "found"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.process = subprocess.Popen([*_SPACE, *hosts, *script], env=environment)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name that the controller has told."""
        folder = self._folder / "found.run0"
        found = read_events(folder) if (folder / "events.jsonl").exists() else []
        return [each for each in found if each["event"] == name]

    def wait(self, there: Callable[[], Any]) -> None:
        """Wait until something is there, as long as the run goes on."""
        while not there():
            assert self.process.poll() is None, self.told()
            time.sleep(0.05)

    def are_at(self, *faults: str) -> None:
        """Wait until ranks do these."""
        for fault in faults:
            self.wait((self._folder / f"done.{fault}").exists)

    def suffer(self, *faults: str) -> None:
        """Something happens to hosts, one thing after another."""
        for fault in faults:
            (self._folder / fault).touch()
            self.wait(lambda: not list(self._folder.glob("*@[0-9]")))

    def told(self) -> str:
        """What the agents have printed, host by host."""
        return "\n".join(file.read_text() for file in sorted(self._folder.glob("found.[0-9]")))


@pytest.mark.skipif(bool(possible()), reason=f"no namespaces: {possible()}")
def test_hosts_are_cut_off_lose_power_and_come_back(tmp_path: Path) -> None:
    program(MESH, precision="float64").save(tmp_path / MESH)
    plain = [sys.executable, "-m", "msc", "run", "--nproc", "2", str(JOB), str(tmp_path), MESH]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([*plain, "12", "plain", ""], env=environment, check=True)
    faults = [
        *("0@3@copied 2", "0@3@until cut", "1@3@until never"),
        *("0@5@until joined", "0@7@copied 6", "0@7@until dead", "1@7@until never"),
        *("1@9@until booted",),
    ]
    hosts = Hosts(tmp_path, ",".join(faults))

    hosts.are_at("0@3@until cut", "1@3@until never")
    hosts.suffer("cut@1")
    (tmp_path / "cut").touch()
    hosts.wait(lambda: hosts.events("recovered"))
    hosts.suffer("plug@1")
    hosts.wait(lambda: hosts.events("node joined"))
    (tmp_path / "joined").touch()

    hosts.are_at("0@7@until dead", "1@7@until never")
    hosts.suffer("dies@2")
    (tmp_path / "dead").touch()
    hosts.wait(lambda: len(hosts.events("recovered")) == 2)

    hosts.are_at("1@9@until booted")
    hosts.suffer("dies@0", "boots@0", "boots@2")
    (tmp_path / "booted").touch()
    assert hosts.process.wait() == 0, hosts.told()
    found, whole = (torch.load(tmp_path / name) for name in ("found", "plain"))
    assert equal(found, whole)
    cut, dead, *_ = hosts.events("recovered")
    assert (cut["replaced"], cut["source"]) == ([1], "a neighbour's copy")
    assert (dead["replaced"], dead["source"]) == ([1], "a neighbour's copy")
    assert "node 1 (host1) with rank 1 is gone (its agent has been silent for" in hosts.told()
    assert "this node was given up by its run: its ranks are killed" in hosts.told()
    assert "state re-learned from" in hosts.told()
