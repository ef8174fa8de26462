"""Build the graphs of each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from msc.ir.errors import PlanError
from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.structure import Instance, Source, output_nodes, placeholders
from msc.ir.walks import ancestors
from msc.passes.chunks import Block, Chunk, ChunkBuilder, Key, Prelude, crossing
from msc.passes.compilation import Compilation, Variant
from msc.passes.cut import copy_subgraph


@dataclass(frozen=True)
class BuildChunks(UnitPass):
    """Forward and backward of each chunk of the schedule."""

    name: ClassVar[str] = "build-chunks"
    numerics: ClassVar[str] = BIT_EXACT
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        instances = unit.structure.instances
        runs, chunk_of = unit.schedule.runs, unit.schedule.chunk_of
        _record_stages(unit, chunk_of)
        received = crossing(instances, chunk_of, len(runs))
        written = _written(unit, chunk_of, len(runs))
        for variant in unit.variants:
            _build(unit, variant, [[instances[i] for i in run] for run in runs], received, written)
        return sum(len(variant.chunks) for variant in unit.variants)


def _build(
    unit: Compilation,
    variant: Variant,
    runs: list[list[Instance]],
    received: list[list[Key]],
    written: list[dict[str, Source]],
) -> None:
    """The chunks of the ranks of a variant."""
    chunks: list[Chunk] = []
    gradients_below: list[Key] = []
    for index in reversed(range(len(runs))):
        builder = ChunkBuilder(
            index,
            unit.schedule.stages.of(index),
            runs[index],
            _blocks(variant, unit.schedule.stages.of(index), runs[index]),
            _prelude(unit, runs[index], written[index]),
            received[index],
            received[index + 1] if index + 1 < len(runs) else [],
            gradients_below,
            unit.structure.loss,
            variant.value_meta,
            _parameter_meta(unit, variant),
            written[index],
        )
        chunk = builder.build()
        gradients_below = chunk.sent_gradients
        chunks.append(chunk)
    variant.chunks = chunks[::-1]
    for chunk in variant.chunks:
        unit.graphs[f"chunk{chunk.index}.forward{variant.suffix}"] = chunk.forward
        if chunk.backward is not None:
            unit.graphs[f"chunk{chunk.index}.backward{variant.suffix}"] = chunk.backward
        if chunk.weight_backward is not None:
            name = f"chunk{chunk.index}.weight_backward{variant.suffix}"
            unit.graphs[name] = chunk.weight_backward


def _blocks(variant: Variant, stage: int, instances: list[Instance]) -> dict[str, Block]:
    names = dict.fromkeys(instance.block for instance in instances)
    return {
        name: Block(variant.programs(stage, name), variant.local[name].coordinates)
        for name in names
    }


def _record_stages(unit: Compilation, chunk_of: dict[int, int]) -> None:
    for instance in unit.structure.instances:
        stage = unit.schedule.stages.of(chunk_of[instance.index])
        for source in instance.sources:
            if source.kind == "parameter":
                stages = unit.stages_of.setdefault(source.name, [])
                if stage not in stages:
                    stages.append(stage)
    for stages in unit.stages_of.values():
        stages.sort()


def _written(unit: Compilation, chunk_of: dict[int, int], chunks: int) -> list[dict[str, Source]]:
    """For each chunk the buffers that it writes: all of its own, and those that it reads.

    Raises `PlanError` where a chunk reads what a layer of another chunk writes.
    """
    instances = unit.structure.instances
    reads: list[set[str]] = []
    for chunk in range(chunks):
        own = [instance for instance in instances if chunk_of[instance.index] == chunk]
        nodes = placeholders(_prelude(unit, own, {}).gm)
        reads.append({node.meta["name"] for node in nodes if node.meta["kind"] == "buffer"})
    written: list[dict[str, Source]] = [{} for _ in range(chunks)]
    for name, source in unit.structure.buffers.items():
        readers = [chunk for chunk in range(chunks) if name in reads[chunk]]
        if source.kind == "prelude":
            for chunk in readers or [0]:
                written[chunk][name] = source
            continue
        writer = chunk_of[source.instance]
        written[writer][name] = source
        if any(chunk != writer for chunk in readers):
            what, instead = "stage", "pp=1"
            if unit.schedule.stages.virtual > 1:
                what, instead = "chunk", "pp=1 with one virtual stage"
            raise PlanError(
                f"Buffer '{name}' is written on pipeline {what} {writer} and read on {what}s "
                f"{readers}. Give each layer a buffer of its own, or use {instead}."
            )
    return written


def _prelude(unit: Compilation, instances: list[Instance], written: dict[str, Source]) -> Prelude:
    """The part of the prelude that a chunk's instances read, and that it writes to buffers."""
    whole = unit.local_prelude.gm
    sources = [*(s for i in instances for s in i.sources), *written.values()]
    used = {source.name for source in sources if source.kind == "prelude"}
    names = [name for name in unit.structure.prelude_outputs if name in used]
    outputs = dict(zip(unit.structure.prelude_outputs, output_nodes(whole), strict=True))
    wanted = [outputs[name] for name in names]
    needed = ancestors(wanted)
    gm = copy_subgraph(
        [node for node in placeholders(whole) if node in needed],
        [node for node in whole.graph.nodes if node in needed and node.op == "call_function"],
        wanted,
        lambda node: dict(node.meta),
    )
    return Prelude(gm, [Source("prelude", name) for name in names])


def _parameter_meta(unit: Compilation, variant: Variant) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for instance in unit.structure.instances:
        nodes = placeholders(variant.local[instance.block].gm)
        for node, source in zip(nodes, instance.sources, strict=False):
            if source.kind == "parameter":
                found.setdefault(source.name, {**node.meta, "name": source.name})
    return found
