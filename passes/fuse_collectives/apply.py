"""Fuse a collective with the GEMMs beside it, so that it runs while they do.

    %s = c10d.all_gather_into_tensor(%x, 2, 'tp')     %f = msc.all_gather_matmul(%x, 0, [%w], [%b],
    %g = c10d.wait_tensor(%s)                   ->         [False], [], [], True, 2, 'tp')
    %y = msc.linear(%g, %w, %b)                       %y = %f[0]
    return (%y, %g)                                   %g = %f[1]
                                                      return (%y, %g)

    %p = msc.linear_dgrad(%gy, %w)                    %gx = msc.matmul_reduce_scatter(%gy, %w,
    %s = c10d.reduce_scatter_tensor(%p, ..)     ->         None, True, 0, 2, 'tp')
    %gx = c10d.wait_tensor(%s)

By itself a GEMM can only follow the gather that it reads, and a reduction only follow the GEMM that
it sums, so that nothing hides them. On a cluster a place is fused if that shortens the block, with
all its collectives overlapped (`msc.passes.overlap`), by a part of what GEMM and collective take:
a gather that a weight gradient could run beside may stay as it is. Without a cluster nothing is
known of links and launches, so nothing is fused unless the user says so.
Numerics: products are rounded as GEMMs of other shapes are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from msc.ir.communication import COLLECTIVES
from msc.ir.ops.fused_collectives import MATMUL_REDUCE_SCATTER
from msc.ir.passes import UnitPass
from msc.ir.printer import format_graph
from msc.ir.rewrites import Finding
from msc.passes.compilation import Compilation, Settings
from msc.passes.fuse_collectives.gain import best_form
from msc.passes.fuse_collectives.places import Place, places
from msc.passes.fuse_collectives.rewrite import fuse

_OTHERS_DIFFER = (
    "tp shards this block unequally, so that ranks have graphs of their own, which might choose "
    "otherwise"
)


@dataclass(frozen=True)
class FuseCollectives(UnitPass):
    """One op in place of each collective and its GEMMs, where that pays."""

    name: ClassVar[str] = "fuse-collectives"
    numerics: ClassVar[str] = "products are rounded as GEMMs of other shapes are"

    def run(self, unit: Compilation) -> int:
        unit.fusions = []
        done: set[int] = set()
        changes = 0
        for stage in range(unit.schedule.stages.count):
            for name in dict.fromkeys(unit.blocks_on(stage)):
                alike = _is_alike(unit, stage, name)
                for variant in unit.variants:
                    only = f" of stage {stage}" if (stage, name) in variant.at_stage else ""
                    for gm in variant.programs(stage, name).graphs:
                        if id(gm) not in done:
                            done.add(id(gm))
                            found = _fuse_all(gm, unit.settings, alike, only)
                            changes += sum(each.changed for each in found)
                            # other variants find the same
                            unit.fusions += [each for each in found if each not in unit.fusions]
        unit.remark(*map(str, unit.fusions))
        return changes


def _is_alike(unit: Compilation, stage: int, name: str) -> bool:
    """Whether all tp ranks run a block by equal graphs, and so choose alike."""
    first, *others = (variant.programs(stage, name) for variant in unit.variants)
    if all(other is first for other in others):
        return True
    texts = {tuple(map(format_graph, each.graphs)) for each in (first, *others)}
    return len(texts) == 1


def _fuse_all(gm: fx.GraphModule, settings: Settings, alike: bool, only: str) -> list[Finding]:
    """Fuse what pays in one graph, and say what became of each place.

    only: the stage of a graph that other stages do not have.
    """
    findings: list[Finding] = []
    if settings.fuse_collectives is False:
        return findings
    for start in [place.start for place in places(gm)]:
        (place,) = (each for each in places(gm) if each.start is start)
        where = _where(place) + only
        form, why = _form(gm, place, settings, alike)
        what = why if form is None else f"{_described(fuse(form))}{why}"
        findings.append(Finding(FuseCollectives.name, where, form is not None, what))
    if any(each.changed for each in findings):
        gm.recompile()
    return findings


def _form(
    gm: fx.GraphModule, place: Place, settings: Settings, alike: bool
) -> tuple[Place | None, str]:
    """What a place is fused as, and what that saves; or None, and why it is left alone."""
    if place.reason:
        return None, place.reason
    if not alike:
        return None, _OTHERS_DIFFER
    if settings.fuse_collectives == "auto":
        return best_form(gm, place, settings)
    return place, ""


def _where(place: Place) -> str:
    """`layers.0.up, all_gather over 'tp' in the backward`."""
    kind = COLLECTIVES[place.start.target]
    phase = place.start.meta.get("phase") or place.gemm.meta.get("phase")
    part = f" in the {phase}" if phase else ""
    module = place.gemm.meta.get("module_path") or f"%{place.gemm.name}"
    return f"{module}, {kind} over '{place.group}'{part}"


def _described(fused: fx.Node) -> str:
    if fused.target is MATMUL_REDUCE_SCATTER:
        return "multiplied part by part, each on its way while the next is made"
    _, _, weights, _, _, others, _, keep, *_ = fused.args
    count = len(weights) + len(others)  # type: ignore[arg-type]
    gemms = "a GEMM" if count == 1 else f"{count} GEMMs"
    kept = "; the gathered value is returned too" if keep else ""
    return f"gathered part by part inside {gemms}{kept}"
