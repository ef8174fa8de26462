"""Decide how ranks of dp split parameters (ZeRO), and make the chunks gather and reduce them.

    zero 1  optimizer state and the parameters between steps are split: the step begins with a
            gather of the parameters, and ends with a reduction of gradients to shards
    zero 2  so are sums of gradients: each micro-batch's are reduced as its backward makes them, or
            those of as many together as the bound on memory allows
    zero 3  so are parameters: a block is gathered for its forward, and again for its backward

Rajbhandari et al., "ZeRO", SC 2020, section 5; in groups of neighbours on dp with replicas of them,
Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2. Numerics: gradients of micro-batches are
summed over dp before they are summed over micro-batches with zero 2 and 3, otherwise after.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from msc.ir.data_shard import DataShard
from msc.ir.passes import Pass, UnitPass
from msc.ir.placement import Partial
from msc.passes.chunks import Chunk
from msc.passes.compilation import Compilation
from msc.passes.schedules.stages import Kind
from msc.passes.trial import peaks, trial
from msc.passes.zero.chunk_graphs import gather_inside, reduce_inside
from msc.passes.zero.collectives import ShardGroup


@dataclass(frozen=True)
class ShardData(UnitPass):
    """Split what `zero=` says over dp.

    then: the passes that make rank graphs of the chunks, to predict their memory.
    """

    then: tuple[Pass, ...] = field(default=(), repr=False)
    name: ClassVar[str] = "shard-data"
    numerics: ClassVar[str] = "sums over dp and micro-batches change their order"
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        unit.data_shards = _choose(unit)
        sharding = shard_group(unit)
        if sharding is None or unit.settings.zero == 1:
            return 0  # the chunks find all parameters whole, as before
        unit.reduced_together = self._most_together(unit, sharding)
        before = unit.texts()
        _rewrite_all(unit, sharding)
        return unit.lines_changed(before)

    def _most_together(self, unit: Compilation, sharding: ShardGroup) -> int:
        """Of how many micro-batches gradients are reduced together: of as many as memory allows."""
        settings = unit.settings
        if settings.memory is None or settings.measure is None:
            return 1
        count = settings.micro_batches
        while count > 1:
            chunks = [[replace(chunk) for chunk in v.chunks] for v in unit.variants]
            variants = zip(unit.variants, chunks, strict=True)
            tried = trial(unit, [replace(v, chunks=own) for v, own in variants])
            tried.reduced_together = count
            _rewrite_all(tried, sharding)
            if max(peaks(tried, self.then)) <= settings.memory:
                return count
            count //= 2
        return 1


def shard_group(unit: Compilation) -> ShardGroup | None:
    """The ranks that split parameters, None where nothing is split."""
    if not unit.data_shards:
        return None
    settings = unit.settings
    return ShardGroup(
        settings.data_group,
        settings.data_parts,
        unit.data_shards,
        unit.fake_mode,
        settings.master,
    )


def _choose(unit: Compilation) -> dict[str, DataShard]:
    """How each parameter is split: those that train, with zero 3 all.

    One whose gradient is the same on all dp ranks stays whole: there is nothing to reduce.
    """
    found: dict[str, DataShard] = {}
    settings = unit.settings
    if settings.data_parts == 1:
        return found
    chunks = unit.variants[0].chunks
    trained = {name for chunk in chunks for name in chunk.parameter_gradients}
    for chunk in chunks:
        for name, value in chunk.values.items():
            state = unit.parameter_states[name].get("dp")
            partial = state is not None and isinstance(state.grad, Partial)
            shard = DataShard.choose(value.shape, settings.data_parts)
            if shard is not None and (partial if name in trained else settings.zero == 3):
                found[name] = shard
    return found


def _rewrite_all(unit: Compilation, sharding: ShardGroup) -> None:
    for variant in unit.variants:
        for chunk in variant.chunks:
            _rewrite(unit, variant.suffix, chunk, sharding)


def _rewrite(unit: Compilation, suffix: str, chunk: Chunk, sharding: ShardGroup) -> None:
    """Make a chunk reduce its gradients, and with zero 3 gather its parameters."""
    last = "backward" if chunk.weight_backward is None else "weight_backward"
    graph: fx.GraphModule | None = getattr(chunk, last)
    if graph is not None and unit.reduced_together == 1:
        reduced = reduce_inside(graph, chunk.parameter_gradients, sharding)
        setattr(chunk, last, reduced.gm)
        chunk.reduced, chunk.not_reduced = reduced.names, reduced.others
    if unit.settings.zero == 3:
        for kind, attribute in _GRAPHS.items():
            graph = getattr(chunk, attribute)
            if graph is not None:
                found = gather_inside(graph, sharding)
                setattr(chunk, attribute, found.gm)
                chunk.whole[kind] = found.whole
    for attribute in _GRAPHS.values():
        graph = getattr(chunk, attribute)
        if graph is not None:
            unit.graphs[f"chunk{chunk.index}.{attribute}{suffix}"] = graph


_GRAPHS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight_backward",
}
