"""Runs on several nodes go on when a node is lost, or the controller, and end as undisturbed."""

from __future__ import annotations

import os
import signal
import socket
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


class Nodes:
    """The agents of a run on two nodes with a rank each."""

    def __init__(self, folder: Path, result: str, faults: str, *options: str) -> None:
        self.folder = folder
        self.agents: list[subprocess.Popen[str]] = []
        self._result = result
        self._words = [str(JOB), str(folder), MESH, "12", result, faults]
        with socket.create_server(("127.0.0.1", 0)) as found:
            address = f"127.0.0.1:{found.getsockname()[1]}"
        self._options = ["--nnodes", "2", "--nproc", "1", "--rdzv", address, *options]
        self._options += ["--run", str(folder / f"{result}.run")]

    def start(self, rank: int) -> None:
        """Start a node."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        command = [sys.executable, "-m", "msc", "run", "--node-rank", str(rank), *self._options]
        command += self._words
        self.agents.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name so far."""
        folder = self.folder / f"{self._result}.run"
        found = read_events(folder) if (folder / "events.jsonl").exists() else []
        return [each for each in found if each["event"] == name]

    def wait(self, there: Callable[[], Any]) -> Any:
        """Wait until something is there, as long as the first node runs."""
        while not (found := there()):
            assert self.agents[0].poll() is None, self.agents[0].communicate()[1]
            time.sleep(0.05)
        return found

    def end(self) -> list[tuple[int, str]]:
        """The exit codes of the agents, and what they have said; the run ended as undisturbed."""
        told = [(agent.communicate()[1], agent.returncode) for agent in self.agents]
        found, whole = (torch.load(self.folder / name) for name in (self._result, "plain"))
        assert equal(found, whole)
        assert not self.events("mismatch")
        for name in self.folder.glob("done.*"):
            name.unlink()
        return [(code, text) for text, code in told]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the program, and what an undisturbed run on one node finds in "plain"."""
    made = tmp_path_factory.mktemp("nodes")
    program(MESH, precision="float64").save(made / MESH)
    command = [sys.executable, "-m", "msc", "run", "--nproc", "2", str(JOB)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([*command, str(made), MESH, "12", "plain", ""], env=environment, check=True)
    return made


def test_a_frozen_nodes_ranks_move_to_a_spare_and_it_wakes_up_as_one(folder: Path) -> None:
    faults = "0@fit@wait,1@3@SIGKILL,1@7@copied 6,1@7@node SIGSTOP,0@9@until woken"
    nodes = Nodes(folder, "frozen", faults, "--spares", "1")
    for rank in range(3):
        nodes.start(rank)
    nodes.wait(lambda: len(nodes.events("recovered")) == 2)
    frozen = nodes.agents[1].pid
    ranks = children(frozen)
    for pid in [*ranks, frozen]:
        os.kill(pid, signal.SIGCONT)
    nodes.wait(lambda: nodes.events("node joined"))
    nodes.wait(lambda: not any(runs(pid) for pid in ranks))
    (folder / "woken").touch()
    told = nodes.end()
    assert [code for code, _ in told] == [0, 0, 0]
    killed, moved = nodes.events("recovered")
    assert (killed["replaced"], killed["source"]) == ([1], "memory")
    assert (moved["replaced"], moved["source"]) == ([1], "a neighbour's copy")
    assert moved["standbys"] == 1
    assert "with rank 1 is gone (its agent has been silent for" in told[0][1]
    assert "this node was given up by its run: its ranks are killed" in told[1][1]


def test_a_node_comes_back_to_a_controller_that_was_started_anew(folder: Path) -> None:
    nodes = Nodes(folder, "back", "0@3@until learned,1@7@copied 6,1@7@node SIGKILL")
    for rank in range(2):
        nodes.start(rank)
    nodes.wait((folder / "done.0@3@until learned").exists)
    (controller,) = (
        pid
        for pid in children(nodes.agents[0].pid)
        if b"controller_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(controller, signal.SIGKILL)
    nodes.wait(lambda: nodes.events("state re-learned"))
    (folder / "learned").touch()
    nodes.wait(lambda: nodes.events("fault"))
    nodes.start(1)
    told = nodes.end()
    assert [code for code, _ in told] == [0, -signal.SIGKILL, 0]
    (moved,) = nodes.events("recovered")
    assert (moved["replaced"], moved["source"]) == ([1], "a neighbour's copy")
    assert "state re-learned from 2 of 2 nodes" in told[0][1]
    assert "no node waits that could be node 1; one is waited for" in told[0][1]
