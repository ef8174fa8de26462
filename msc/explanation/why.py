"""Why the values of a module lie as they do: what else they could be, and what that would cost."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from msc.cost.flops import is_gemm
from msc.explanation.facts import Alternative, Choice, Reasons
from msc.explanation.overview import Overview, module_of, named, relative
from msc.fallbacks import fallback
from msc.ir.errors import PlanError, UserError
from msc.ir.placement import State
from msc.ir.structure import Instance
from msc.ir.values import describe
from msc.passes.sharding.calls import is_call
from msc.passes.sharding.placing import Placing
from msc.passes.sharding.rule import Strategy
from msc.passes.sharding.search import Placed

_SMALL = 8
"""Calls of a module up to which all of them are priced; of more, only the products."""
PRICED = 64
"""Alternatives that are priced at most; each is a search of its own."""


@dataclass(frozen=True)
class Selection:
    """The nodes of a distinct block that belong to a module, or the parameter of that name."""

    block: str
    path: str  # as the block's first instance calls it
    calls: tuple[fx.Node, ...]
    parameters: tuple[fx.Node, ...]


class Why:
    """Answers questions about modules of one compilation."""

    def __init__(self, overview: Overview) -> None:
        self.overview = overview
        self.unit = overview.unit
        self._costs: dict[tuple[fx.Node, State | Strategy], float | None] = {}

    def reasons(self, path: str) -> Reasons:
        """The choices and collectives of the module, layer or parameter at `path`.

        `UserError` if the model has none of that name.
        """
        chosen = self._select(path)
        choices, unpriced = self._choices(chosen)
        titles = dict.fromkeys(self.overview.title(each.block) for each in chosen)
        placed = self.unit.placed
        concerned = [
            node
            for each in chosen
            for node in (*each.calls, *(u for p in each.parameters for u in p.users))
            if is_call(node)
        ]
        return Reasons(
            path,
            ", ".join(titles),
            placed.cost if placed is not None else 0.0,
            self.unit.settings.plan is not None,
            tuple(choices),
            tuple(
                communication
                for each in chosen
                for home, communication in self.overview.communications(each.block)
                if _inside(home, each.path) and each.calls
            ),
            tuple(filter(None, dict.fromkeys(fallback(self.unit, node) for node in concerned))),
            unpriced,
        )

    # -- what belongs to a path

    def _select(self, path: str) -> list[Selection]:
        found = []
        for name, gm in self.unit.structure.blocks.items():
            instances = [i for i in self.unit.structure.instances if i.block == name]
            for inner in dict.fromkeys((*_as_first(path, instances), path)):
                calls = [n for n in gm.graph.nodes if is_call(n) and _inside(module_of(n), inner)]
                nodes = gm.graph.find_nodes(op="placeholder")
                parameters = [n for n in nodes if n.meta["kind"] == "parameter"]
                read = [
                    n
                    for n in parameters
                    if n.meta["name"] == inner
                    or _inside(n.meta["name"], inner)
                    or any(user in calls for user in n.users)
                ]
                if calls or read:
                    found.append(Selection(name, inner, tuple(calls), tuple(read)))
                    break
        if not found:
            raise UserError(self._unknown(path))
        return found

    def _unknown(self, path: str) -> str:
        known: dict[str, None] = {}
        for instance in self.unit.structure.instances:
            gm = self.unit.structure.blocks[instance.block]
            first = next(i for i in self.unit.structure.instances if i.block == instance.block)
            for node in gm.graph.nodes:
                if is_call(node) and module_of(node):
                    module = module_of(node)
                    if _inside(module, first.path):
                        module = instance.path + module[len(first.path) :]
                    known[module] = None
        close = difflib.get_close_matches(path, list(known), 3, 0.4) or list(known)[:3]
        return (
            f"The model computes nothing in a module '{path}', and has no parameter of that name. "
            f"There are {', '.join(close)}; program.explain() lists all."
        )

    # -- what else there is

    def _choices(self, chosen: Sequence[Selection]) -> tuple[list[Choice], int]:
        placing, placed = self.unit.placing, self.unit.placed
        if placing is None or placed is None:
            return [], 0
        questions = [q for q in self._questions(placing, placed, chosen) if len(q.options) > 1]
        choices: list[Choice] = []
        priced = 0
        for question in questions:
            priced += len(question.options) - 1
            if priced > PRICED and choices:
                break
            choices.append(self._answer(question, placing, placed))
        return choices, len(questions) - len(choices)

    def _questions(
        self, placing: Placing, placed: Placed, chosen: Sequence[Selection]
    ) -> Iterator[_Question]:
        """Every parameter and call that could be another; weights and their products first."""
        vectors: list[_Question] = []
        for selection in chosen:
            base = self.overview.base(selection.block)
            for node in selection.parameters:
                title = f"{relative(node.meta['name'], base)} {describe(node.meta['val'])}"
                states = placing.candidates.states(node)
                question = _Question(title, node, placed.placeholders[node], tuple(states))
                if node.meta["val"].dim() < 2:
                    vectors.append(question)
                else:
                    yield question
            few = len(selection.calls) <= _SMALL
            for node in selection.calls:
                title = f"{named(node, base)} -> {describe(node.meta['val'])}"
                ways = placing.candidates.strategies[node]
                question = _Question(title, node, placed.strategies[node], tuple(ways))
                if is_gemm(node.target):
                    yield question
                elif few:
                    vectors.append(question)
        yield from vectors

    def _answer(self, question: _Question, placing: Placing, placed: Placed) -> Choice:
        alternatives = []
        for option in question.options:
            chosen = option == question.chosen
            cost = placed.cost if chosen else self._cost(placing, question.node, option)
            text = str(option) if isinstance(option, State) else _way(option)
            alternatives.append(Alternative(text, cost, chosen))
        alternatives.sort(key=lambda a: (not a.chosen, a.cost is None, a.cost or 0.0))
        return Choice(question.title, tuple(alternatives))

    def _cost(self, placing: Placing, node: fx.Node, option: State | Strategy) -> float | None:
        """The cost of the best plan in which a node has this state or strategy."""
        if (node, option) not in self._costs:
            if isinstance(option, State):
                tied = next(nodes for nodes in placing.parameters().values() if node in nodes)
                forced = placing.restricted({each: frozenset({option}) for each in tied})
            else:
                forced = placing.forced(node, option)
            try:
                self._costs[node, option] = forced.solve().cost
            except PlanError:
                self._costs[node, option] = None
        return self._costs[node, option]


@dataclass(frozen=True)
class _Question:
    """A parameter or call, what it is, and all that it could be."""

    title: str
    node: fx.Node
    chosen: State | Strategy
    options: tuple[State | Strategy, ...]


def _way(strategy: Strategy) -> str:
    def listed(states: Iterable[State]) -> str:
        return ", ".join(map(str, states))

    return f"{listed(strategy.operands)} -> {listed(strategy.results)}"


def _inside(path: str, outer: str) -> bool:
    """Whether a module or parameter is `outer`, or inside it."""
    return path == outer or path.startswith(f"{outer}.")


def _as_first(path: str, instances: Sequence[Instance]) -> Iterator[str]:
    """A path inside one instance of a block as the first instance has it."""
    for instance in instances:
        if _inside(path, instance.path):
            yield instances[0].path + path[len(instance.path) :]
