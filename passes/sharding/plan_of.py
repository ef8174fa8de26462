"""A compilation's choices as a plan, and a plan's choices in a compilation.

Values of a model are found again by their place: block by block, call by call.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from msc.ir.errors import PlanError
from msc.ir.mesh import Mesh
from msc.ir.placement import REPLICATED, Shard, State
from msc.ir.plan import Plan, PlannedBlock, PlannedCall, PlannedPlaceholder
from msc.ir.structure import Structure, layer_names, output_nodes, placeholders
from msc.ir.values import tensors_of
from msc.passes.sharding.calls import Value, is_call, operands_of, value_of
from msc.passes.sharding.candidates import value_differentiable
from msc.passes.sharding.placing import Placing
from msc.passes.sharding.prices import Payload, conversion_cost
from msc.passes.sharding.search import Placed

_LISTED = 12


def plan_of(structure: Structure, placed: Placed | None, mesh: Mesh, micro_batches: int) -> Plan:
    """What was chosen for a cut model; over one rank of tp (`placed` is None) all is whole."""
    parameters: dict[str, State] = {}
    for instance in structure.instances:
        nodes = placeholders(structure.blocks[instance.block])
        for node, source in zip(nodes, instance.sources, strict=True):
            if source.kind == "parameter":
                parameters[source.name] = placed.placeholders[node] if placed else REPLICATED
    blocks = tuple(_block(structure, name, placed) for name in structure.blocks)
    return Plan(mesh, micro_batches, parameters, blocks, placed.loss if placed else REPLICATED)


def _block(structure: Structure, name: str, placed: Placed | None) -> PlannedBlock:
    gm = structure.blocks[name]
    outputs: list[State | None] = [None] * len(output_nodes(gm))
    if placed is not None:
        outputs = [placed.outputs.get(value_of(node)) for node in output_nodes(gm)]
    return PlannedBlock(
        tuple(i.path for i in structure.instances if i.block == name),
        tuple(_placeholder(node, placed) for node in placeholders(gm)),
        tuple(_call(node, placed) for node in gm.graph.nodes if is_call(node)),
        tuple(outputs),
    )


def _placeholder(node: fx.Node, placed: Placed | None) -> PlannedPlaceholder:
    state = placed.placeholders[node] if placed else REPLICATED
    kind = node.meta["kind"]
    return PlannedPlaceholder(
        kind,
        node.meta["name"],
        tuple(node.meta["val"].shape),
        None if kind == "parameter" else state,
    )


def _call(node: fx.Node, placed: Placed | None) -> PlannedCall:
    operands: tuple[State, ...] = (REPLICATED,) * len(operands_of(node))
    results: tuple[State, ...] = (REPLICATED,) * len(tensors_of(node))
    if placed is not None:
        operands, results = placed.strategies[node].operands, placed.strategies[node].results
    shapes = tuple(tuple(tensor.shape) for tensor in tensors_of(node))
    module = node.meta.get("module_path") or ""
    return PlannedCall(op_name(node), node.name, module, shapes, operands, results)


def op_name(node: fx.Node) -> str:
    """The op that a call runs, as the dumps write it."""
    return str(node.target).removesuffix(".default")


# -- applying a plan


def check_plan(plan: Plan, structure: Structure, mesh: Mesh, micro_batches: int) -> None:
    """Raise `PlanError`, with the differences, unless `plan` was made for this model and mesh."""
    here = plan_of(structure, None, mesh, micro_batches)
    differences = [*_mesh_differences(plan.mesh, mesh)]
    if plan.micro_batches != micro_batches:
        differences.append(
            f"the plan was made for {plan.micro_batches} micro-batches, here are {micro_batches}"
        )
    _refuse([*differences, *_model_differences(plan, here)])


def apply_plan(plan: Plan, placing: Placing, limits: Mapping[fx.Node, frozenset[State]]) -> Placed:
    """The placement that `plan`, made for this model and mesh, says.

    `limits` are the states that pins leave. `PlanError` lists every choice that is none.
    """
    applied = _Applied(plan, placing, limits)
    _refuse(applied.faults)
    _refuse(applied.broken_edges())
    placed = applied.restricted().solve()
    if plan_of(placing.structure, placed, plan.mesh, plan.micro_batches) != plan:
        raise PlanError(
            "The plan does not agree with itself: its block outputs are not in the states in which "
            "the blocks after them read them. Compile without it and save the plan again."
        )
    return placed


def _refuse(differences: Sequence[str]) -> None:
    if not differences:
        return
    listed = list(differences[:_LISTED])
    if len(differences) > _LISTED:
        listed.append(f"and {len(differences) - _LISTED} more")
    raise PlanError(
        "The plan does not fit:\n  "
        + "\n  ".join(listed)
        + "\nCompile without the plan, and save the one that is found: program.plan.save(file)."
    )


def _mesh_differences(planned: Mesh, mesh: Mesh) -> Iterator[str]:
    for axis in dict.fromkeys((*dict(planned.axes), *dict(mesh.axes))):
        if planned.axis_size(axis) != mesh.axis_size(axis):
            yield (
                f"mesh axis '{axis}' has {planned.axis_size(axis)} ranks in the plan, "
                f"{mesh.axis_size(axis)} here"
            )


def _model_differences(plan: Plan, here: Plan) -> Iterator[str]:
    for name in plan.parameters:
        if name not in here.parameters:
            yield f"parameter {name} of the plan is not in the model"
    for name in here.parameters:
        if name not in plan.parameters:
            yield f"parameter {name} of the model is not in the plan"
    planned = [block.instances for block in plan.blocks]
    found = [block.instances for block in here.blocks]
    if planned != found:
        there, model = (", ".join(f"[{layer_names(p)}]" for p in each) for each in (planned, found))
        yield f"the plan has the equal layers {there}, the model {model}"
    for left, right in zip(plan.blocks, here.blocks, strict=False):
        if left.instances == right.instances:
            yield from _block_differences(left, right)


def _block_differences(planned: PlannedBlock, here: PlannedBlock) -> Iterator[str]:
    where = layer_names(here.instances)

    def taken(block: PlannedBlock) -> list[str]:
        return [f"{each.kind} {each.name} {list(each.shape)}" for each in block.placeholders]

    def computed(block: PlannedBlock) -> list[str]:
        return [
            f"{call.op} {' '.join(str(list(shape)) for shape in call.shapes)}"
            + (f" in {call.module}" if call.module else "")
            for call in block.calls
        ]

    for left, right in ((taken(planned), taken(here)), (computed(planned), computed(here))):
        if left == right:
            continue
        matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
        for tag, i, k, j, m in matcher.get_opcodes():
            if tag != "equal":
                for there, model in itertools.zip_longest(
                    left[i:k], right[j:m], fillvalue="nothing"
                ):
                    yield f"{where}: the plan has {there}, the model {model}"


@dataclass
class _Applied:
    """The states of a plan by the nodes of a model; `faults` where the model has no such choice."""

    plan: Plan
    placing: Placing
    limits: Mapping[fx.Node, frozenset[State]]

    def __post_init__(self) -> None:
        self.faults: list[str] = []
        self.states: dict[fx.Node, State] = {}
        self.strategies: dict[fx.Node, PlannedCall] = {}
        structure = self.placing.structure
        for block, gm in zip(self.plan.blocks, structure.blocks.values(), strict=True):
            for planned, node in zip(block.placeholders, placeholders(gm), strict=True):
                if planned.state is not None:
                    self._placeholder(node, planned.name, planned.state)
            calls = (node for node in gm.graph.nodes if is_call(node))
            for call, node in zip(block.calls, calls, strict=True):
                self._call(node, call)
        for name, nodes in self.placing.parameters().items():
            for node in nodes:
                self._placeholder(node, name, self.plan.parameters[name])

    def _placeholder(self, node: fx.Node, name: str, state: State) -> None:
        possible = self.placing.candidates.states(node)
        known = self.states.setdefault(node, state)
        if known != state:
            self.faults.append(
                f"{name} is {state} in the plan, but {known} in {node.meta['name']}: equal layers "
                "share one placement"
            )
        elif state not in possible:
            self.faults.append(f"{name} is {state} in the plan; it can be {_listed(possible)}")
        elif node in self.limits and state not in self.limits[node]:
            left = [s for s in possible if s in self.limits[node]]
            self.faults.append(f"{name} is {state} in the plan, but a pin asks {_listed(left)}")

    def _call(self, node: fx.Node, call: PlannedCall) -> None:
        self.strategies[node] = call
        options = self.placing.candidates.strategies[node]
        if not any(_same(call, option.operands, option.results) for option in options):
            ways = [_way(option.operands, option.results) for option in options]
            self.faults.append(
                f"{call.name} ({call.op}{f' in {call.module}' if call.module else ''}) runs as "
                f"{_way(call.operands, call.results)} in the plan; it can run as {'; '.join(ways)}"
            )

    def broken_edges(self) -> list[str]:
        """Reads of values in states into which they cannot be turned."""
        faults = []
        for node, call in self.strategies.items():
            for value, want in zip(operands_of(node), call.operands, strict=True):
                have = self._state(value)
                if not self._convertible(value, have, want):
                    faults.append(
                        f"{call.name} ({call.op}) reads {value[0].name} as {want}, "
                        f"which cannot be made of {have}"
                    )
        return faults

    def _state(self, value: Value) -> State:
        node, index = value
        return self.states[node] if node in self.states else self.strategies[node].results[index]

    def _convertible(self, value: Value, have: State, want: State) -> bool:
        node, _ = value
        if node.op == "placeholder" and node.meta["kind"] == "parameter":
            if isinstance(have.value, Shard) and have != want:
                return False
        placing = self.placing
        payload = Payload.of(value, placing.step.share(value))
        gradient = value_differentiable(value)
        cost = conversion_cost(have, want, payload, placing.axis.size, gradient, placing.cost)
        return cost is not None

    def restricted(self) -> Placing:
        """The placing that has these choices and no others."""
        candidates = self.placing.candidates
        strategies = {
            node: [s for s in candidates.strategies[node] if _same(call, s.operands, s.results)]
            for node, call in self.strategies.items()
        }
        allowed = {node: frozenset({state}) for node, state in self.states.items()}
        return replace(
            self.placing,
            candidates=replace(
                candidates, strategies=strategies, allowed=allowed, loss=(self.plan.loss,)
            ),
        )


def _same(call: PlannedCall, operands: tuple[State, ...], results: tuple[State, ...]) -> bool:
    return call.operands == operands and call.results == results


def _way(operands: Iterable[State], results: Iterable[State]) -> str:
    return f"{', '.join(map(str, operands))} -> {', '.join(map(str, results))}"


def _listed(states: Iterable[State]) -> str:
    return ", ".join(map(str, states))
