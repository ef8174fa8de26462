"""The agent with scripts that know nothing of MSC: how they end, and what stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from msc.ir.errors import InputError
from msc.launch import launch

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parents[2]

SLEEPS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(f"{sys.argv[1]}/pids", "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""

PLAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        sys.exit(7)
    dist.all_reduce(value)
threads = os.environ["OMP_NUM_THREADS"]
print(f"sum {value.item()} argument {sys.argv[1]} threads {threads}\\n", end="")
dist.destroy_process_group()
"""


def command(folder: Path, script: str, *options: str) -> list[str]:
    (folder / "script.py").write_text(script)
    words = [sys.executable, "-m", "msc", "run", "--nproc", "2", *options]
    return [*words, str(folder / "script.py"), str(folder)]


def environment() -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    found.pop("OMP_NUM_THREADS", None)
    return found


@pytest.fixture
def sleeping(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A run of two ranks, each with a child, and their processes."""
    agent = subprocess.Popen(command(tmp_path, SLEEPS), env=environment())
    pids = tmp_path / "pids"
    wait_until(
        lambda: agent.poll() is not None or (pids.exists() and len(pids.read_text().split()) == 4)
    )
    assert agent.returncode is None, "the run has ended by itself"
    return agent, [int(word) for word in pids.read_text().split()]


def wait_until(there: Callable[[], bool]) -> None:
    while not there():
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_an_agent_that_is_asked_to_stop_leaves_nothing(
    sleeping: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    agent, pids = sleeping
    agent.send_signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert not [pid for pid in pids if runs(pid)]


def test_ranks_end_with_an_agent_that_is_killed(
    sleeping: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    agent, pids = sleeping
    agent.kill()
    agent.wait()
    wait_until(lambda: not any(runs(pid) for pid in pids[::2]))
    for pid in pids[1::2]:  # of these no rank is there to answer for
        os.kill(pid, signal.SIGKILL)


def test_a_script_of_torch_alone_is_started_anew_and_meets_in_a_new_store(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, PLAIN), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sum 2.0 argument {tmp_path} threads 1") == 2
    assert "all ranks are started anew" in done.stderr


def test_without_a_budget_the_first_failure_is_the_end(tmp_path: Path) -> None:
    none = ("--replacements", "0", "--restarts", "0")
    words = command(tmp_path, "import os, sys; sys.exit(int(os.environ['RANK']) * 3)", *none)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == 3
    assert "Rank 1 failed with exit code 3; the other ranks were stopped." in done.stderr


def test_input_that_cannot_be_used_ends_a_run_at_once(tmp_path: Path) -> None:
    script = "from msc.ir.errors import PlanError\nraise PlanError('3 do not split over 2')\n"
    done = subprocess.run(
        command(tmp_path, script, "--restarts", "3"),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "raised PlanError: 3 do not split over 2; the run ends, since it would" in done.stderr
    assert "started anew" not in done.stderr


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"There is no script nowhere\.py"):
        launch(["nowhere.py"], 2)
    with pytest.raises(InputError, match="1 standbys without replacements"):
        launch([__file__], 2, standbys=1)


def test_nodes_need_an_address_and_numbers_that_there_are() -> None:
    with pytest.raises(InputError, match="--rdzv HOST:PORT"):
        launch([__file__], 2, nnodes=2)
    with pytest.raises(InputError, match="node_rank is 3; with 2 nodes and 1 spares it is 0 to 2"):
        launch([__file__], 2, nnodes=2, spares=1, node_rank=3, rdzv="127.0.0.1:1")
    with pytest.raises(InputError, match=r"Node 0 cannot listen at 192\.0\.2\.1:1"):
        launch([__file__], 2, nnodes=2, node_rank=0, rdzv="192.0.2.1:1")
