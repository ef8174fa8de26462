"""Options that change nothing on a mesh: legal, as a script may run on any, but worth a note."""

from __future__ import annotations

from msc.passes.compilation import Settings


def without_effect(settings: Settings) -> list[str]:
    """A line for each option that was given and has nothing to work on."""
    size = settings.mesh.axis_size
    found = []
    if settings.zero and size("dp") == 1:
        found.append(f"zero={settings.zero} has no effect: the mesh has no dp to split over.")
    elif settings.zero and settings.shard_group == 1:
        found.append(f"zero={settings.zero} has no effect with shard_group=1: a group splits it.")
    if settings.fuse_collectives is True and size("tp") == 1:
        found.append("fuse_collectives=True has no effect: no GEMM has a collective without tp.")
    if settings.virtual_stages not in (None, 1) and size("pp") == 1:
        found.append(
            f"virtual_stages={settings.virtual_stages} cuts the one stage into chunks that follow "
            "each other: without pp there is no bubble to make smaller."
        )
    return found
