"""How long a run stands still when a rank is lost: from the fault to the first new step.

    python benchmarks/recovery.py                      # 4 ranks; results/recovery.json
    python benchmarks/recovery.py --ranks 8 --times 3 --json out/recovery8.json

Each row is one run of `msc.launch` on mesh dp=RANKS/2,tp=2 in which a rank after the other is lost:

    standby   killed by SIGKILL; a process with MSC imported takes the rank
    fresh     killed by SIGKILL; a new process takes it, which has Python, torch and MSC to import
    frozen    stopped by SIGSTOP; it must be found first, then as "standby"
    node      one of two nodes is killed, agent and ranks; a third one, which waits, takes its ranks

The clock starts when the rank is about to send itself the signal, and ends when the agent hears of
the first step that was never taken before; all processes share one clock. The parts are those of
the agent. "lost" are steps that were taken twice; the state is copied into memory every 2 steps.
Before a node is killed its ranks wait until another node has copies of their last snapshots, since
steps are shorter here than copies take. All nodes are on this host, so nothing crosses a network.
Every run must end with the losses and weights of an undisturbed one, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/recovery.py`

import torch  # noqa: E402

import msc  # noqa: E402
from msc.launch import launch, under_torchrun  # noqa: E402
from msc.runtime.recovery.events import read_events  # noqa: E402

BETWEEN = 16  # steps from one fault to the next
MODES = ("standby", "fresh", "frozen", "node")
EVERY = 2  # steps between snapshots
VOCABULARY, SAMPLES, LENGTH = 128, 16, 16


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Data:
    """Rows of each step; a rank that asks for those of its step is lost there, once."""

    def __init__(self, folder: Path, rank: int, mode: str, ranks: int, times: int) -> None:
        self.folder, self.rank, self.mode = folder, rank, mode
        self.faults = {
            BETWEEN * (n + 1) + 1: (n, ranks - 1 if mode == "node" else (ranks - 1 + n) % ranks)
            for n in range(times)
        }
        self.per_spare = ranks // 2 if mode == "node" else 1

    def rows(self, step: int, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Rows of a step."""
        if self.mode != "plain" and step in self.faults:
            number, rank = self.faults[step]
            done = self.folder / f"fault{number}"
            if rank == self.rank and not done.exists():
                self._wait_for_standby(number)
                done.write_text(str(time.time()))
                who = os.getppid() if self.mode == "node" else os.getpid()
                os.kill(who, signal.SIGSTOP if self.mode == "frozen" else signal.SIGKILL)
                time.sleep(1)  # its agent takes it along
        return tuple(tensor[list(indices)] for tensor in tokens(step))

    def _wait_for_standby(self, number: int) -> None:
        count = self.per_spare * (number + 1)
        while self.mode != "fresh" and len(self._events("standby is warm")) < count:
            time.sleep(0.05)
        last = BETWEEN * (number + 1)
        while self.mode == "node" and all(e["step"] < last for e in self._events("copied")):
            time.sleep(0.05)

    def _events(self, name: str) -> list[dict[str, Any]]:
        return [each for each in read_events(self.folder / "run") if each["event"] == name]

    def state_dict(self) -> dict[str, Any]:
        """It has none."""
        return {}


def train(folder: Path, mode: str, ranks: int, times: int) -> None:
    """One rank's run."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    program = msc.load(folder.parent / "program", rank)
    saves = msc.Checkpoint(folder / "saves", every=EVERY)
    data = Data(folder, rank, mode, ranks, times)
    with msc.Trainer(program, data, checkpoint=saves, log=False) as trainer:
        trainer.fit(BETWEEN * (times + 1) - trainer.step)
        found = {"losses": trainer.losses, "parameters": trainer.state_dict()}
    if rank == 0:
        torch.save(found, folder / "found.pt")


def measure(folder: Path, mode: str, ranks: int, times: int) -> dict[str, Any]:
    """The run of a mode: seconds of each recovery, and of its parts."""
    (folder / mode).mkdir()
    words = [__file__, str(folder / mode), mode, str(ranks), str(times)]
    standbys = 0 if mode in ("plain", "fresh") else 1
    run = folder / mode / "run"
    if mode == "node":
        code = run_nodes(words, ranks, times, run)
    else:
        code = launch(words, ranks, standbys=standbys, replacements=times, restarts=0, run=run)
    if code:
        raise SystemExit(f"the run '{mode}' failed with exit code {code}")
    found = []
    recovered = [each for each in read_events(run) if each["event"] == "recovered"]
    for number, event in enumerate(recovered):
        seconds = event["time"] - float((folder / mode / f"fault{number}").read_text())
        lost = event["step"] - 1 - event["restored"]
        found.append({"seconds": seconds, "parts": event["parts"], "lost": lost})
    return {"mode": mode, "recoveries": found}


def run_nodes(words: Sequence[str], ranks: int, times: int, run: Path) -> int:
    """Run on two nodes, with a third that waits; for each that is killed another one comes."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    command = [sys.executable, "-m", "msc", "run", "--nnodes", "2", "--nproc", str(ranks // 2)]
    command += ["--spares", "1", "--rdzv", address, "--run", str(run), "--restarts", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(*options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *options, *words], env=environment)

    first, *others = (start("--node-rank", str(rank)) for rank in range(3))
    started = 3
    while first.poll() is None:
        time.sleep(0.1)
        if any(each.poll() is not None for each in others) and started < times + 2:
            others = [each for each in others if each.poll() is None] + [start()]
            started += 1
    for each in others:
        each.wait()
    return first.returncode


def same(folder: Path, mode: str) -> bool:
    """Whether a run has come to what the undisturbed one has, bit for bit."""
    whole, found = (torch.load(folder / name / "found.pt") for name in ("plain", mode))
    parameters = whole["parameters"].items()
    return whole["losses"] == found["losses"] and all(
        torch.equal(value, found["parameters"][name]) for name, value in parameters
    )


def main() -> int:
    """Run all modes and print a table."""
    if under_torchrun():
        words = sys.argv[1:]
        train(Path(words[0]), words[1], int(words[2]), int(words[3]))
        return 0
    from benchmarks.hardware import hardware
    from benchmarks.models import GPTConfig, GPTWithLoss

    parser = argparse.ArgumentParser(description="Time from losing a rank to the first new step.")
    parser.add_argument("--ranks", type=int, default=4, help="an even number")
    parser.add_argument("--times", type=int, default=5, help="recoveries of each kind")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="which rows")
    default = ROOT / "benchmarks" / "results" / "recovery.json"
    parser.add_argument("--json", type=Path, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = GPTConfig(4, 64, 4, LENGTH, VOCABULARY)
    mesh = f"dp={args.ranks // 2},tp=2"
    program = msc.compile(GPTWithLoss(config), tokens(0), mesh=mesh, optimizer=msc.AdamW(lr=1e-3))
    rows = []
    with tempfile.TemporaryDirectory(prefix="msc-recovery-") as made:
        folder = Path(made)
        program.save(folder / "program")
        measure(folder, "plain", args.ranks, args.times)
        for mode in args.modes:
            row = measure(folder, mode, args.ranks, args.times)
            rows.append(row | {"bit_identical": same(folder, mode), "load": os.getloadavg()[0]})
    report(rows)
    facts = {"hardware": hardware(), "ranks": args.ranks, "mesh": mesh, "rows": rows}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if all(row["bit_identical"] for row in rows) else 1


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians."""
    parts = list(rows[0]["recoveries"][0]["parts"])
    print("mode      median    worst  lost  " + "".join(f"{part:>10}" for part in parts))
    for row in rows:
        found = row["recoveries"]
        seconds = [each["seconds"] for each in found]
        cells = "".join(
            f"{statistics.median(each['parts'][part] for each in found):10.2f}" for part in parts
        )
        lost = max(each["lost"] for each in found)
        middle = statistics.median(seconds)
        same_bits = "" if row["bit_identical"] else "   NOT THE SAME WEIGHTS"
        print(f"{row['mode']:9} {middle:6.2f}s {max(seconds):7.2f}s {lost:5}  {cells}{same_bits}")


if __name__ == "__main__":
    sys.exit(main())
