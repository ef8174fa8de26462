"""The fault campaign: what can happen to a run is made to happen, and the run compared bit for bit.

    python benchmarks/faults.py --each 10                # every kind ten times; results/faults.json
    python benchmarks/faults.py --kind freeze --each 3   # one kind, or several
    python benchmarks/faults.py --flips 1000             # single bits of a saved checkpoint
    python benchmarks/faults.py --chaos 900              # a random fault every 20 s

`fault_kinds/kinds.py` is the table: what each fault is, what must come of it, and the words by
which it counts as detected; and what is not made, with the reason. They are made in runs of a small
GPT under `msc run`, one after another in one run, saving every 2 steps:

    ranks      dp=2,tp=2, a standby, a guard, a reader of data, beats and a monitor: a rank, two,
               rank 0 killed; frozen, held, raising, ending, crashing, out of memory; NaN and
               flipped bits; deaths of reader, writer, standby, monitor; a zombie; the agent stopped
    pipeline   pp=2, saving through fsspec: all ranks killed, and again in each part of the start;
               EIO and stalls; the agent killed, with the store, and the newest checkpoint damaged
    machine    pp=2 in namespaces of network and mounts: packets between two ranks lost (by rules of
               routing), names not answered, disks full, read-only, at their quota
    order      pp=2: a rank has a collective too many, every time: the run must end, and say why
    send       pp=2: the same of a message that is not sent
    saved      no run: files flipped, cut, swapped, mixed, missing; writers killed at random bytes

A fault counts as recovered if the run goes on (or, where the program is wrong, ends by itself) as
the table says, as bit-identical if the run it was made in ends with the losses, parameters and
moments of an undisturbed one. After each run no process of it may be left, each complete checkpoint
must be intact, and no more steps be lost than lie between two snapshots. Times are from the fault
to the first new step. Where namespaces are not permitted, rows say so.

A bit is flipped in each file of a checkpoint in turn, which must be refused by `verify`, and by a
load, which takes the one before. In a chaos run each step sleeps for the time that a device would
compute; it tells the effective training time by the ranks' ledgers, as `msc report` does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/faults.py`

import torch  # noqa: E402

import msc  # noqa: E402
from benchmarks.fault_kinds.judge import Finding, judge  # noqa: E402
from benchmarks.fault_kinds.kinds import KINDS, NAMES, NOT_MADE, Kind  # noqa: E402
from benchmarks.fault_kinds.runs import (  # noqa: E402
    RUNS,
    Done,
    Run,
    last_step,
    log_of,
    perform,
    plan,
    possible,
    saves_of,
)
from benchmarks.fault_kinds.saved import KILLS, SavedFaults, flips, kill_writers  # noqa: E402
from benchmarks.fault_kinds.tokens import LENGTH, SAMPLES, VOCABULARY, Rows  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402
from benchmarks.models import GPTConfig, GPTWithLoss  # noqa: E402
from msc.run_report import report_json, run_accounts  # noqa: E402

CHAOS = (
    "kill",
    "kill-rank-0",
    "kill-two",
    "freeze",
    "exception",
    "early-exit",
    "held-gil",
    "live-lock",
    "segfault",
    "abort",
    "no-memory",
    "memory-kill",
    "nan",
    "flipped-replica",
    "flipped-snapshot",
    "reader-death",
    "reader-stall",
    "writer-death",
    "zombie-rank",
    "zombie-writer",
    "standby-death",
    "agent-freeze",
    "agent-death",
    "connections-reset",
)
"""What may happen in a run with chaos."""
BETWEEN_S, STEP_S, DEVICE_S = 20.0, 0.3, 0.2
"""From one fault to the next, of a step about, and how long of it a device is taken to compute:
the process sleeps then, so that 4 ranks can be had on 2 cores."""
LANES = 3
"""Runs at the same time: most of a run's faults are waited for."""


class Campaign:
    """Makes faults and says what came of them; `folder` is for all that the runs leave."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self._chance = random.Random(seed)
        self._whole: dict[str, Done] = {}

    def program(self, mesh: str) -> msc.Program:
        """The program that runs on a mesh train."""
        torch.manual_seed(0)
        model = GPTWithLoss(GPTConfig(2, 32, 2, LENGTH, VOCABULARY))
        batch = Rows().rows(0, range(SAMPLES))
        optimizer = msc.AdamW(lr=1e-3, max_norm=1.0, skip_nonfinite=False)
        return msc.compile(model, batch, mesh=mesh, optimizer=optimizer)

    def saved(self, mesh: str) -> Path:
        """The same, in a folder."""
        place = self.folder / f"program {mesh}"
        if not place.exists():
            self.program(mesh).save(place)
        return place

    def runs(self, kinds: Sequence[Kind], number: int) -> list[Finding]:
        """The kinds that are made in runs, once; `number` of this round."""
        plans = {}
        for name, run in RUNS.items():
            chosen = [kind for kind in kinds if kind.run == name]
            if chosen:
                plans[name] = plan(chosen, run.ranks, self._chance)
        steps: dict[str, int] = {}  # of each mesh, as runs on one have one undisturbed run
        for name, faults in plans.items():
            mesh = RUNS[name].mesh
            steps[mesh] = max(steps.get(mesh, 0), last_step(faults))
        jobs: dict[str, Future[Done]] = {}
        with ThreadPoolExecutor(LANES) as lanes:
            for name, faults in plans.items():
                run, place = RUNS[name], self.folder / f"{name} {number}"
                program = self.saved(run.mesh)
                jobs[name] = lanes.submit(perform, run, place, program, faults, steps[run.mesh])
                if not faults[0]["always"] and run.mesh not in (*jobs, *self._whole):
                    jobs[run.mesh] = lanes.submit(self._undisturbed, run, run.mesh, steps[run.mesh])
        self._whole |= {mesh: jobs[mesh].result() for mesh in steps if mesh in jobs}
        found = []
        for name, faults in plans.items():
            whole = None if faults[0]["always"] else self._whole[RUNS[name].mesh]
            found += judge(jobs[name].result(), faults, whole)
        return found

    def _undisturbed(self, run: Run, name: str, steps: int) -> Done:
        """The same run without a fault."""
        alone = replace(run, standbys=0, machine=False, faulty=False, monitored=False)
        place = self.folder / f"undisturbed {name}"
        done = perform(alone, place, self.saved(run.mesh), [], steps)
        if done.code:
            raise SystemExit(f"The undisturbed run failed:\n{done.text}")
        return done

    def chaos(self, seconds: float) -> dict[str, Any]:
        """A random fault every `BETWEEN_S`, for so long; and what share of it was training."""
        run = RUNS["ranks"]
        known = [NAMES[name] for name in CHAOS]
        kinds = [self._chance.choice(known) for _ in range(max(1, int(seconds / BETWEEN_S)))]
        faults = plan(kinds, run.ranks, self._chance, room=int(0.8 * BETWEEN_S / STEP_S))
        steps = last_step(faults)
        place = self.saved(run.mesh)
        done = perform(run, self.folder / "chaos", place, faults, steps, device_s=DEVICE_S)
        whole = self._undisturbed(run, "by chaos", steps)
        found = judge(done, faults, whole)
        report = report_json(run_accounts(log_of(done)))
        return {
            "seconds": done.seconds,
            "faults": len(faults),
            "steps": steps,
            "device_s": DEVICE_S,
            "bit_identical": all(each.same for each in found),
            "effective": report["effective"],
            "shares": {name: each / report["wall_s"] for name, each in report["mean"].items()},
            "kinds": table(found, [kind for kind in known if kind in kinds]),
        }

    def saves(self) -> SavedFaults:
        """Checkpoints of an undisturbed run on 4 ranks."""
        mesh = RUNS["ranks"].mesh
        if mesh not in self._whole:
            self._whole[mesh] = self._undisturbed(RUNS["ranks"], mesh, 8)
        place = self.folder / "copies"
        return SavedFaults(saves_of(self._whole[mesh]), place, self.program(""), Rows())

    def in_saved(self, kinds: Sequence[Kind]) -> list[Finding]:
        """The kinds that are made in saved files, once."""
        found = []
        saved = self.saves()
        for kind in kinds:
            finding = Finding(kind.name)
            found.append(finding)
            if kind.name == "writers-at-bytes":
                old, new = kill_writers(KILLS)
                finding.detected = finding.recovered = old + new == KILLS
                finding.same = True  # it compares the bytes of what is taken
                continue
            saved.make(kind.name, self._chance)
            finding.detected = bool(saved.find())
            finding.recovered = finding.same = saved.takes_older()
            saved.restore()
            if not (finding.detected and finding.recovered):
                finding.blame("was not found" if finding.recovered else "was taken")
        saved.close()
        return found


def table(
    found: Sequence[Finding], kinds: Sequence[Kind], reason: str = ""
) -> list[dict[str, Any]]:
    """A row for each kind; reason: why none was made that takes a machine of its own."""
    rows = []
    for kind in kinds:
        mine = [each for each in found if each.kind == kind.name]
        seconds = [each.seconds for each in mine if each.seconds is not None]
        lost = [each.lost for each in mine if each.lost is not None]
        ends = [each.same for each in mine if each.same is not None]
        rows.append(
            {
                "kind": kind.name,
                "what": kind.what,
                "expected": kind.expected.value,
                "run": kind.run,
                "injected": len(mine),
                "detected": sum(each.detected for each in mine),
                "recovered": sum(each.recovered for each in mine),
                "bit_identical": sum(ends) if ends else None,
                "median_s": statistics.median(seconds) if seconds else None,
                "worst_s": max(seconds, default=None),
                "lost_steps": max(lost, default=None),
                "problems": sorted({each.problem for each in mine if each.problem}),
            }
        )
        if reason and kind.run == "machine":
            rows[-1]["not_made"] = reason
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'kind':18} made found mended  same  median   worst  lost")
    for row in rows:
        times = "".join(
            f"{row[key]:7.2f}s" if row[key] is not None else f"{'':8}"
            for key in ("median_s", "worst_s")
        )
        cells = [row["detected"], row["recovered"], row["bit_identical"]]
        counts = "".join(f"{'' if cell is None else cell:6}" for cell in cells)
        lost = "" if row["lost_steps"] is None else row["lost_steps"]
        print(f"{row['kind']:18} {row['injected']:4}{counts}{times} {lost:5}")
        for problem in row["problems"]:
            print(f"    {problem}")


def main() -> int:
    """Run what is asked for, print it and write it down."""
    parser = argparse.ArgumentParser(description="Faults that a run must come through.")
    parser.add_argument("--each", type=int, metavar="N", help="of each kind; 1 without any")
    parser.add_argument("--kind", action="append", choices=sorted(NAMES), help="these kinds alone")
    parser.add_argument("--flips", type=int, metavar="N", help="single bits of a checkpoint")
    parser.add_argument("--chaos", type=float, metavar="SECONDS", help="faults at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder for what the runs leave")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/faults.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="msc-faults-") as made:
        campaign = Campaign(args.keep or Path(made), args.seed)
        facts: dict[str, Any] = {}
        good = []
        if args.each or args.kind or not (args.flips or args.chaos):
            kinds = [kind for kind in KINDS if not args.kind or kind.name in args.kind]
            reason = possible() if any(kind.run == "machine" for kind in kinds) else ""
            now = [kind for kind in kinds if not (reason and kind.run == "machine")]
            found: list[Finding] = []
            for number in range(args.each or 1):
                found += run_all(campaign, now, number)
                facts["kinds"] = rows = table(found, kinds, reason)
                write(args.json, facts)
                show(rows)
            good.append(not any(row["problems"] for row in rows))
        if args.flips:
            saved = campaign.saves()
            facts["flips"] = flips(saved, args.flips, random.Random(args.seed))
            saved.close()
            write(args.json, facts)
            print(facts["flips"])
            good.append(facts["flips"]["found"] == facts["flips"]["refused"] == args.flips)
        if args.chaos:
            facts["chaos"] = campaign.chaos(args.chaos)
            show(facts["chaos"]["kinds"])
            print({name: value for name, value in facts["chaos"].items() if name != "kinds"})
            good.append(not any(row["problems"] for row in facts["chaos"]["kinds"]))
            write(args.json, facts)
    return 0 if all(good) else 1


def run_all(campaign: Campaign, kinds: Sequence[Kind], number: int) -> list[Finding]:
    """Each of the kinds once, as far as they can be made here."""
    found = campaign.runs([kind for kind in kinds if kind.run != "saved"], number)
    files = [kind for kind in kinds if kind.run == "saved"]
    return found + (campaign.in_saved(files) if files else [])


def write(file: Path, facts: dict[str, Any]) -> None:
    """Put facts into the file of results, beside what it has of other parts and kinds."""
    before = json.loads(file.read_text()) if file.exists() else {}
    if "kinds" in facts:
        rows = {row["kind"]: row for row in (*before.get("kinds", []), *facts["kinds"])}
        facts = {**facts, "kinds": [rows[kind.name] for kind in KINDS if kind.name in rows]}
    load = {f"load_{name}": os.getloadavg()[1] for name in facts}
    whole = {**before, "hardware": hardware(), "not_made": NOT_MADE, **facts, **load}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
