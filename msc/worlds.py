"""On which meshes a job can run: `mesh="dp=*,tp=2"` has as many dp ranks as were started.

A job that goes on with fewer ranks than it was started for keeps its global batch, and what a rank
runs at a time: with fewer dp ranks there are as many more micro-batches. A micro-batch takes its
rows from the batch in order, over all dp ranks, so the sum over all of them is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msc.ir.errors import PlanError
from msc.ir.flags import FULL_WORLD_SIZE
from msc.ir.mesh import Mesh
from msc.ranks import under_torchrun, world_size

_ANY = "*"
_AXIS = "dp"
"""The axis of which any size will do: on others the size changes what a rank holds of a layer."""


@dataclass(frozen=True)
class World:
    """A mesh that a job can have, and the micro-batches of each dp rank on it."""

    mesh: Mesh
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.mesh} with microbatches={self.micro_batches}"


@dataclass(frozen=True)
class Worlds:
    """here: of this job as it was started; possible: all that it can have, the largest first."""

    here: World
    possible: tuple[World, ...]

    @property
    def full(self) -> World:
        """What the job was started for."""
        return self.possible[0]

    def only_here(self, reason: str) -> Worlds:
        """The same for a model that trains otherwise with more micro-batches.

        Raises `PlanError` if the job runs on fewer ranks than it was started for.
        """
        if self.here != self.full:
            raise PlanError(
                f"This model runs on {self.full.mesh.size} ranks only ({self.full}), and the job "
                f"goes on with {self.here.mesh.size}: more micro-batches would train it otherwise, "
                f"since {reason}."
            )
        return Worlds(self.here, (self.here,))


def worlds_of(
    spec: str | Mapping[str, int | str] | Mesh, micro_batches: int, shard_group: int | None
) -> Worlds:
    """The worlds of a job with mesh `spec`; one with a number for every axis has only that one.

    `dp=*` has the processes of the process group or of the launcher, else this one alone.
    `micro_batches` are those of the whole job: of as many ranks as `MSC_FULL_WORLD_SIZE` says,
    where it is set. `shard_group` must divide dp.

    Raises `PlanError` where the processes do not fill the mesh, or their number is not possible.
    """
    template = _template(spec)
    if template is None:
        only = World(Mesh.parse(spec), micro_batches)  # type: ignore[arg-type]
        return Worlds(only, (only,))
    started = world_size()
    full = _full_world_size() or started
    for count, what in ((started, _started(started)), (full, "is the full size of the job")):
        if count % template.size:
            raise PlanError(
                f"Mesh '{_text(spec)}' has a multiple of {template.size} ranks, and {count} {what}."
                f" Start a multiple of {template.size} processes, or give dp a number."
            )
    parts = full // template.size * micro_batches
    possible = tuple(
        World(template.resized(_AXIS, dp), parts // dp)
        for dp in range(full // template.size, 0, -1)
        if parts % dp == 0 and dp % (shard_group or 1) == 0
    )
    for world in possible:
        if world.mesh.size == started:
            return Worlds(world, possible)
    dp = started // template.size
    wants = f"dp={dp} would have {micro_batches} * {full // template.size} / {dp} micro-batches"
    if dp > full // template.size:
        wants = f"dp={dp} is more than that"
    elif shard_group is not None and dp % shard_group:
        wants = f"shard_group={shard_group} does not divide dp={dp}"
    raise PlanError(
        f"This job was started for {full} ranks, and {started} were started now: {wants}. It can "
        f"run on {', '.join(str(world.mesh.size) for world in possible) or 'no number of'} ranks."
    )


def _template(spec: object) -> Mesh | None:
    """The mesh with dp=1, where `spec` leaves the size of dp open."""
    if isinstance(spec, str):
        parts = [part.partition("=") for part in spec.split(",")]
        sizes = [(name.strip(), size.strip()) for name, _, size in parts]
    elif isinstance(spec, Mapping):
        sizes = list(spec.items())
    else:
        return None
    opened = [name for name, size in sizes if size == _ANY]
    if not opened:
        return None
    if opened != [_AXIS]:
        raise PlanError(
            f"Mesh '{_text(spec)}' leaves the size of {' and '.join(opened)} open; only dp=* is "
            "filled with the processes that were started. Give the other axes numbers."
        )
    if isinstance(spec, str):
        return Mesh.parse(",".join("dp=1" if p[2].strip() == _ANY else "".join(p) for p in parts))
    closed: dict[str, Any] = {name: 1 if size == _ANY else size for name, size in sizes}
    return Mesh.parse(closed)


def _text(spec: object) -> str:
    if isinstance(spec, Mapping):
        return ",".join(f"{name}={size}" for name, size in spec.items())
    return str(spec)


def _started(count: int) -> str:
    if count == 1 and not under_torchrun():
        return "process was started, without torchrun or msc run"
    return "process was started" if count == 1 else "processes were started"


def _full_world_size() -> int | None:
    text = FULL_WORLD_SIZE.text
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise PlanError(f"{FULL_WORLD_SIZE.name} is '{text}'; it is a number of ranks.")
    return int(text)
