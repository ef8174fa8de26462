"""Try a choice: what it makes of a compilation, which stays as it is, and the memory that takes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from msc.ir.passes import Pass, run_passes_on
from msc.passes.compilation import Compilation, Variant
from msc.passes.differentiate import Differentiated
from msc.passes.recompute.apply import record

Blocks = Mapping[tuple[int, str], Differentiated]
"""Blocks by pipeline stage and name."""


def trial(unit: Compilation, variants: Sequence[Variant]) -> Compilation:
    """A compilation like `unit`, of other variants, without graphs."""
    found = copy.copy(unit)
    found.graphs, found.rank_graphs, found.remarks = {}, [], []
    found.variants = list(variants)
    return found


def trial_of_blocks(unit: Compilation, blocks: Sequence[Blocks]) -> Compilation:
    """One whose variants have these blocks, which passes may change."""
    found = trial(
        unit,
        [
            replace(variant, differentiated={}, at_stage=dict(own), chunks=[])
            for variant, own in zip(unit.variants, blocks, strict=True)
        ],
    )
    found.stages_of = {}  # its chunks are yet to be built
    for variant in found.variants:
        for (stage, name), programs in variant.at_stage.items():
            record(found, f"{name}.stage{stage}", variant.suffix, programs)
    return found


def peaks(tried: Compilation, then: Sequence[Pass]) -> list[int]:
    """The predicted bytes of each stage, of the class of ranks that needs most.

    then: the passes that lead to rank graphs.
    """
    measure = tried.settings.measure
    assert measure is not None  # compile gives it
    run_passes_on(tried, then)
    found = [measure(gm) for gm in tried.rank_graphs]
    count = len(tried.variants)
    return [max(found[i : i + count]) for i in range(0, len(found), count)]


def copied(programs: Differentiated) -> Differentiated:
    """A block that passes may change."""
    backward = programs.backward
    return replace(
        programs,
        forward=_copy_graph(programs.forward),
        backward=None if backward is None else _copy_graph(backward),
    )


def _copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    new = fx.GraphModule({}, fx.Graph())
    new.graph.output(new.graph.graph_copy(gm.graph, {}))
    for old, fresh in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        fresh.meta = dict(old.meta)
    return new
