"""Choose the placements over one axis: the exact minimum of modelled cost, as a cost network.

A variable stands for each call, whose options are its strategies, and for each placeholder, whose
options are its states, of each distinct block (weighted by its instances). A value and its readers
share a table: turning the state in which it is computed into one in which it is read costs the
collectives of both directions, once for all readers that want the same. What crosses a block border
has one state there, that in which every reader gets it; the block that computes it may convert it
first. Tied parameters have one state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from msc.cost import CostModel, call_flops, window_of
from msc.cost.flops import is_gemm, nbytes
from msc.ir.errors import PlanError
from msc.ir.placement import REPLICATED, VARYING, Shard, State
from msc.ir.structure import Source, Structure, output_nodes, placeholders
from msc.ir.values import operand_nodes, tensors_of
from msc.passes.sharding.axes import Axis, local_shape
from msc.passes.sharding.calls import Value, is_call, operands_of, value_of
from msc.passes.sharding.candidates import Candidates, value_differentiable
from msc.passes.sharding.network import CostNetwork, NoSolutionError
from msc.passes.sharding.prices import Payload, conversion_cost, send_cost
from msc.passes.sharding.reads import Read, add_reads
from msc.passes.sharding.rule import Strategy


@dataclass
class Placed:
    """The chosen strategy of every call and state of every placeholder over one axis."""

    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    placeholders: dict[fx.Node, State] = field(default_factory=dict)
    outputs: dict[Value, State] = field(default_factory=dict)  # as other blocks read them
    loss: State = REPLICATED
    cost: float = 0.0


def parameter_and_gradient(node: fx.Node, name: str) -> float:
    """Bytes of a parameter and, if it trains, its gradient."""
    return nbytes(node.meta["val"]) * (2 if node.meta.get("differentiable") else 1)


@dataclass(frozen=True)
class Step:
    """What the search knows of a training step besides the model and the axis.

    share: the part of a value that one micro-batch of one rank holds, by dp and mb alone.
    stages: pipeline stages, over which the instances are spread.
    memory: bytes that one rank may hold of parameters, their gradients and optimizer state. What a
        stage holds is not known before the instances are cut into stages, so their average is
        bounded: a necessary condition. Activations are left to the check of the whole program.
    held: bytes that a whole parameter takes, with its gradient and the optimizer's state.
    """

    share: Callable[[Value], float] = lambda value: 1.0
    micro_batches: int = 1
    stages: int = 1
    memory: float = math.inf
    held: Callable[[fx.Node, str], float] = parameter_and_gradient


def search(
    structure: Structure, candidates: Candidates, axis: Axis, model: CostModel, step: Step
) -> Placed:
    """Find the cheapest placement over `axis`.

    Raises:
        PlanError: no placement is legal, or none keeps to the memory.
    """
    return _Search(structure, candidates, axis, model, step).run()


def priced(model: CostModel, structure: Structure, step: Step) -> CostModel:
    """The cost model with a weight for a round of messages that suits the model's sizes."""
    # a tenth of what passes from layer to layer: saving bytes by many small messages is no gain
    # on any network, and a model of another size has the same best plan
    return replace(model, message_bytes=_border_bytes(structure, step) / 10)


class _Search:
    def __init__(
        self,
        structure: Structure,
        candidates: Candidates,
        axis: Axis,
        model: CostModel,
        step: Step,
    ) -> None:
        self.structure = structure
        self.candidates = candidates
        self.axis = axis
        self.step = step
        self.model = priced(model, structure, step)
        self.network = CostNetwork()
        self.variables: dict[fx.Node, int] = {}
        self.states: dict[fx.Node, list[State]] = {}
        self.reads: dict[Value, list[Read]] = {}
        self.borders: dict[Value, fx.Node] = {}
        self.weights: dict[fx.Node, int] = {}
        self.equal: set[tuple[fx.Node, fx.Node]] = set()

    def run(self) -> Placed:
        for name, gm in self.structure.blocks.items():
            for node in gm.graph.nodes:
                self.weights[node] = self.structure.counts[name]
                if node.op == "placeholder":
                    self._placeholder(node)
                elif is_call(node):
                    self._call(node)
        self._parameters()
        self._borders()
        loss = self._loss()
        for value, reads in self.reads.items():
            self._add_reads(value, reads)
        return self._solve(loss)

    # -- variables

    def _placeholder(self, node: fx.Node) -> None:
        weight = self.weights[node]
        self.states[node] = self.candidates.choices(node)
        costs = [weight * self._holding(node, state) for state in self.states[node]]
        self.variables[node] = self.network.variable(costs)

    def _holding(self, node: fx.Node, state: State) -> float:
        """What a placeholder costs in a state."""
        if node.meta["kind"] != "parameter" or isinstance(state.value, Shard):
            return 0.0
        penalty = self._parameter_penalty(node)
        if state != VARYING:
            return penalty
        # once per step, in a bucket with others: cheaper than the same bytes on their own
        reduce = self.model.bucketed(nbytes(node.meta["val"]), self.axis.size)
        return penalty + reduce / (2 * self.step.micro_batches)

    def _parameter_penalty(self, node: fx.Node) -> float:
        """Cost of holding a weight whole; vectors (biases, norms) are too small to count."""
        if node.meta["val"].dim() < 2:
            return 0.0
        tokens = 1
        for user in node.users:
            results = tensors_of(user)
            if results and results[0].dim():
                rows = results[0].numel() // results[0].shape[-1]
                tokens = max(tokens, int(rows * self.step.share((user, 0))))
        return self.model.replicated_parameter(node.meta["val"].numel(), tokens, self.axis.size)

    def _call(self, node: fx.Node) -> None:
        listed = self.candidates.strategies[node]
        work = self._work(node) * self.weights[node]
        if not listed:
            raise PlanError(
                f"No placement over '{self.axis.name}' (size {self.axis.size}) was found: "
                f"{node.meta.get('module_path') or node.name} ({node.target}) has no strategy. "
                "Use a smaller axis."
            )
        even = 1 / self.axis.size
        costs = [work * (strategy.share - even) for strategy in listed]
        self.variables[node] = self.network.variable(costs)
        for position, value in enumerate(operands_of(node)):
            wanted = [strategy.operands[position] for strategy in listed]
            self.reads.setdefault(value, []).append(Read(self.variables[node], wanted))

    def _work(self, node: fx.Node) -> float:
        """What a whole call costs, forward and backward."""
        operands = [tensors_of(o)[0] for o in operand_nodes(node) if tensors_of(o)]
        results = list(tensors_of(node))
        gemm = is_gemm(node.target)
        share = self.step.share((node, 0))
        work = call_flops(node.target, operands, results, window_of(node)) * share if gemm else 0.0
        traffic = 0.0 if gemm else sum(nbytes(t) for t in (*operands, *results)) * share
        passes = 3 if any(value_differentiable((node, i)) for i in range(len(results))) else 1
        return self.model.compute(work, traffic) * passes

    # -- what ties variables together

    def _parameters(self) -> None:
        """Parameters: one state for all placeholders of one, and what it takes of the memory."""
        first: dict[str, fx.Node] = {}
        amounts: dict[fx.Node, float] = {}
        for _, node, source in _sources(self.structure):
            if source.kind != "parameter":
                continue
            if source.name in first:
                self._same(first[source.name], node)
                continue
            first[source.name] = node
            held = self.step.held(node, source.name) / self.step.stages
            amounts[node] = amounts.get(node, 0.0) + held
        for node, held in amounts.items():
            parts = [
                local_shape(node.meta["val"].shape, (s,), (self.axis,)) for s in self.states[node]
            ]
            whole = max(1, node.meta["val"].numel())
            amounts_of = [held * math.prod(part) / whole for part in parts]
            self.network.amount(self.variables[node], amounts_of)

    def _borders(self) -> None:
        """Values of other blocks: read as the first placeholder has them, and so have the rest."""
        farthest: dict[tuple[int, int], int] = {}
        for index, node, source in _sources(self.structure):
            if source.kind != "block":
                continue
            value = _output(self.structure, source.instance, source.output)
            key = (source.instance, source.output)
            farthest[key] = max(farthest.get(key, 0), index - source.instance)
            if value not in self.borders:
                self.borders[value] = node
                read = Read(self.variables[node], self.states[node])
                self.reads.setdefault(value, []).append(read)
            self._same(self.borders[value], node)
        distances: dict[Value, int] = {}
        for (instance, output), distance in farthest.items():
            value = _output(self.structure, instance, output)
            distances[value] = distances.get(value, 0) + distance
        for value, distance in distances.items():
            self._sends(value, distance)

    def _sends(self, value: Value, distance: int) -> None:
        """Price the stage borders that a value crosses on its way over `distance` instances.

        Which those are is not known yet: every step from one instance to the next is as likely.
        """
        borders = max(1, len(self.structure.instances) - 1)
        crossings = distance * min(1.0, (self.step.stages - 1) / borders)
        if not crossings:
            return
        node = self.borders[value]
        payload, gradient = Payload.of(value, self.step.share(value)), value_differentiable(value)
        prices = [
            send_cost(state, payload, self.axis.size, gradient, self.model) * crossings
            for state in self.states[node]
        ]
        self.network.table([self.variables[node]], np.asarray(prices))

    def _same(self, left: fx.Node, right: fx.Node) -> None:
        """Give two placeholders one state; the many instances of a block say so many times."""
        if left is not right and (left, right) not in self.equal:
            self.equal.add((left, right))
            equal = [[a == b for b in self.states[right]] for a in self.states[left]]
            costs = np.where(np.asarray(equal), 0.0, np.inf)
            self.network.table([self.variables[left], self.variables[right]], costs)

    def _loss(self) -> int:
        """The loss ends replicated or as a sum over the axis; its gradient's seed is one then."""
        source = self.structure.loss
        end = self.network.variable([0.0] * len(self.candidates.loss))
        value = _output(self.structure, source.instance, source.output)
        self.reads.setdefault(value, []).append(Read(end, self.candidates.loss))
        return end

    def _add_reads(self, value: Value, reads: list[Read]) -> None:
        node, index = value
        if node.op == "placeholder":
            have = self.states[node]
        else:
            have = [strategy.results[index] for strategy in self.candidates.strategies[node]]
        add_reads(
            self.network,
            Read(self.variables[node], have),
            reads,
            self._conversions(value),
        )

    def _conversions(self, value: Value) -> Callable[[State, State], float]:
        gradient = value_differentiable(value)
        payload = Payload.of(value, self.step.share(value))
        parameter = value[0].op == "placeholder" and value[0].meta["kind"] == "parameter"

        def cost(have: State, want: State) -> float:
            if parameter and isinstance(have.value, Shard) and have != want:
                return math.inf  # a sharded weight is not gathered: that is ZeRO's business
            found = conversion_cost(have, want, payload, self.axis.size, gradient, self.model)
            return math.inf if found is None else found * self.weights[value[0]]

        return cost

    def _solve(self, loss: int) -> Placed:
        axis = f"'{self.axis.name}' (size {self.axis.size})"
        try:
            solution = self.network.solve(self.step.memory)
        except NoSolutionError as error:
            if math.isinf(error.least):
                raise PlanError(
                    f"No placement over {axis} was found: the strategies of the model's calls "
                    "contradict each other. Use a smaller axis."
                ) from error
            raise PlanError(
                "Parameters, gradients and optimizer state need at least "
                f"{math.ceil(error.least):,} bytes per rank, on average over "
                f"{self.step.stages} pipeline stages, however they are split over {axis}; but "
                f"memory is {int(self.step.memory):,}. Use more tp or pp ranks."
            ) from error
        placed = Placed(loss=self.candidates.loss[solution.options[loss]], cost=solution.cost)
        for node, variable in self.variables.items():
            option = solution.options[variable]
            if node.op == "placeholder":
                placed.placeholders[node] = self.states[node][option]
            else:
                placed.strategies[node] = self.candidates.strategies[node][option]
        for value, node in self.borders.items():
            placed.outputs[value] = placed.placeholders[node]
        return placed


def _sources(structure: Structure) -> Iterator[tuple[int, fx.Node, Source]]:
    """Every instance's index, with each of its placeholders and where that gets its value."""
    for instance in structure.instances:
        nodes = placeholders(structure.blocks[instance.block])
        for node, source in zip(nodes, instance.sources, strict=True):
            yield instance.index, node, source


def _output(structure: Structure, instance: int, output: int) -> Value:
    gm = structure.blocks[structure.instances[instance].block]
    return value_of(output_nodes(gm)[output])


def _border_bytes(structure: Structure, step: Step) -> float:
    """The largest value that one block passes to another, on one rank of dp and mb."""
    values = {
        _output(structure, source.instance, source.output)
        for _, _, source in _sources(structure)
        if source.kind == "block"
    }
    sizes = (nbytes(tensors_of(node)[i]) * step.share((node, i)) for node, i in values)
    return max(sizes, default=0.0)
