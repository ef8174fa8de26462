"""Make one op of a linear and the activation, the gate or the residual sum behind it.

    %h = msc.linear(%x, %w, %b)            %f = msc.linear_epilogue(%x, %w, %b, None, 'gelu', True)
    %a = aten.gelu(%h)               ->    %a = %f[0]
    return (%a, %h)                        %h = %f[1]
                                           return (%a, %h)

    %y = msc.linear(%a, %w, %b)            %f = msc.linear_epilogue(%a, %w, %b, %r, '', False)
    %s = aten.add(%r, %y)            ->    %s = %f[0]

    %p = msc.linear(%x, %w)                %f = msc.linear_gated(%x, %w, %u, 'silu', False)
    %q = msc.linear(%x, %u)          ->    %g = %f[0]
    %g = msc.gated(%p, %q, 'silu')

After differentiation, so that no gradient is needed: what the backward reads of the inside is
stored by the op as well. After recomputation, which chooses among the single calls, and after
fuse-collectives, which has the first choice of a product. In ATen the op is the sequence that it
replaces, so every device runs the same graph; on CUDA a kernel saves the passes over memory behind
the product, but is slower than the library at the product itself. Which weighs more is said by a
cluster file, and marked on the op (`msc.cost.epilogue.IN_KERNEL`); without one the library keeps
it, unless `MSC_TRITON=all`.
Numerics: a sum without a bias is rounded once, with its product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from msc.cost.epilogue import IN_KERNEL, kernel_gain
from msc.ir.passes import UnitPass
from msc.ir.rewrites import Finding
from msc.passes.block_graphs import block_graphs
from msc.passes.compilation import Compilation, Settings
from msc.passes.fuse_epilogue.places import Activation, Gate, Place, places
from msc.passes.fuse_epilogue.rewrite import fuse


@dataclass(frozen=True)
class FuseEpilogue(UnitPass):
    """One op in place of each linear and what follows it."""

    name: ClassVar[str] = "fuse-epilogue"
    numerics: ClassVar[str] = "a sum without a bias is rounded once, with its product"

    def run(self, unit: Compilation) -> int:
        unit.epilogues = []
        changes = 0
        for gm, only in block_graphs(unit):
            found = _fuse_all(gm, unit.settings, only)
            changes += sum(each.changed for each in found)
            # other variants find the same
            unit.epilogues += [each for each in found if each not in unit.epilogues]
        unit.remark(*map(str, unit.epilogues))
        return changes


def _fuse_all(gm: fx.GraphModule, settings: Settings, only: str) -> list[Finding]:
    findings: list[Finding] = []
    for place in places(gm):
        where = _where(place) + only
        what = place.reason or _fused(place, settings)
        findings.append(Finding(FuseEpilogue.name, where, not place.reason, what))
    if any(each.changed for each in findings):
        gm.recompile()
    return findings


def _fused(place: Place, settings: Settings) -> str:
    """Fuse a place; what was done."""
    kept = isinstance(place, (Activation, Gate)) and place.keep
    node = fuse(place)
    what = "one op with its product" + "; what the backward reads is stored too" * kept
    cluster = settings.cost.cluster
    if cluster is None:
        return what
    saved, lost = kernel_gain(node, cluster)
    compared = f"{1e6 * saved:.1f} us of passes over memory against {1e6 * lost:.1f} us of product"
    if saved <= lost:
        return f"{what}; on CUDA by the library, {compared}"
    node.meta["marks"] = {**node.meta.get("marks", {}), IN_KERNEL: True}
    return f"{what}; on CUDA by a kernel, {compared}"


def _where(place: Place) -> str:
    """`layers.0.up, gelu in the forward`."""
    kind = place.name if isinstance(place, Activation) else _kind(place.node)
    module = place.product.meta.get("module_path") or f"%{place.product.name}"
    phase = place.node.meta.get("phase") or place.product.meta.get("phase")
    return f"{module}, {kind}" + (f" in the {phase}" if phase else "")


def _kind(node: fx.Node) -> str:
    return str(node.target).split(".")[1]
