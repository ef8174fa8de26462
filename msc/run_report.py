"""`msc report`: where the time of a run went, from the ledgers in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msc.ir.errors import UserError
from msc.run_folder import ledger_files, read_mesh
from msc.runtime.diagnosis.accounting import Account, accounts, mean, worst
from msc.runtime.diagnosis.ledger import CLASSES, read_ledger

LABELS = {
    "communication": "exposed communication",
    "data": "data wait",
    "snapshot": "snapshot stall",
    "repeated": "repeated work",
}


def run_accounts(folder: Path) -> list[Account]:
    """The accounts of all ranks that a run has ever had, also while it runs.

    Raises `UserError` for a folder of no run, or a ledger that is none.
    """
    read_mesh(folder)
    try:
        found = accounts({r: read_ledger(f) for r, f in ledger_files(folder).items()})
    except ValueError as error:
        raise UserError(f"{error}. Is {folder} the folder that Trainer(run=..) has?") from error
    if not found:
        raise UserError(f"No rank has begun the run in {folder}: it has no ledger.")
    return found


def ranks_without_account(folder: Path, found: Sequence[Account]) -> list[int]:
    """Those of the run's mesh whose ledgers are missing or cut short, or that never began."""
    return sorted(set(range(read_mesh(folder).size)) - {each.rank for each in found})


def report_json(found: Sequence[Account], without: Sequence[int] = ()) -> dict[str, Any]:
    """All numbers, for programs; times in seconds. without: see `ranks_without_account`."""
    return {
        "without_account": list(without),
        "ranks": [
            {
                "rank": each.rank,
                "wall_s": each.wall_s,
                "seconds": dict(each.seconds),
                "effective": each.effective,
                "attempts": each.attempts,
                "steps": each.last_step,
            }
            for each in found
        ],
        "mean": mean(found),
        "wall_s": _mean_wall(found),
        "effective": _effective(found),
        "worst_rank": worst(found).rank,
    }


def report_text(found: Sequence[Account], without: Sequence[int] = ()) -> str:
    """A line per class: the mean over ranks, and the rank that has trained the least.

    without: see `ranks_without_account`.
    """
    means, wall, low = mean(found), _mean_wall(found), worst(found)
    attempts = max(each.attempts for each in found)
    lines = [
        f"ranks: {len(found)}, steps: {max(each.last_step for each in found)}, "
        f"attempts: {attempts}, {wall:.1f} s",
        f"{'':22}  {'mean over ranks':>18}  {f'rank {low.rank} (worst)':>18}",
    ]
    rows = [(LABELS.get(name, name), means[name], low.seconds[name]) for name in CLASSES]
    rows.append(("sum", wall, low.wall_s))
    for label, average, lowest in rows:
        lines.append(f"{label:22}  {_cell(average, wall)}  {_cell(lowest, low.wall_s)}")
    share = f"{_effective(found):.1%} of the wall time (rank {low.rank}: {low.effective:.1%})"
    lines.append(f"effective training time {share}")
    if without:
        names = ", ".join(map(str, without))
        ranks = f"rank {names} is" if len(without) == 1 else f"ranks {names} are"
        lines.append(f"{ranks} not in it: no ledger, or one that is cut short (rank-*.ledger)")
    return "\n".join(lines)


def _mean_wall(found: Sequence[Account]) -> float:
    return sum(each.wall_s for each in found) / len(found)


def _effective(found: Sequence[Account]) -> float:
    wall = sum(each.wall_s for each in found)
    return sum(each.effective_s for each in found) / wall if wall else 0.0


def _cell(seconds: float, wall: float) -> str:
    share = seconds / wall if wall else 0.0
    return f"{seconds:9.2f} s {share:7.1%}"
