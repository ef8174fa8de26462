"""The graphs of the blocks that run, each once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from msc.passes.compilation import Compilation


def block_graphs(unit: Compilation) -> Iterator[tuple[fx.GraphModule, str]]:
    """Each distinct graph, with " of stage 1" for one that other pipeline stages do not have."""
    done: set[int] = set()
    for stage in range(unit.schedule.stages.count):
        for name in dict.fromkeys(unit.blocks_on(stage)):
            for variant in unit.variants:
                only = f" of stage {stage}" if (stage, name) in variant.at_stage else ""
                for gm in variant.programs(stage, name).graphs:
                    if id(gm) not in done:
                        done.add(id(gm))
                        yield gm, only
