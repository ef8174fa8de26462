"""Cut the layers into chunks of equal modelled cost, and put the steps of every stage in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from msc.cost.flops import nbytes
from msc.ir.errors import PlanError
from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.structure import layer_of, output_nodes, placeholders
from msc.ir.words import counted
from msc.passes.call_cost import call_cost
from msc.passes.chunks import balance, crossing
from msc.passes.compilation import Compilation
from msc.passes.schedules.balance import even_stages
from msc.passes.schedules.rules import AUTO, Rules, may_have, rules_of
from msc.passes.schedules.schedule import Schedule, scheduled
from msc.passes.schedules.search import Cut, ranked_schedules
from msc.passes.schedules.stages import Stages
from msc.passes.schedules.timeline import Costs, bubble_fraction
from msc.passes.split_backward import input_gradient_nodes


@dataclass(frozen=True)
class ChooseSchedule(UnitPass):
    """Chunks, and the order of each stage; changes no graph."""

    name: ClassVar[str] = "choose-schedule"
    numerics: ClassVar[str] = BIT_EXACT
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        settings = unit.settings
        blocks = _Blocks(unit)
        size = settings.mesh.axis_size("pp")
        virtual, count = settings.virtual_stages, settings.micro_batches
        if settings.schedule == AUTO:
            unit.schedules = ranked_schedules(
                size, virtual, count, len(_layers(unit)), blocks.cut, settings.memory
            )
            unit.schedule = next(unit.schedules)
        else:
            rules = rules_of(settings.schedule, size, virtual, count)
            layers = blocks.cut(rules)
            unit.schedule = scheduled(settings.schedule, rules, layers.runs, layers.costs)
        unit.remark(*described(unit.schedule))
        return 0


def usual_schedule(unit: Compilation) -> Schedule:
    """1F1B, whose memory bounds what "auto" may choose if nothing else does."""
    settings = unit.settings
    rules = rules_of("1f1b", settings.mesh.axis_size("pp"), 1, settings.micro_batches)
    layers = _Blocks(unit).cut(rules)
    return scheduled("1f1b", rules, layers.runs, layers.costs)


_KEPT = (None, "value")  # results, and values of other blocks: what is there once per micro-batch


class _Blocks:
    """What the blocks of a compilation cost and keep, on a rank with the largest shards."""

    def __init__(self, unit: Compilation) -> None:
        self.unit = unit
        self.instances = unit.structure.instances
        self.forward: dict[str, float] = {}
        self.backward: dict[str, float] = {}
        self.weight: dict[str, float] = {}  # the part of the backward that can wait
        self._cuts: dict[tuple[Stages, bool], Cut] = {}
        for name in unit.structure.blocks:
            programs = unit.variants[0].differentiated[name]
            self.forward[name] = _cost(unit, _nodes(programs.forward))
            self.backward[name] = _cost(unit, _nodes(programs.backward))
            self.weight[name] = 0.0
            if programs.backward is not None:
                now = input_gradient_nodes(programs)
                later = [node for node in _nodes(programs.backward) if node not in now]
                self.weight[name] = _cost(unit, later)

    def cut(self, rules: Rules) -> Cut:
        """Chunks of equal cost; `PlanError` if there are more of them than layers."""
        key = rules.stages, rules.split
        if key not in self._cuts:
            self._cuts[key] = self._cut(rules)
        return self._cuts[key]

    def _cut(self, rules: Rules) -> Cut:
        _check_layers(self.unit, rules.stages)
        whole = [self.forward[i.block] + self.backward[i.block] for i in self.instances]
        runs = even_stages(whole, balance(whole, rules.stages.num_chunks), rules.stages)
        weight = self.weight if rules.split else dict.fromkeys(self.weight, 0.0)

        def of_chunks(of_block: Callable[[str], float]) -> tuple[float, ...]:
            return tuple(sum(of_block(self.instances[i].block) for i in run) for run in runs)

        costs = Costs(
            of_chunks(self.forward.__getitem__),
            of_chunks(lambda name: self.backward[name] - weight[name]),
            of_chunks(weight.__getitem__),
            self._transfer(runs),
        )
        return Cut(runs, costs, of_chunks(self._saved), self._state(rules.stages, runs))

    def _transfer(self, runs: list[list[int]]) -> float:
        """The cost of sending what crosses the widest border between two chunks."""
        chunk_of = {index: chunk for chunk, run in enumerate(runs) for index in run}
        meta = self.unit.variants[0].value_meta
        borders = crossing(self.instances, chunk_of, len(runs))
        widest = max(sum(nbytes(meta[key]["val"]) for key in keys) for keys in borders)
        return self.unit.settings.cost.send(widest)

    def _saved(self, block: str) -> float:
        """Bytes that a block saves of one micro-batch: of its results, and of other blocks'."""
        programs = self.unit.variants[0].differentiated[block]
        given = placeholders(programs.forward)
        kept = output_nodes(programs.forward)[programs.num_outputs :]
        kept += [given[each.index] for each in programs.saved if each.is_input]
        return float(sum(nbytes(n.meta["val"]) for n in kept if n.meta.get("kind") in _KEPT))

    def _state(self, stages: Stages, runs: list[list[int]]) -> tuple[float, ...]:
        """Bytes of each stage's parameters, gradients and optimizer states."""
        found: list[dict[str, int]] = [{} for _ in range(stages.count)]
        for chunk, run in enumerate(runs):
            for index in run:
                instance = self.instances[index]
                nodes = placeholders(self.unit.variants[0].local[instance.block].gm)
                for node, source in zip(nodes, instance.sources, strict=False):
                    if source.kind == "parameter":
                        size = nbytes(node.meta["val"]) * self._copies(source.name)
                        found[stages.of(chunk)][source.name] = size
        return tuple(float(sum(names.values())) for names in found)

    def _copies(self, parameter: str) -> int:
        """The parameter, its gradient, and what the optimizer keeps of it."""
        settings = self.unit.settings
        states = () if settings.optimizer is None else settings.optimizer_of(parameter).state_names
        return 2 + len(states)


def described(schedule: Schedule) -> list[str]:
    """Lines for the dump: name, bubble, and the steps of every stage."""
    bubble = bubble_fraction(schedule.orders, schedule.stages, schedule.modelled)
    lines = [f"{schedule.name}: modelled bubble {bubble:.1%}"]
    return lines + [
        f"stage {stage}: {' '.join(map(str, order))}" for stage, order in enumerate(schedule.orders)
    ]


def _check_layers(unit: Compilation, stages: Stages) -> None:
    layers = _layers(unit)
    if stages.num_chunks <= len(layers):
        return
    name = unit.settings.schedule
    names = ", ".join(path or "the model" for path in layers[:8])
    count = counted(len(layers), "layer")
    model = f"but the model has only {count} to put on them ({names})."
    if stages.virtual == 1:
        raise PlanError(
            f"The mesh has {stages.count} pipeline stages (pp={stages.count}), {model} "
            f"Use pp={len(layers)} or less."
        )
    instead = "a smaller pp"
    instead += (
        " or fewer virtual stages" if name == AUTO or may_have(name, 1) else ", or another schedule"
    )
    raise PlanError(
        f"Schedule '{name}' makes {stages.num_chunks} chunks (pp={stages.count}, "
        f"{stages.virtual} virtual stages), {model} Use {instead}."
    )


def _layers(unit: Compilation) -> list[str]:
    """Paths of the instances that are layers; of all where none is."""
    paths = [instance.path for instance in unit.structure.instances]
    return [path for path in paths if layer_of(path) is not None] or paths


def _nodes(gm: fx.GraphModule | None) -> list[fx.Node]:
    return list(gm.graph.nodes) if gm is not None else []


def _cost(unit: Compilation, nodes: list[fx.Node]) -> float:
    """Modelled cost of a part of a block."""
    return sum(call_cost(node, unit.settings) for node in nodes)
