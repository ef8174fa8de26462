"""What a compilation says about itself: what each axis shards, what it sends, what fell back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from msc.cost.flops import is_gemm, nbytes
from msc.fallbacks import find_fallbacks, forward_flops
from msc.ir.communication import collective_kind, group_of, moved_tensors
from msc.ir.placement import Shard
from msc.ir.structure import placeholders
from msc.ir.values import operand_nodes, tensors_of
from msc.passes.compilation import Compilation
from msc.passes.schedules.schedule import Schedule
from msc.passes.schedules.timeline import bubble_fraction, peak_held
from msc.passes.sharding.calls import is_call
from msc.passes.sharding.rule import Strategy


@dataclass(frozen=True)
class ScheduleReport:
    """The pipeline's schedule.

    bubble: idle time over the work of the busiest stage, at the modelled costs of the chunks and
        with transfers.
    live_activations: of each stage, the most pairs of micro-batch and chunk that it holds
        activations of at once.
    """

    name: str
    virtual_stages: int
    bubble: float
    live_activations: tuple[int, ...]


@dataclass(frozen=True)
class CompileReport:
    """Facts about a compiled program.

    sharded: axis -> {"flops", "parameters"}: the fraction that the axis divides among its ranks.
        "flops" counts the forward; "parameters" counts bytes, between steps.
    collectives: per class of ranks, kind -> (calls per step, bytes per step of one rank).
    fallbacks: calls that run whole on every rank of an axis, with reason, FLOPs and bytes.
    replicated: parameters with two or more dims that every tp rank holds whole.
    notes: what the compiler did otherwise than a user might expect.
    cpu_seconds: pass -> seconds; "capture" is the first.
    rewrites: each place that a rewrite looked at: what was done, or why it was left alone.
    fused_collectives: each collective beside a GEMM: that it was fused, or why it was left alone.
    fused_losses: with fuse_loss, each cross entropy: that it is one op with its linear layer, or
        why it is not.
    epilogues: the same of each sum beside a norm, and of each activation, gate and residual sum
        behind a linear.
    model_flops: of the GEMMs of a step on one device: the forward, and twice that for the backward
        (Narayanan et al., SC 2021).
    schedule: what was chosen, and what it costs; chunk_stages: the pipeline stage of each chunk.
    """

    sharded: Mapping[str, Mapping[str, float]]
    collectives: tuple[Mapping[str, tuple[int, int]], ...]
    fallbacks: tuple[str, ...]
    notes: tuple[str, ...]
    schedule: ScheduleReport
    chunk_stages: tuple[int, ...]
    replicated: tuple[str, ...] = ()
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    distinct_blocks: int = 0
    instances: int = 0
    chunks: tuple[tuple[str, ...], ...] = ()
    search_cost: float = 0.0
    rewrites: tuple[str, ...] = ()
    fused_collectives: tuple[str, ...] = ()
    fused_losses: tuple[str, ...] = ()
    epilogues: tuple[str, ...] = ()
    model_flops: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data; without times, so that equal programs have equal reports."""
        return {
            "sharded": {axis: dict(found) for axis, found in self.sharded.items()},
            "collectives": [{k: list(v) for k, v in stage.items()} for stage in self.collectives],
            "fallbacks": list(self.fallbacks),
            "notes": list(self.notes),
            "replicated": list(self.replicated),
            "distinct_blocks": self.distinct_blocks,
            "instances": self.instances,
            "chunks": [list(chunk) for chunk in self.chunks],
            "rewrites": list(self.rewrites),
            "fused_collectives": list(self.fused_collectives),
            "fused_losses": list(self.fused_losses),
            "epilogues": list(self.epilogues),
            "model_flops": self.model_flops,
            "schedule": {
                **asdict(self.schedule),
                "live_activations": list(self.schedule.live_activations),
            },
            "chunk_stages": list(self.chunk_stages),
        }


def make_report(unit: Compilation, capture_seconds: float, notes: list[str]) -> CompileReport:
    """Read the report of a finished compilation off its graphs and plans."""
    seconds = {"capture": capture_seconds}
    for record in unit.log:
        seconds[record.name] = seconds.get(record.name, 0.0) + record.cpu_seconds
    return CompileReport(
        sharded=_sharded(unit),
        collectives=tuple(_collectives(gm) for gm in unit.rank_graphs),
        fallbacks=tuple(find_fallbacks(unit)),
        notes=(*notes, *unit.notes, *_head_notes(unit)),
        replicated=tuple(_replicated(unit)),
        cpu_seconds=seconds,
        distinct_blocks=len(unit.structure.blocks),
        instances=len(unit.structure.instances),
        chunks=tuple(
            tuple(instance.path for instance in chunk.instances)
            for chunk in unit.variants[0].chunks
        ),
        search_cost=unit.placed.cost if unit.placed else 0.0,
        rewrites=tuple(map(str, unit.findings)),
        fused_collectives=tuple(map(str, unit.fusions)),
        fused_losses=tuple(map(str, unit.heads)),
        epilogues=tuple(map(str, (*unit.norm_sums, *unit.epilogues))),
        model_flops=_model_flops(unit),
        schedule=_schedule(unit.schedule),
        chunk_stages=tuple(chunk.stage for chunk in unit.variants[0].chunks),
    )


def _schedule(chosen: Schedule) -> ScheduleReport:
    return ScheduleReport(
        chosen.name,
        chosen.stages.virtual,
        bubble_fraction(chosen.orders, chosen.stages, chosen.modelled),
        tuple(round(peak_held(order)) for order in chosen.orders),
    )


def _model_flops(unit: Compilation) -> int:
    forward = sum(
        unit.structure.counts.get(name, 0) * forward_flops(node)
        for name, gm in unit.structure.blocks.items()
        for node in gm.graph.nodes
        if is_gemm(node.target)
    )
    # a loss that is not separable is captured on one micro-batch
    return 3 * forward * (1 if unit.settings.separable else unit.settings.micro_batches)


def _sharded(unit: Compilation) -> dict[str, dict[str, float]]:
    mesh = unit.settings.mesh
    result: dict[str, dict[str, float]] = {}
    for axis in ("pp", "dp", "tp"):
        if mesh.axis_size(axis) > 1:
            result[axis] = {
                "flops": _sharded_flops(unit, axis),
                "parameters": _sharded_parameters(unit, axis),
            }
    return result


def _sharded_flops(unit: Compilation, axis: str) -> float:
    total = split = 0.0
    for name, gm in unit.structure.blocks.items():
        weight = unit.structure.counts.get(name, 0)
        for node in gm.graph.nodes:
            if not is_call(node):
                continue
            flops = forward_flops(node) * weight
            total += flops
            strategy: Strategy | None = None
            if axis == "dp":
                strategy = unit.batch[name].strategies[node]
            elif axis == "tp" and unit.placed is not None:
                strategy = unit.placed.strategies[node]
            if axis == "pp" or (strategy is not None and strategy.factor is not None):
                split += flops
    prelude = sum(
        forward_flops(node) for node in unit.structure.prelude.graph.nodes if is_call(node)
    )
    # the prelude is duplicated over pp and tp; over dp its rows are split
    total += prelude
    split += prelude if axis == "dp" else 0.0
    return split / total if total else 1.0


def _sharded_parameters(unit: Compilation, axis: str) -> float:
    total = split = 0
    seen: set[str] = set()
    for instance in unit.structure.instances:
        gm = unit.structure.blocks[instance.block]
        for node, source in zip(placeholders(gm), instance.sources, strict=True):
            if source.kind != "parameter" or source.name in seen:
                continue
            seen.add(source.name)
            size = nbytes(node.meta["val"])
            total += size
            if axis == "pp":
                split += size if len(unit.stages_of[source.name]) == 1 else 0
            elif axis == "dp":
                split += size if source.name in unit.data_shards else 0
            else:
                state = unit.parameter_states[source.name].get(axis)
                split += size if state is not None and isinstance(state.value, Shard) else 0
    return split / total if total else 1.0


def _replicated(unit: Compilation) -> list[str]:
    """Weights that tp does not shard, with their shapes."""
    if unit.placed is None:
        return []
    found: dict[str, None] = {}
    for instance in unit.structure.instances:
        gm = unit.structure.blocks[instance.block]
        for node, source in zip(placeholders(gm), instance.sources, strict=True):
            whole = not isinstance(unit.placed.placeholders[node].value, Shard)
            if source.kind == "parameter" and whole and node.meta["val"].dim() > 1:
                found[f"{source.name} {tuple(node.meta['val'].shape)}"] = None
    return list(found)


_INSTEAD = {0: "samples", 2: "query positions"}
_SOFTMAX = {torch.ops.aten.softmax.int, torch.ops.aten._softmax.default}


def _head_notes(unit: Compilation) -> list[str]:
    """What tp splits in attention whose heads it does not divide."""
    if unit.placed is None:
        return []
    size = unit.settings.mesh.axis_size("tp")
    found: dict[str, None] = {}
    for gm in unit.structure.blocks.values():
        for node in gm.graph.nodes:
            heads = _heads(node) if is_call(node) else None
            if heads is None or all(number % size == 0 for number in heads):
                continue
            placement = unit.placed.strategies[node].results[0].value
            if isinstance(placement, Shard) and placement.dim in _INSTEAD:
                listed = f"{heads[0]} heads" + (f" ({heads[1]} of keys)" if heads[1:] else "")
                found[
                    f"{node.meta.get('module_path') or node.name}: tp={size} does not split the "
                    f"{listed} evenly; each rank attends for its part of the "
                    f"{_INSTEAD[placement.dim]} instead"
                ] = None
    return list(found)


def _heads(node: fx.Node) -> tuple[int, ...] | None:
    """Heads of queries and keys, or of scores `[batch, heads, queries, keys]`; None if neither."""
    if node.target is torch.ops.msc.attention.default:
        query, key = (tensors_of(operand)[0] for operand in operand_nodes(node)[:2])
        return query.shape[1], key.shape[1]
    if node.target in _SOFTMAX and tensors_of(node)[0].dim() == 4:
        return (tensors_of(node)[0].shape[1],)
    return None


def _collectives(gm: fx.GraphModule) -> dict[str, tuple[int, int]]:
    """Kind -> (calls, bytes sent into the collective) of one step of one rank."""
    memo: dict[int, dict[str, tuple[int, int]]] = {}

    def count(module: fx.GraphModule) -> dict[str, tuple[int, int]]:
        if id(module) in memo:
            return memo[id(module)]
        found: dict[str, tuple[int, int]] = {}
        for node in module.graph.nodes:
            if node.op == "call_module":
                inner = count(module.get_submodule(str(node.target)))  # type: ignore[arg-type]
                for name, (calls, size) in inner.items():
                    had = found.get(name, (0, 0))
                    found[name] = (had[0] + calls, had[1] + size)
            elif (kind := _kind(node)) is not None:
                had = found.get(kind, (0, 0))
                size = _sent_bytes(node)
                found[kind] = (had[0] + 1, had[1] + size)
        memo[id(module)] = found
        return found

    return dict(sorted(count(gm).items()))


def _kind(node: fx.Node) -> str | None:
    if collective_kind(node) is not None:
        return f"{str(node.target).split('.')[1]} over {group_of(node)}"
    if getattr(node.target, "__name__", "") == "send":
        return "send over pp"
    return None


def _sent_bytes(node: fx.Node) -> int:
    """Bytes that one rank gives to a collective or a send."""
    if collective_kind(node) is not None:
        return nbytes(moved_tensors(node)[0])
    return sum(nbytes(t) for operand in node.all_input_nodes for t in tensors_of(operand))
