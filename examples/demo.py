"""The demo: one model, trained on two meshes of four processes, against plain PyTorch.

    make demo

Trains the byte-level GPT of `train_gpt.py` with pp=2,tp=2 and with dp=2,tp=2, and the plain module
with torch.optim.AdamW in one process, on the same rows. Then it trains with dp=2,tp=2 again, and
kills a rank halfway: another process takes it. The exit code is 1 unless all losses agree, and that
run ends with the same weights as the one that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpt import GPT, Config
from stdlib_text import StdlibText

from msc.progress import TrainingProgress
from msc.runtime.diagnosis.ring import read_ring

MESHES = ("pp=2,tp=2", "dp=2,tp=2")
TOLERANCE = 1e-4  # of the loss, relative, at every step
LR = 3e-4
BATCH = 8
SEQUENCE = 128
SEED = 0
SCRIPT = Path(__file__).with_name("train_gpt.py")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a GPT on two meshes, and compare.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for all results")
    return parser.parse_args()


def train_on_mesh(mesh: str, steps: int, out: Path) -> list[float]:
    """Losses of a run on real processes, which `train_gpt.py` starts."""
    folder = folder_of(mesh, out)
    result = folder / "training.json"
    result.unlink(missing_ok=True)
    words = options(mesh, steps, folder)
    subprocess.run([sys.executable, str(SCRIPT), *words, "--dump", str(folder)], check=True)
    losses: list[float] = json.loads(result.read_text())["losses"]
    return losses


def folder_of(mesh: str, out: Path) -> Path:
    """Where the results of a mesh are."""
    return out / mesh.replace(",", "_").replace("=", "")


def options(mesh: str, steps: int, folder: Path) -> list[str]:
    """The command line of `train_gpt.py` for a run with its results in `folder`."""
    values = {
        "--mesh": mesh,
        "--steps": steps,
        "--batch": BATCH,
        "--sequence": SEQUENCE,
        "--lr": LR,
        "--seed": SEED,
        "--json": folder / "training.json",
        "--weights": folder / "weights.pt",
    }
    return [str(word) for option in values.items() for word in option]


def train_and_kill(mesh: str, steps: int, out: Path) -> bool:
    """Train once more, kill rank 2 halfway; whether the weights are those of the run before."""
    folder = out / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run = folder / "run"
    command = [sys.executable, "-m", "msc", "run", "--nproc", "4", "--standby", "1"]
    command += ["--run", str(run), str(SCRIPT), *options(mesh, steps, folder)]
    command += ["--checkpoint", str(folder / "saves"), "--every", "2"]
    job = subprocess.Popen(command)
    ring = run / "rank-00002.ring"
    while job.poll() is None:
        time.sleep(0.02)
        with contextlib.suppress(OSError, ValueError):  # it is just being made
            view = read_ring(ring)
            if view.step > steps // 2:
                print(f"killing rank 2 in step {view.step}", flush=True)
                os.kill(view.pid, signal.SIGKILL)
                break
    if job.wait():
        return False
    before, after = (torch.load(f / "weights.pt") for f in (folder_of(mesh, out), folder))
    return all(torch.equal(value, after[name]) for name, value in before.items())


def train_plain(steps: int) -> list[float]:
    """Losses of the same module in this process, with nothing of MSC in the loop."""
    torch.manual_seed(SEED)
    model = GPT(Config(sequence=SEQUENCE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    data = StdlibText(BATCH, SEQUENCE, SEED)
    losses = []
    with TrainingProgress(True, 0, steps, BATCH * SEQUENCE, "tokens") as progress:
        for step in range(steps):
            loss = model(*data.rows(step, range(BATCH)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.step(step + 1, losses[-1])
    return losses


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of two curves; infinite if one of them is shorter."""
    if len(losses) != len(reference):
        return float("inf")
    pairs = zip(losses, reference, strict=True)
    return max(abs(loss - expected) / abs(expected) for loss, expected in pairs)


def plot(curves: dict[str, list[float]], file: Path) -> bool:
    """Draw the curves, if matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, losses), width in zip(curves.items(), (6, 3, 1), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=width)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    return True


def main() -> int:
    """Run everything; returns the exit code."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    numel = sum(p.numel() for p in GPT(Config(sequence=SEQUENCE)).parameters())
    print(f"GPT of {numel / 1e6:.1f} million parameters, {args.steps} steps", flush=True)
    curves: dict[str, list[float]] = {}
    print("one process, plain PyTorch", flush=True)
    curves["one process, plain PyTorch"] = reference = train_plain(args.steps)
    for mesh in MESHES:
        print(f"mesh {mesh}, 4 processes, MSC", flush=True)
        curves[f"mesh {mesh}, MSC"] = train_on_mesh(mesh, args.steps, args.out)
    mesh = MESHES[-1]
    print(f"mesh {mesh}, 4 processes, MSC, and one of them is killed halfway", flush=True)
    same = train_and_kill(mesh, args.steps, args.out)
    (args.out / "losses.json").write_text(json.dumps(curves, indent=1) + "\n")
    agree = summarize(curves, reference)
    verdict = "the same weights as undisturbed, bit for bit" if same else "THE WEIGHTS DIFFER"
    print(f"{f'mesh {mesh}, a rank killed':30} {verdict}")
    drawn = plot(curves, args.out / "losses.png")
    print(f"\n{time.perf_counter() - started:.0f} s. Look at:")
    for mesh in MESHES:
        folder = folder_of(mesh, args.out)
        print(f"  {folder}{os.sep}index.txt    every rank's program on mesh {mesh}")
        print(f"  {folder}{os.sep}passes{os.sep}index.txt    what each pass made of it")
    print(f"  {args.out / ('losses.png' if drawn else 'losses.json')}    the loss curves")
    return 0 if agree and same else 1


def summarize(curves: dict[str, list[float]], reference: list[float]) -> bool:
    """Print a line per run; whether all runs agree and the loss has fallen."""
    print()
    agree = reference[-1] < reference[0]
    for name, losses in curves.items():
        difference = largest_difference(losses, reference)
        same = difference <= TOLERANCE
        agree = agree and same
        note = "" if losses is reference else f"   largest difference {difference:.1e}"
        verdict = "" if same else f", more than {TOLERANCE:g}: THE CURVES DIFFER"
        print(f"{name:30} loss {losses[0]:.4f} -> {losses[-1]:.4f}{note}{verdict}")
    return agree


if __name__ == "__main__":
    sys.exit(main())
