"""Choose the placements over one axis: the exact minimum of modelled cost, as an integer program.

One binary variable stands for each strategy of each call and each state of each placeholder, of
each distinct block (weighted by its instances). Flow variables carry a value from the state in
which it is computed to the states in which it is read; turning one into another costs the
collectives of both directions, once for all readers that want the same. Values that cross block
borders, and tied parameters, are shared variables. Solved by HiGHS (scipy.optimize.milp).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import fx

from msc.cost import CostModel, call_flops
from msc.cost.flops import is_gemm, nbytes
from msc.ir.errors import PlanError
from msc.ir.placement import PARTIAL, REPLICATED, VARYING, Partial, Shard, State
from msc.ir.structure import Structure, output_nodes
from msc.ir.values import operand_nodes, tensors_of
from msc.passes.sharding.axes import Axis
from msc.passes.sharding.calls import Value, is_call, operands_of, value_of
from msc.passes.sharding.candidates import Candidates, value_differentiable
from msc.passes.sharding.rule import EVEN, Strategy

_REFINEMENTS = 4


@dataclass
class Placed:
    """The chosen strategy of every call and state of every placeholder over one axis."""

    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    placeholders: dict[fx.Node, State] = field(default_factory=dict)
    outputs: dict[Value, State] = field(default_factory=dict)  # as other blocks read them
    loss: State = REPLICATED
    cost: float = 0.0


@dataclass(frozen=True)
class Payload:
    """A value as the ranks of the axis move it.

    nbytes: of the whole, for one micro-batch of one rank of dp; outer: by dim, the product of the
    dims before it. Collectives move along the first dim: another one that has more than one row
    before it is copied into place, in each direction.
    """

    nbytes: float
    outer: tuple[float, ...]

    @classmethod
    def of(cls, value: Value, share: float) -> Payload:
        """`share` is the part of the value that one micro-batch of one rank holds."""
        tensor = tensors_of(value[0])[value[1]]
        outer = tuple(math.prod(tensor.shape[:dim]) * share for dim in range(tensor.dim()))
        return cls(nbytes(tensor) * share, outer)

    def copied(self, state: State) -> bool:
        """Whether moving the shards of `state` takes a copy beside the collective."""
        return (
            isinstance(state.value, Shard)
            and state.value.dim < len(self.outer)
            and (self.outer[state.value.dim] > 1 or state.value.split != EVEN)
        )


def conversion_cost(
    have: State, want: State, payload: Payload, size: int, gradient: bool, model: CostModel
) -> float | None:
    """Cost of the collectives of both directions; None where there is no conversion."""
    if have == want or (not gradient and have.value == want.value):
        return 0.0
    copies = sum(model.compute(0, 2 * payload.nbytes) for s in (have, want) if payload.copied(s))

    def price(kind: str, backward: str = "") -> float:
        steps = [kind] if kind else []
        steps += [backward] if gradient and backward else []
        return sum(model.collective(step, payload.nbytes, size) + copies for step in steps)

    local = model.compute(0, payload.nbytes)
    if isinstance(have.value, Shard):
        if want == VARYING:
            return price("all_gather", "reduce_scatter")
        if want == REPLICATED:
            return price("all_gather")
        if isinstance(want.value, Shard):
            return price("all_gather", "reduce_scatter") + local
        return None
    if isinstance(have.value, Partial):
        if want == REPLICATED:
            if have.value.op == "max" and gradient:
                return None
            return price("all_reduce")
        if have.value.op != "sum":
            return None
        if want == VARYING:
            return price("all_reduce", "all_reduce")
        return price("reduce_scatter", "all_gather") if isinstance(want.value, Shard) else None
    if isinstance(want.value, Shard):
        return local if have == VARYING else price("", "all_gather") + local
    if want == VARYING:
        return price("", "all_reduce")
    if want == PARTIAL:
        return local if have == VARYING else price("", "all_reduce") + local
    return None


def search(
    structure: Structure,
    candidates: Candidates,
    axis: Axis,
    model: CostModel,
    num_micro_batches: int,
    share: Callable[[Value], float],
) -> Placed:
    """Find the cheapest placement over `axis`.

    `share` is the part of a value that one micro-batch of one rank holds, by dp and mb alone.
    """
    return _Program(structure, candidates, axis, model, num_micro_batches, share).solve()


def _border_bytes(structure: Structure, share: Callable[[Value], float]) -> float:
    """The largest value that one block passes to another, on one rank of dp and mb."""
    sizes = [0.0]
    for instance in structure.instances:
        for source in instance.sources:
            if source.kind == "block":
                producer = structure.instances[source.instance]
                outputs = output_nodes(structure.blocks[producer.block])
                value = value_of(outputs[source.output])
                sizes.append(nbytes(tensors_of(value[0])[value[1]]) * share(value))
    return max(sizes)


class _Program:
    def __init__(
        self,
        structure: Structure,
        candidates: Candidates,
        axis: Axis,
        model: CostModel,
        num_micro_batches: int,
        share: Callable[[Value], float],
    ) -> None:
        self.structure = structure
        self.candidates = candidates
        self.axis = axis
        # a tenth of what passes from layer to layer: saving bytes by many small messages is no
        # gain on any network, and a model of another size has the same best plan
        self.model = replace(model, message_bytes=_border_bytes(structure, share) / 10)
        self.num_micro_batches = num_micro_batches
        self.share = share
        self.placeholder_states: dict[fx.Node, list[State]] = {}
        self.border: dict[Value, dict[State, int]] = {}
        self.output_weight: dict[Value, int] = {}
        self.costs: list[float] = []
        self.binary: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.entries: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.choice: dict[fx.Node, list[int]] = {}
        self.producers: dict[Value, dict[State, list[int]]] = {}
        self.moves: dict[tuple[Value, State, State], int] = {}

    # -- building blocks of the integer program

    def _variable(self, cost: float, binary: bool = False) -> int:
        self.costs.append(cost)
        self.binary.append(int(binary))
        return len(self.costs) - 1

    def _row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        row = len(self.lower)
        for column, entry in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.entries.append(entry)
        self.lower.append(lower)
        self.upper.append(upper)

    # -- the model

    def solve(self) -> Placed:
        for name, gm in self.structure.blocks.items():
            weight = self.structure.counts[name]
            for node in gm.graph.nodes:
                if node.op == "placeholder":
                    self._placeholder(node, weight)
                elif is_call(node):
                    self._call(node, weight)
        for name, gm in self.structure.blocks.items():
            for node in gm.graph.nodes:
                if is_call(node):
                    self._edges(node, self.structure.counts[name])
        self._ties()
        self._loss()
        return self._run()

    def _placeholder(self, node: fx.Node, weight: int) -> None:
        kind = node.meta["kind"]
        options: list[tuple[State, float]] = []
        shards = [State(p, p) for p in self.candidates.placeholders[node]]
        if kind == "parameter":
            trainable = bool(node.meta.get("differentiable"))
            penalty = self._parameter_penalty(node)
            options.append((REPLICATED, penalty))
            if trainable:
                bucketed = replace(self.model, message_bytes=0.0)
                reduce = bucketed.collective("all_reduce", nbytes(node.meta["val"]), self.axis.size)
                # once per step, in a bucket with others: cheaper than the same bytes on their own
                options.append((VARYING, penalty + reduce / (2 * self.num_micro_batches)))
            options += [(state, 0.0) for state in shards]
        elif kind == "value":
            options.append((REPLICATED, 0.0))
            if node.meta.get("differentiable"):
                options += [(VARYING, 0.0), (PARTIAL, 0.0)]
            options += [(state, 0.0) for state in shards]
        else:
            options.append((REPLICATED, 0.0))
        self.choice[node] = [self._variable(cost * weight, binary=True) for _, cost in options]
        self._row([(v, 1.0) for v in self.choice[node]], 1, 1)
        states = self.producers.setdefault((node, 0), {})
        for (state, _), variable in zip(options, self.choice[node], strict=True):
            states.setdefault(state, []).append(variable)
        self.placeholder_states[node] = [state for state, _ in options]

    def _parameter_penalty(self, node: fx.Node) -> float:
        """Cost of holding a weight whole; vectors (biases, norms) are too small to count."""
        if node.meta["val"].dim() < 2:
            return 0.0
        tokens = 1
        for user in node.users:
            results = tensors_of(user)
            if results and results[0].dim():
                rows = results[0].numel() // results[0].shape[-1]
                tokens = max(tokens, int(rows * self.share((user, 0))))
        return self.model.replicated_parameter(node.meta["val"].numel(), tokens)

    def _call(self, node: fx.Node, weight: int) -> None:
        operands = [tensors_of(o)[0] for o in operand_nodes(node) if tensors_of(o)]
        results = list(tensors_of(node))
        listed = self.candidates.strategies[node]
        gemm = is_gemm(node.target)
        share = self.share((node, 0))
        work = call_flops(node.target, operands, results) * share if gemm else 0.0
        traffic = 0.0 if gemm else sum(nbytes(t) for t in (*operands, *results)) * share
        passes = 3 if any(value_differentiable((node, i)) for i in range(len(results))) else 1
        whole = self.model.compute(work, traffic) * passes
        even = 1 / self.axis.size
        self.choice[node] = [
            self._variable(whole * (s.share - even) * weight, binary=True) for s in listed
        ]
        self._row([(v, 1.0) for v in self.choice[node]], 1, 1)
        for index in range(max(1, len(results))):
            states = self.producers.setdefault((node, index), {})
            for strategy, variable in zip(listed, self.choice[node], strict=True):
                states.setdefault(strategy.results[index], []).append(variable)

    def _edges(self, node: fx.Node, weight: int) -> None:
        for position, value in enumerate(operands_of(node)):
            wanted: dict[State, list[int]] = {}
            for strategy, variable in zip(
                self.candidates.strategies[node], self.choice[node], strict=True
            ):
                wanted.setdefault(strategy.operands[position], []).append(variable)
            self._flow(value, wanted, weight)

    def _flow(self, value: Value, wanted: dict[State, list[int]], weight: int) -> None:
        """One reader of a value: what flows out of each state flows into what the reader wants."""
        gradient = value_differentiable(value)
        have = self.producers[value]
        payload = Payload.of(value, self.share(value))
        from_parameter = value[0].op == "placeholder" and value[0].meta["kind"] == "parameter"
        leaving: dict[State, list[int]] = {state: [] for state in have}
        arriving: dict[State, list[int]] = {state: [] for state in wanted}
        for a in have:
            for r in wanted:
                cost = conversion_cost(a, r, payload, self.axis.size, gradient, self.model)
                if cost is None or (from_parameter and isinstance(a.value, Shard) and a != r):
                    continue  # a sharded weight is not gathered: that is ZeRO's business
                flow = self._variable(0.0)
                leaving[a].append(flow)
                arriving[r].append(flow)
                if cost > 0:
                    self._row(
                        [(self._move(value, a, r, cost * weight), 1.0), (flow, -1.0)], 0, np.inf
                    )
        for state, flows in leaving.items():
            self._row([*((f, 1.0) for f in flows), *((v, -1.0) for v in have[state])], 0, 0)
        for state, flows in arriving.items():
            self._row([*((f, 1.0) for f in flows), *((v, -1.0) for v in wanted[state])], 0, 0)

    def _move(self, value: Value, have: State, want: State, cost: float) -> int:
        key = (value, have, want)
        if key not in self.moves:
            self.moves[key] = self._variable(cost)
        return self.moves[key]

    def _ties(self) -> None:
        """What crosses a block border has one state there: that in which every reader gets it.

        The block that computes the value may convert it first. Tied parameters have one state.
        """
        readers: dict[Value, dict[Value, None]] = {}
        slots: dict[str, Value] = {}
        for instance in self.structure.instances:
            gm = self.structure.blocks[instance.block]
            nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
            for node, source in zip(nodes, instance.sources, strict=True):
                if source.kind == "block":
                    producer = self.structure.instances[source.instance]
                    outputs = output_nodes(self.structure.blocks[producer.block])
                    output = value_of(outputs[source.output])
                    readers.setdefault(output, {})[node, 0] = None
                    self.output_weight[output] = self.structure.counts[producer.block]
                elif source.kind == "parameter":
                    first = slots.setdefault(source.name, (node, 0))
                    if first != (node, 0):
                        self._same(self.producers[first], self.producers[node, 0])
        for output, nodes_that_read in readers.items():
            states = dict.fromkeys(s for r in nodes_that_read for s in self.producers[r])
            border = {state: [self._variable(0.0, binary=True)] for state in states}
            self._row([(v, 1.0) for (v,) in border.values()], 1, 1)
            self.border[output] = {state: variable for state, (variable,) in border.items()}
            self._flow(output, border, self.output_weight[output])
            for reader in nodes_that_read:
                self._same(border, self.producers[reader])

    def _same(self, left: dict[State, list[int]], right: dict[State, list[int]]) -> None:
        for state in dict.fromkeys((*left, *right)):
            terms = [(v, 1.0) for v in left.get(state, ())]
            terms += [(v, -1.0) for v in right.get(state, ())]
            self._row(terms, 0, 0)

    def _loss(self) -> None:
        """The loss ends replicated or as a sum over the axis; its gradient's seed is one then."""
        value = self._loss_value()
        ends = {state: [self._variable(0.0, binary=True)] for state in (REPLICATED, PARTIAL)}
        self._row([(v, 1.0) for (v,) in ends.values()], 1, 1)
        self.loss_choice = {state: variable for state, (variable,) in ends.items()}
        self._flow(value, ends, 1)

    def _loss_value(self) -> Value:
        source = self.structure.loss
        instance = self.structure.instances[source.instance]
        return value_of(output_nodes(self.structure.blocks[instance.block])[source.output])

    def _run(self) -> Placed:
        solution, cost = self._solve()
        chosen = Placed(cost=cost)
        for node, variables in self.choice.items():
            best = max(range(len(variables)), key=lambda i: solution[variables[i]])
            if node.op == "placeholder":
                chosen.placeholders[node] = self.placeholder_states[node][best]
            else:
                chosen.strategies[node] = self.candidates.strategies[node][best]
        for value, states in self.border.items():
            chosen.outputs[value] = max(states, key=lambda s: solution[states[s]])
        chosen.loss = max(self.loss_choice, key=lambda s: solution[self.loss_choice[s]])
        return chosen

    def _solve(self) -> tuple[np.ndarray, float]:
        """Values of all variables, and their cost.

        Costs span more orders of magnitude than the solver's tolerances. A variable that alone
        costs more than a solution cannot be part of a better one, so it is fixed to 0, the rest is
        scaled up, and the program is solved again, until nothing more is fixed.
        """
        shape = (len(self.lower), len(self.costs))
        matrix = sparse.coo_matrix((self.entries, (self.rows, self.columns)), shape=shape).tocsr()
        rows = LinearConstraint(matrix, np.asarray(self.lower), np.asarray(self.upper))
        costs = np.asarray(self.costs)
        upper = np.ones(len(costs))
        best: np.ndarray | None = None
        bound = np.inf
        for _ in range(_REFINEMENTS):
            open_costs = np.where(upper > 0, costs, 0.0)
            result = milp(
                open_costs / (open_costs.max() or 1.0),
                constraints=rows,
                integrality=np.asarray(self.binary),
                bounds=Bounds(0, upper),
                options={"mip_rel_gap": 1e-9, "time_limit": 60.0},
            )
            if result.x is None:
                if best is not None:
                    break
                raise PlanError(
                    f"No placement over '{self.axis.name}' (size {self.axis.size}) was found: "
                    f"{result.message} Use a smaller axis."
                )
            cost = float(costs @ np.round(result.x))
            if cost < bound or best is None:
                best, bound = result.x, cost
            fixed = costs > bound
            if not np.any(fixed & (upper > 0)):
                break
            upper[fixed] = 0.0
        assert best is not None
        return best, bound
