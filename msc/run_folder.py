"""The folder of a run: what its ranks tell of themselves, for `msc blame` and `msc report`.

run.json                  the mesh that the run has now
rank-00003.schedule.json  what rank 3 communicates in a step
rank-00003.ring           what it has communicated last
rank-00003.ledger         where its time went, attempt after attempt
"""

from __future__ import annotations

import json
from pathlib import Path

from msc.ir.dump import make_folder
from msc.ir.errors import UserError
from msc.ir.mesh import Mesh
from msc.program import Program
from msc.runtime.diagnosis.blame import Verdict, blame, describe
from msc.runtime.diagnosis.grid import draw, grid_text
from msc.runtime.diagnosis.ledger import Ledger
from msc.runtime.diagnosis.recorder import Recorder
from msc.runtime.diagnosis.ring import CAPACITY, RankView, Ring, read_ring
from msc.runtime.diagnosis.schedule import Act, from_text, schedule_of, to_text

_RUN = "run.json"


def open_recorder(folder: Path, program: Program, rank: int) -> Recorder:
    """A rank's new ring and schedule, and its ledger, in the run's folder, which all ranks see."""
    make_folder(folder)
    schedule = schedule_of(program.rank_graph(rank), program.mesh, rank)
    if rank == 0:
        text = json.dumps({"mesh": [list(axis) for axis in program.mesh]})
        (folder / _RUN).write_text(text + "\n")
        for number, old in _numbered(folder, ".ring").items():
            if number >= program.mesh.size:  # of a rank that the run has no more
                old.unlink(missing_ok=True)
    ring_file, file = ring_files(folder, rank)
    file.write_text(to_text(schedule))
    channels = sorted({act.channel for act in schedule})
    capacity = max(CAPACITY, 2 * len(schedule))
    ring = Ring(ring_file, rank, channels, capacity)
    return Recorder(ring, Ledger(ledger_file(folder, rank), ledger_file(folder, 0)))


def ledger_file(folder: Path, rank: int) -> Path:
    """Where a rank's ledger is."""
    return folder / f"rank-{rank:05d}.ledger"


def ledger_files(folder: Path) -> dict[int, Path]:
    """The ledgers that there are: of fewer ranks than the mesh has, or of more that it had."""
    return _numbered(folder, ".ledger")


def _numbered(folder: Path, suffix: str) -> dict[int, Path]:
    """Rank -> its file of this kind."""
    files = sorted(folder.glob(f"rank-{'[0-9]' * 5}*{suffix}"))
    return {int(file.stem.removeprefix("rank-")): file for file in files}


def read_mesh(folder: Path) -> Mesh:
    """The mesh of a run; `UserError` for a folder of no run."""
    try:
        axes = json.loads((folder / _RUN).read_text())["mesh"]
        return Mesh(tuple((str(name), int(size)) for name, size in axes))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} is no folder of a run: {_RUN} there cannot be read ({error}). Give the one "
            "that Trainer(run=..) has."
        ) from error


def ring_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Where a rank's ring and its schedule are."""
    return folder / f"rank-{rank:05d}.ring", folder / f"rank-{rank:05d}.schedule.json"


def diagnose(folder: Path, picture: Path | None = None) -> tuple[Verdict, str]:
    """The verdict on a run, and the same in words; `picture` is a PNG to draw it into.

    Raises `UserError` for a folder of no run, and for files that no rank has written.
    """
    mesh = read_mesh(folder)
    views: dict[int, RankView] = {}
    schedules: dict[int, list[Act]] = {}
    for rank in range(mesh.size):
        ring, schedule = ring_files(folder, rank)
        try:
            if ring.exists():
                views[rank] = read_ring(ring)
            if schedule.exists():
                schedules[rank] = from_text(schedule.read_text())
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"What rank {rank} has noted in {ring} and {schedule.name} cannot be read: "
                f"{error}. If it begins just now, ask again; otherwise remove both files."
            ) from error
    verdict = blame(views, schedules, mesh.size)
    if picture is not None:
        draw(verdict, views, mesh, picture)
    return verdict, f"{describe(verdict, views, schedules, mesh)}\n\n{grid_text(verdict, mesh)}"
