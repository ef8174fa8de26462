"""Cut the instances into chunks of equal modelled cost, and build each chunk's graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from msc.cost import call_flops, window_of
from msc.cost.flops import is_gemm, nbytes
from msc.ir.errors import PlanError
from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.structure import Instance, Source, layer_of, output_nodes, placeholders
from msc.ir.values import operand_nodes, tensors_of
from msc.passes.chunks import Block, Chunk, ChunkBuilder, Key, Prelude, balance, crossing
from msc.passes.compilation import Compilation, Variant
from msc.passes.cut import copy_subgraph
from msc.passes.sharding.calls import is_call


@dataclass(frozen=True)
class BuildChunks(UnitPass):
    """One chunk for each pipeline stage."""

    name: ClassVar[str] = "build-chunks"
    numerics: ClassVar[str] = BIT_EXACT
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        stages = unit.settings.mesh.axis_size("pp")
        instances = unit.structure.instances
        runs = stage_runs(unit)
        chunk_of = {index: chunk for chunk, run in enumerate(runs) for index in run}
        _record_stages(unit, chunk_of)
        received = crossing(instances, chunk_of, stages)
        written = _written(unit, chunk_of, stages)
        for variant in unit.variants:
            _build(unit, variant, [[instances[i] for i in run] for run in runs], received, written)
        return sum(len(variant.chunks) for variant in unit.variants)


def stage_runs(unit: Compilation) -> list[list[int]]:
    """The numbers of the instances of each stage; decided once, at the first call."""
    if unit.runs is None:
        stages = unit.settings.mesh.axis_size("pp")
        _check_layers(unit, stages)
        costs = {name: _cost(unit, name) for name in unit.structure.blocks}
        unit.runs = balance([costs[each.block] for each in unit.structure.instances], stages)
    return unit.runs


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
            runs[index],
            _blocks(variant, index),
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


def _blocks(variant: Variant, stage: int) -> dict[str, Block]:
    return {
        name: Block(variant.at_stage.get((stage, name), programs), variant.local[name].coordinates)
        for name, programs in variant.differentiated.items()
    }


def _check_layers(unit: Compilation, stages: int) -> None:
    paths = [instance.path for instance in unit.structure.instances]
    layers = [path for path in paths if layer_of(path) is not None] or paths
    if stages > len(layers):
        names = ", ".join(path or "the model" for path in layers[:8])
        raise PlanError(
            f"The mesh has {stages} pipeline stages (pp={stages}), but the model has only "
            f"{len(layers)} layers to put on them ({names}). Use pp={len(layers)} or less."
        )


def _cost(unit: Compilation, block: str) -> float:
    """Modelled cost of a block's forward and backward on a rank with the largest shards."""
    programs = unit.variants[0].differentiated[block]
    total = 0.0
    for gm in (programs.forward, programs.backward):
        if gm is None:
            continue
        for node in gm.graph.nodes:
            if not is_call(node):
                continue
            operands = [tensors_of(o)[0] for o in operand_nodes(node) if tensors_of(o)]
            results = tensors_of(node)
            flops = (
                call_flops(node.target, operands, results, window_of(node))
                if is_gemm(node.target)
                else 0
            )
            traffic = sum(nbytes(t) for t in (*operands, *results))
            total += unit.settings.cost.compute(flops, traffic)
    return total


def _record_stages(unit: Compilation, chunk_of: dict[int, int]) -> None:
    for instance in unit.structure.instances:
        for source in instance.sources:
            if source.kind == "parameter":
                stages = unit.stages_of.setdefault(source.name, [])
                if chunk_of[instance.index] not in stages:
                    stages.append(chunk_of[instance.index])
    for stages in unit.stages_of.values():
        stages.sort()


def _written(unit: Compilation, chunk_of: dict[int, int], stages: int) -> list[dict[str, Source]]:
    """For each chunk the buffers that it writes: all of its own, and those that it reads.

    Raises `PlanError` where a stage reads what a layer of another stage writes.
    """
    instances = unit.structure.instances
    reads: list[set[str]] = []
    for stage in range(stages):
        own = [instance for instance in instances if chunk_of[instance.index] == stage]
        nodes = placeholders(_prelude(unit, own, {}).gm)
        reads.append({node.meta["name"] for node in nodes if node.meta["kind"] == "buffer"})
    written: list[dict[str, Source]] = [{} for _ in range(stages)]
    for name, source in unit.structure.buffers.items():
        readers = [stage for stage in range(stages) if name in reads[stage]]
        if source.kind == "prelude":
            for stage in readers or [0]:
                written[stage][name] = source
            continue
        writer = chunk_of[source.instance]
        written[writer][name] = source
        if any(stage != writer for stage in readers):
            raise PlanError(
                f"Buffer '{name}' is written on pipeline stage {writer} and read on stages "
                f"{readers}. Give each layer a buffer of its own, or use pp=1."
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
    needed = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
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
