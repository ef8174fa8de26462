"""Recompute in the backward what keeps every rank within the user's `MemoryBudget`."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, Pass, UnitPass, run_passes_on
from msc.ir.recompute import POLICIES, MemoryBudget
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Compilation, Variant
from msc.passes.differentiate import Differentiated
from msc.passes.recompute.apply import record, remark
from msc.passes.recompute.budget import within_budget
from msc.passes.recompute.choice import Candidates, Choice, StageProgram
from msc.passes.recompute.policies import calls_again
from msc.passes.recompute.rewrite import recompute, saved_nodes
from msc.passes.schedules.timeline import peak_held

_NOT_SPLIT = (
    ", or a schedule such as '1f1b', whose backward is not split: what the input gradients have "
    "recomputed is else kept for the weight gradients"
)


@dataclass(frozen=True)
class KeepBudget(UnitPass):
    """Rewrite the forward and backward of distinct blocks, those of each pipeline stage alike.

    then: the passes that make a rank graph of the blocks, to predict the memory of a choice.

    A block whose graphs have other calls on other tp ranks, as unequal shards may need, is left
    out, so that all ranks issue the same collectives.
    """

    then: tuple[Pass, ...] = field(default=(), repr=False)
    name: ClassVar[str] = "keep-budget"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        budget = unit.settings.recompute
        if not isinstance(budget, MemoryBudget):
            return 0
        stages = [
            StageProgram(blocks, lambda node: call_cost(node, unit.settings))
            for blocks in _candidates(unit)
        ]
        chosen = within_budget(
            stages,
            budget.bytes_per_rank,
            lambda choices: self._peaks(unit, choices),
            _NOT_SPLIT if unit.schedule.rules.split else "",
        )
        changes = 0
        for stage, choice in enumerate(chosen):
            for name, again in (choice.again if choice is not None else {}).items():
                changes += sum(_at_stage(variant, stage, name, again) for variant in unit.variants)
        for variant in unit.variants:
            for (stage, name), programs in variant.at_stage.items():
                block = f"{name}.stage{stage}"
                record(unit, block, variant.suffix, programs)
                remark(unit, block + variant.suffix, variant.differentiated[name], programs)
        return changes

    def _peaks(self, unit: Compilation, choices: Sequence[Choice | None]) -> list[int]:
        return trial_peaks(unit, choices, self.then)


def trial_peaks(
    unit: Compilation, choices: Sequence[Choice | None], then: Sequence[Pass]
) -> list[int]:
    """The predicted bytes of each stage, of the class of ranks that needs most.

    choices: of each stage, what it recomputes; then: the passes that make rank graphs of blocks.
    The compilation stays as it is.
    """
    measure = unit.settings.measure
    assert measure is not None  # compile gives it together with a bound
    trial = copy.copy(unit)
    trial.graphs, trial.stages_of, trial.rank_graphs, trial.remarks = {}, {}, [], []
    trial.variants = [
        replace(v, differentiated={}, at_stage=_copies(v, unit, choices), chunks=[])
        for v in unit.variants
    ]
    for variant in trial.variants:
        for (stage, name), programs in variant.at_stage.items():
            record(trial, f"{name}.stage{stage}", variant.suffix, programs)
    run_passes_on(trial, then)
    found = [measure(gm) for gm in trial.rank_graphs]
    count = len(trial.variants)
    return [max(found[i : i + count]) for i in range(0, len(found), count)]


def _copies(
    variant: Variant, unit: Compilation, choices: Sequence[Choice | None]
) -> dict[tuple[int, str], Differentiated]:
    """Blocks with the choices of their stages, which passes may change."""
    found = {}
    for stage, choice in enumerate(choices):
        for name in sorted(set(unit.blocks_on(stage))):
            programs = variant.differentiated[name]
            again = choice.again.get(name, frozenset()) if choice is not None else ()
            new = recompute(programs, _same_calls(programs, again))
            found[stage, name] = _copy(programs) if new is programs else new
    return found


def _candidates(unit: Compilation) -> list[list[Candidates]]:
    """The blocks of each stage among whose calls a budget may choose."""
    first = unit.variants[0]
    loss = unit.structure.instances[unit.structure.loss.instance].block
    alike = [
        name
        for name, programs in first.differentiated.items()
        if programs.backward is not None
        and all(_calls(v.differentiated[name]) == _calls(programs) for v in unit.variants)
    ]
    return [
        [
            Candidates(
                name,
                first.differentiated[name].forward,
                tuple(saved_nodes(first.differentiated[name])),
                _copies_held(unit, stage, name),
                tuple(
                    calls_again(policy, first.differentiated[name].forward, name == loss)
                    for policy in POLICIES
                ),
            )
            for name in alike
            if name in unit.blocks_on(stage)
        ]
        for stage in range(unit.schedule.stages.count)
    ]


def _calls(programs: Differentiated) -> list[tuple[str, object]]:
    return [(node.name, node.target) for node in programs.forward.graph.nodes]


def _copies_held(unit: Compilation, stage: int, block: str) -> int:
    """Of how many instances and micro-batches a stage holds at most what a block has saved."""
    names = [[unit.structure.instances[index].block for index in run] for run in unit.schedule.runs]
    return round(peak_held(unit.schedule.orders[stage], [run.count(block) for run in names]))


def _at_stage(variant: Variant, stage: int, name: str, again: Collection[fx.Node]) -> bool:
    """Let a block recompute calls on a stage; whether that changes it."""
    programs = variant.differentiated[name]
    new = recompute(programs, _same_calls(programs, again))
    if new is not programs:
        variant.at_stage[stage, name] = new
    return new is not programs


def _same_calls(programs: Differentiated, calls: Collection[fx.Node]) -> set[fx.Node]:
    """The calls of a block that are those `calls` of the first variant's."""
    names = {node.name for node in calls}
    return {node for node in programs.forward.graph.nodes if node.name in names}


def _copy(programs: Differentiated) -> Differentiated:
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
