"""Placement over tp of hand-built graphs: the search, and all that it could have chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from msc.cost import CostModel, call_flops, window_of
from msc.cost.flops import is_gemm, nbytes
from msc.ir.placement import PARTIAL, REPLICATED, VARYING, Shard, State
from msc.ir.structure import output_nodes, placeholders
from msc.ir.values import operand_nodes, tensors_of
from msc.passes.compilation import Compilation
from msc.passes.sharding.axes import Axis
from msc.passes.sharding.calls import Value, is_call, operands_of, value_of
from msc.passes.sharding.candidates import Candidates, find_candidates, value_differentiable
from msc.passes.sharding.prices import Payload, conversion_cost, send_cost
from msc.passes.sharding.rule import Strategy
from msc.passes.sharding.search import Placed, Step, search

Chosen = dict[fx.Node, State | Strategy]
Moves = frozenset[tuple[Value, State, State]]


@dataclass
class Problem:
    """A cut compilation without batch axes, and what its calls may do over tp."""

    unit: Compilation
    candidates: Candidates
    axis: Axis
    model: CostModel
    step: Step = field(default_factory=Step)

    @classmethod
    def of(
        cls,
        unit: Compilation,
        size: int,
        model: CostModel | None = None,
        step: Step | None = None,
    ) -> Problem:
        axis = Axis("tp", size)
        blocks = unit.structure.blocks
        strategies = {
            name: {node: () for node in gm.graph.nodes if is_call(node)}
            for name, gm in blocks.items()
        }
        states = {name: {value: () for value in unit.batch[name].states} for name in blocks}
        found = find_candidates(unit.structure, axis, (), strategies, states)
        return cls(unit, found, axis, model or CostModel(), step or Step())

    def search(self) -> Placed:
        return search(self.unit.structure, self.candidates, self.axis, self.model, self.step)

    def nodes(self) -> Iterator[tuple[fx.Node, int]]:
        """Every placeholder and call with the number of its instances."""
        for name, gm in self.unit.structure.blocks.items():
            for node in gm.graph.nodes:
                if node.op == "placeholder" or is_call(node):
                    yield node, self.unit.structure.counts[name]

    def options(self, node: fx.Node) -> list[State] | list[Strategy]:
        if is_call(node):
            return self.candidates.strategies[node]
        shards = [State(p, p) for p in self.candidates.placeholders[node]]
        trains = bool(node.meta.get("differentiable"))
        if node.meta["kind"] == "parameter":
            return [REPLICATED, *([VARYING] if trains else []), *shards]
        if node.meta["kind"] == "value":
            return [REPLICATED, *([VARYING, PARTIAL] if trains else []), *shards]
        return [REPLICATED]

    # -- the cost of one choice for each node, read off the definition of the search

    def cheapest(self) -> float:
        """The least cost over every combination there is.

        A combination that already costs more than the best is left, or takes more memory: no cost
        is negative.
        """
        nodes = list(self.nodes())
        best = math.inf

        def choose(position: int, chosen: Chosen, moves: Moves, total: float) -> None:
            nonlocal best
            if position == len(nodes):
                ends = (self._end(chosen, end, moves) for end in (REPLICATED, PARTIAL))
                best = min(best, total + min(ends))
                return
            node, weight = nodes[position]
            for option in self.options(node):
                added, more = self._step(node, weight, {**chosen, node: option}, moves)
                extended = {**chosen, node: option}
                if total + added < best and self.memory(extended) <= self.step.memory:
                    choose(position + 1, extended, more, total + added)

        choose(0, {}, frozenset(), 0.0)
        return best

    def cost(self, chosen: Chosen, end: State) -> float:
        """The cost of a choice whose loss ends in the state `end`; infinite if it cannot be."""
        total = 0.0
        moves: Moves = frozenset()
        for node, weight in self.nodes():
            added, moves = self._step(node, weight, chosen, moves)
            total += added
        return total + self._end(chosen, end, moves)

    def memory(self, chosen: Chosen) -> float:
        """Bytes of the parameters chosen so far, with their gradients and moments, per stage."""
        total = 0.0
        names = set()
        for node, source in self._sources():
            if isinstance(source, tuple) or node.meta["kind"] != "parameter" or source in names:
                continue
            state = chosen.get(node)
            if isinstance(state, State):
                names.add(source)
                parts = self.axis.size if isinstance(state.value, Shard) else 1
                total += self.step.held(node, source) / parts / self.step.stages
        return total

    def _step(
        self, node: fx.Node, weight: int, chosen: Chosen, moves: Moves
    ) -> tuple[float, Moves]:
        """What a node adds, given the choices of those before it; each conversion counts once."""
        choice = chosen[node]
        reads: list[tuple[Value, State, int]] = []
        if isinstance(choice, State):
            total = weight * self._parameter(node, choice) + self._sends(node, choice)
            for other in self._tied.get(node, ()):
                if chosen.get(other, choice) != choice:
                    return math.inf, moves
            for value, count in self._made_by.get(node, {}).items():
                reads.append((value, choice, count))
        else:
            total = weight * self._work(node, choice)
            operands = zip(operands_of(node), choice.operands, strict=True)
            reads += [(value, want, weight) for value, want in operands]
        for value, want, count in reads:
            move = (value, self._have(chosen, value), want)
            if move not in moves:
                total += count * self._conversion(*move)
                moves |= {move}
        return total, moves

    def _end(self, chosen: Chosen, end: State, moves: Moves) -> float:
        loss = self.unit.structure.loss
        value = self._output(loss.instance, loss.output)
        move = (value, self._have(chosen, value), end)
        return 0.0 if move in moves else self._conversion(*move)

    def _have(self, chosen: Chosen, value: Value) -> State:
        choice = chosen[value[0]]
        return choice if isinstance(choice, State) else choice.results[value[1]]

    def _output(self, instance: int, output: int) -> Value:
        structure = self.unit.structure
        return value_of(output_nodes(structure.blocks[structure.instances[instance].block])[output])

    def _conversion(self, value: Value, have: State, want: State) -> float:
        node, _ = value
        parameter = node.op == "placeholder" and node.meta["kind"] == "parameter"
        if parameter and isinstance(have.value, Shard) and have != want:
            return math.inf
        payload = Payload.of(value, 1.0)
        gradient = value_differentiable(value)
        model = replace(self.model, message_bytes=self._border() / 10)
        cost = conversion_cost(have, want, payload, self.axis.size, gradient, model)
        return math.inf if cost is None else cost

    def _sends(self, node: fx.Node, state: State) -> float:
        """What the values that `node` is the first to read cost on their way between stages."""
        instances = self.unit.structure.instances
        total = 0.0
        for value in dict.fromkeys(s for _, s in self._sources() if isinstance(s, tuple)):
            if next(reader for reader, s in self._sources() if s == value) is not node:
                continue
            spans: dict[int, int] = {}  # producer -> instances to its last reader
            for reader in instances:
                for source in reader.sources:
                    if source.kind == "block" and value == self._output(
                        source.instance, source.output
                    ):
                        spans[source.instance] = reader.index - source.instance
            chance = min(1.0, (self.step.stages - 1) / max(1, len(instances) - 1))
            payload, gradient = Payload.of(value, 1.0), value_differentiable(value)
            price = send_cost(state, payload, self.axis.size, gradient, self.model)
            total += sum(spans.values()) * chance * price
        return total

    def _border(self) -> float:
        """Bytes of the largest value that one block passes to another."""
        sources = [s for i in self.unit.structure.instances for s in i.sources]
        values = [self._output(s.instance, s.output) for s in sources if s.kind == "block"]
        return max((nbytes(tensors_of(node)[index]) for node, index in values), default=0)

    def _parameter(self, node: fx.Node, state: State) -> float:
        if node.meta["kind"] != "parameter" or isinstance(state.value, Shard):
            return 0.0
        value = node.meta["val"]
        tokens = max(
            tensors_of(user)[0].numel() // tensors_of(user)[0].shape[-1]
            if tensors_of(user)[0].dim()
            else 1
            for user in node.users
        )
        cost = 0.0
        if value.dim() > 1:
            cost += self.model.replicated_parameter(value.numel(), tokens, self.axis.size)
        if state == VARYING:
            cost += self.model.bucketed(nbytes(value), self.axis.size) / 2
        return cost

    def _work(self, node: fx.Node, strategy: Strategy) -> float:
        operands = [tensors_of(operand)[0] for operand in operand_nodes(node)]
        results = tensors_of(node)
        if is_gemm(node.target):
            whole = self.model.compute(
                call_flops(node.target, operands, results, window_of(node)), 0
            )
        else:
            whole = self.model.compute(0, sum(nbytes(t) for t in (*operands, *results)))
        passes = 3 if node.meta["differentiable"] else 1
        return passes * whole * (strategy.share - 1 / self.axis.size)

    @cached_property
    def _tied(self) -> dict[fx.Node, list[fx.Node]]:
        """Placeholders that stand for one parameter, or read one value of another block."""
        groups: dict[str | Value, dict[fx.Node, None]] = {}
        for node, source in self._sources():
            groups.setdefault(source, {})[node] = None
        return {node: list(group) for group in groups.values() for node in group}

    @cached_property
    def _made_by(self) -> dict[fx.Node, dict[Value, int]]:
        """The values of other blocks that a placeholder reads, with the times they are made."""
        counts = self.unit.structure.counts
        block_of = {n: k for k, gm in self.unit.structure.blocks.items() for n in gm.graph.nodes}
        found: dict[fx.Node, dict[Value, int]] = {}
        for node, source in self._sources():
            if isinstance(source, tuple):
                found.setdefault(node, {})[source] = counts[block_of[source[0]]]
        return found

    def _sources(self) -> Iterator[tuple[fx.Node, str | Value]]:
        structure = self.unit.structure
        for instance in structure.instances:
            nodes = placeholders(structure.blocks[instance.block])
            for node, source in zip(nodes, instance.sources, strict=True):
                made = source.kind == "block"
                yield node, self._output(source.instance, source.output) if made else source.name


def states_of(placed: Placed) -> dict[str, str]:
    """The state of every parameter by name."""
    return {
        node.meta["name"]: str(state)
        for node, state in placed.placeholders.items()
        if node.meta["kind"] == "parameter"
    }


def ops_of(gm: fx.GraphModule, *names: str) -> dict[str, int]:
    """How often each of the named ops is called."""
    targets = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    return {name: sum(name in target for target in targets) for name in names}
