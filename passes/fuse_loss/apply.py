"""Make a linear head and the terms of its cross entropy one op, whose logits are never all there.

    %y = msc.linear(%x, %w)                          %r = aten.reshape(%x, [32, 16])
    %r = aten.reshape(%y, [32, 64])            ->    %t = msc.linear_nll_terms(%r, %w, None,
    %t = msc.nll_terms(%r, %labels, start=%s)            %labels, %s, False, 0.0)

Between the two may stand what moves or picks rows (views, slices, transposes), a number that scales
them, which then scales rows of x, a soft cap, and a conversion of half types to float32, in which
the op computes anyway. Logits that something else
reads, or that a collective or anything else makes of a layer's result, stay, with the reason. The
gradient is one op too: another one for the weight, which a schedule could delay, would have to make
the logits a third time. A schedule that splits the backward takes both with the input gradients.
Numerics: sums in another order; logits of half types are capped in float32, and scaled before they
are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from msc.ir.passes import UnitPass
from msc.ir.rewrites import Finding
from msc.passes.compilation import Compilation
from msc.passes.fuse_loss.heads import Head, heads
from msc.passes.fuse_loss.rewrite import fuse

_NONE = "the model has no cross entropy of class numbers"
_ALL_STAY = "no linear layer could be fused with its loss, as report.fused_losses says"


@dataclass(frozen=True)
class FuseLoss(UnitPass):
    """One op in place of each linear layer and the cross entropy of its result."""

    name: ClassVar[str] = "fuse-loss"
    numerics: ClassVar[str] = "sums in another order; half types: capped in float32, rounded later"

    def run(self, unit: Compilation) -> int:
        if not unit.settings.fuse_loss:
            return 0
        changes = 0
        done: set[int] = set()
        for variant in unit.variants:
            for local in variant.local.values():
                if id(local) not in done:
                    done.add(id(local))
                    found = fuse_heads(local.gm, unit.fake_mode)
                    changes += sum(each.changed for each in found)
                    if variant is not unit.variants[0]:  # which finds the same, at other sizes
                        found = [each for each in found if each not in unit.heads]
                    unit.heads += found
        unit.remark(*map(str, unit.heads))
        if not changes:
            why = _ALL_STAY if unit.heads else _NONE
            unit.notes.append(f"fuse_loss=True has no effect: {why}.")
        return changes


def fuse_heads(gm: fx.GraphModule, fake_mode: Any) -> list[Finding]:
    """Fuse what can be fused in a rank-local block; a finding for each cross entropy."""
    findings = []
    for head in heads(gm):
        where = (head.linear or head.terms).meta.get("module_path") or ""
        if not head.reason:
            fuse(gm, head, fake_mode)
        what = head.reason or _described(head)
        findings.append(Finding(FuseLoss.name, where, not head.reason, what))
    if any(each.changed for each in findings):
        gm.recompile()
    return findings


def _described(head: Head) -> str:
    cap = f", with a soft cap of {head.soft_cap:g}" if head.soft_cap else ""
    return f"one op with its cross entropy{cap}; logits are made a part at a time"
