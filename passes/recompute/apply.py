"""Recompute in the backward what the user's policy does not save; see `rewrite` for the picture."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from msc.ir.passes import BIT_EXACT, GraphPass, Pass, UnitPass
from msc.ir.recompute import MemoryBudget
from msc.passes.build_chunks import stage_runs
from msc.passes.compilation import Compilation, Variant
from msc.passes.differentiate import Differentiated
from msc.passes.recompute.budget import within_budget
from msc.passes.recompute.choice import Candidates, Choice, StageProgram
from msc.passes.recompute.costs import again_cost, kept_bytes
from msc.passes.recompute.policies import full, selective
from msc.passes.recompute.rewrite import recompute, saved_nodes
from msc.passes.schedules import schedule_of


@dataclass(frozen=True)
class Recompute(UnitPass):
    """Rewrite the forward and backward of distinct blocks by `Settings.recompute`.

    then: the passes that make a rank graph of the blocks, to predict the memory of a choice.

    A policy holds for all instances of a block, a budget for those of one pipeline stage. A block
    whose graphs have other calls on other tp ranks, as unequal shards may need, is left out of a
    budget, so that all ranks issue the same collectives.
    """

    then: tuple[Pass, ...] = field(default=(), repr=False)
    name: ClassVar[str] = "recompute"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, unit: Compilation) -> int:
        wanted = unit.settings.recompute
        if isinstance(wanted, MemoryBudget):
            return self._keep_budget(unit, wanted.bytes_per_rank)
        return _apply_policy(unit, wanted)

    def _keep_budget(self, unit: Compilation, budget: float) -> int:
        stages = [
            StageProgram(blocks, lambda node: again_cost(node, unit.settings))
            for blocks in _candidates(unit)
        ]
        chosen = within_budget(stages, budget, lambda choices: self._peaks(unit, choices))
        changes = 0
        for stage, choice in enumerate(chosen):
            for name, again in (choice.again if choice is not None else {}).items():
                changes += sum(_at_stage(variant, stage, name, again) for variant in unit.variants)
        for variant in unit.variants:
            for (stage, name), programs in variant.at_stage.items():
                block = f"{name}.stage{stage}"
                _record(unit, block, variant.suffix, programs)
                _remark(unit, block + variant.suffix, variant.differentiated[name], programs)
        return changes

    def _peaks(self, unit: Compilation, choices: Sequence[Choice | None]) -> list[int]:
        """The predicted bytes of each stage, of the class of ranks that needs most."""
        measure = unit.settings.measure
        assert measure is not None  # compile gives it together with a budget
        trial = copy.copy(unit)
        trial.graphs, trial.stages_of, trial.rank_graphs = {}, {}, []
        trial.variants = [replace(v, at_stage={}, chunks=[]) for v in unit.variants]
        instances = unit.structure.instances
        blocks = [{instances[index].block for index in run} for run in stage_runs(unit)]
        for variant in trial.variants:
            for stage, choice in enumerate(choices):
                for name in sorted(blocks[stage]):
                    programs = variant.differentiated[name]
                    again = choice.again.get(name, frozenset()) if choice is not None else ()
                    new = recompute(programs, _same_calls(programs, again))
                    variant.at_stage[stage, name] = _copy(programs) if new is programs else new
            for (stage, name), programs in variant.at_stage.items():
                _record(trial, f"{name}.stage{stage}", variant.suffix, programs)
        for each in self.then:
            if isinstance(each, GraphPass):
                for name, gm in list(trial.graphs.items()):
                    if each.applies_to(name):
                        each.run(gm, trial)
            else:
                assert isinstance(each, UnitPass)
                each.run(trial)
        found = [measure(gm) for gm in trial.rank_graphs]
        count = len(trial.variants)
        return [max(found[i : i + count]) for i in range(0, len(found), count)]


def _apply_policy(unit: Compilation, policy: str) -> int:
    if policy == "none":
        return 0
    loss = unit.structure.instances[unit.structure.loss.instance].block
    done: dict[int, Differentiated] = {}  # blocks that are alike on several variants
    changes = 0
    for variant in unit.variants:
        for name, programs in variant.differentiated.items():
            if id(programs) not in done:
                again = full if policy == "full" and name != loss else selective
                new = done[id(programs)] = recompute(programs, again(programs.forward))
                if new is not programs:
                    changes += 1
                    _record(unit, name, variant.suffix, new)
                    _remark(unit, name + variant.suffix, programs, new)
            variant.differentiated[name] = done[id(programs)]
    return changes


def _candidates(unit: Compilation) -> list[list[Candidates]]:
    """The blocks of each stage among whose calls a budget may choose."""
    first = unit.variants[0]
    alike = [
        name
        for name, programs in first.differentiated.items()
        if programs.backward is not None
        and all(_calls(v.differentiated[name]) == _calls(programs) for v in unit.variants)
    ]
    runs = stage_runs(unit)
    found = []
    for stage, run in enumerate(runs):
        blocks = [unit.structure.instances[index].block for index in run]
        in_flight = _in_flight(unit, stage, len(runs))
        found.append(
            [
                Candidates(
                    name,
                    first.differentiated[name].forward,
                    tuple(saved_nodes(first.differentiated[name])),
                    blocks.count(name) * in_flight,
                )
                for name in alike
                if name in blocks
            ]
        )
    return found


def _calls(programs: Differentiated) -> list[tuple[str, object]]:
    return [(node.name, node.target) for node in programs.forward.graph.nodes]


def _in_flight(unit: Compilation, stage: int, stages: int) -> int:
    """The most micro-batches of which a stage holds what the forward saved."""
    settings = unit.settings
    live = most = 0
    for step in schedule_of(settings.schedule)(stage, stages, settings.micro_batches):
        live += 1 if step.kind == "forward" else -1
        most = max(most, live)
    return most


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


def _remark(unit: Compilation, name: str, old: Differentiated, new: Differentiated) -> None:
    """Say in the dump what a block saves, before and now."""
    before, after = (sum(map(kept_bytes, saved_nodes(each))) for each in (old, new))
    assert new.backward is not None
    again = sum(n.meta.get("phase") == "recompute" for n in new.backward.graph.nodes)
    unit.remark(f"{name}: saves {after:,} bytes instead of {before:,}, {again} calls run again")


def _record(unit: Compilation, name: str, suffix: str, programs: Differentiated) -> None:
    unit.graphs[f"{name}.forward{suffix}"] = programs.forward
    if programs.backward is not None:
        unit.graphs[f"{name}.backward{suffix}"] = programs.backward
