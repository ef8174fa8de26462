"""The ranks on the grid of the mesh: causes, who waits, who runs; as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msc.ir.errors import UserError
from msc.ir.mesh import Mesh
from msc.runtime.diagnosis.blame import Verdict
from msc.runtime.diagnosis.ring import RankView

_MARKS = {"cause": "X", "waits": "w", "runs": "."}
_COLOURS = {"cause": "#d62728", "waits": "#f2c14e", "runs": "#9fc5a8"}


def states(verdict: Verdict, mesh: Mesh) -> dict[int, str]:
    """ "cause", "waits" or "runs" for every rank."""
    causes = {cause.rank for cause in verdict.causes}
    return {
        rank: "cause" if rank in causes else "waits" if rank in verdict.waits else "runs"
        for rank in range(mesh.size)
    }


def grid_text(verdict: Verdict, mesh: Mesh) -> str:
    """A line for each pp and dp coordinate, a column for each tp coordinate."""
    found = states(verdict, mesh)
    lines = ["X cause   w waits   . runs; columns are tp"]
    for pp in range(mesh.axis_size("pp")):
        for dp in range(mesh.axis_size("dp")):
            ranks = [_rank(mesh, pp, dp, tp) for tp in range(mesh.axis_size("tp"))]
            marks = " ".join(_MARKS[found[rank]] for rank in ranks)
            lines.append(f"pp={pp} dp={dp}   {marks}   ranks {ranks[0]} to {ranks[-1]}")
    return "\n".join(lines)


def draw(verdict: Verdict, views: Mapping[int, RankView], mesh: Mesh, file: Path) -> None:
    """A picture: one panel for each pp coordinate, arrows from who waits to whom it waits for.

    Raises `UserError` without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("A picture needs matplotlib: pip install matplotlib.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    found = states(verdict, mesh)
    stages, replicas, parts = (mesh.axis_size(axis) for axis in ("pp", "dp", "tp"))
    figure, axes = pyplot.subplots(figsize=(2 + 1.2 * parts * stages, 1.5 + replicas))
    places = {}
    for rank in range(mesh.size):
        here = mesh.coordinate(rank)
        place = here.get("pp", 0) * (parts + 1) + here.get("tp", 0), -here.get("dp", 0)
        places[rank] = place
        axes.scatter(*place, s=700, color=_COLOURS[found[rank]], zorder=2)
        step = f"\nstep {views[rank].step}" if rank in views else ""
        axes.text(*place, f"{rank}{step}", ha="center", va="center", fontsize=7, zorder=3)
    for rank, (_, blockers) in verdict.waits.items():
        for blocker in blockers:
            style = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.2", "alpha": 0.6}
            axes.annotate("", places[blocker], places[rank], arrowprops=style)
    axes.set_title(", ".join(f"rank {c.rank} {c.what}" for c in verdict.causes)[:90], fontsize=8)
    axes.set_xticks([stage * (parts + 1) + (parts - 1) / 2 for stage in range(stages)])
    axes.set_xticklabels([f"pp={stage}" for stage in range(stages)])
    axes.set_yticks([-replica for replica in range(replicas)])
    axes.set_yticklabels([f"dp={replica}" for replica in range(replicas)])
    axes.margins(0.2)
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _rank(mesh: Mesh, pp: int, dp: int, tp: int) -> int:
    wanted = {"pp": pp, "dp": dp, "tp": tp}
    return mesh.rank({axis: wanted.get(axis, 0) for axis, _ in mesh})
