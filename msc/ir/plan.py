"""`msc.Plan`: where everything of a model lies over tp, as a value and as a JSON file.

    {
     "format": "msc plan", "version": 1, "mesh": {"dp": 2, "tp": 2}, "micro_batches": 1,
     "parameters": {"h.0.attn.weight": {"S": [0, 3]}, "h.0.ln_1.weight": "R~", ...},
     "blocks": [
      {"instances": ["h.0", "h.1"],
       "placeholders": [{"kind": "parameter", "name": "h.0.attn.weight", "shape": [192, 64]}, ...],
       "calls": [{"op": "msc.linear", "name": "linear", "module": "h.0.attn",
                  "shapes": [[8, 16, 192]],
                  "operands": ["R~", {"S": [0, 3]}], "results": [{"S": [2, 3]}]}, ...],
       "outputs": [{"S": [0, 1]}]}],
     "loss": {"P": "sum"}
    }

A state is `"R"` or `"R~"` where the value is whole, else the JSON of its placement
(`msc.ir.encoding`). A block is planned once for all its instances; the placeholders that stand for
parameters have the state that `parameters` says. `outputs` are the states in which other blocks
read a block's results, null where none does. Dtypes are left out: where the ops are the same, a
plan holds in another precision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msc.ir.encoding import Decoder, encode
from msc.ir.errors import PlanError
from msc.ir.mesh import Mesh
from msc.ir.placement import (
    PARTIAL,
    REPLICATED,
    VARYING,
    Partial,
    Replicate,
    Shard,
    State,
)

FORMAT = "msc plan"
VERSION = 1
_HEAD = ("format", "version", "mesh", "micro_batches")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlannedPlaceholder:
    """A value that a block takes; `state` is None for a parameter, which `Plan.parameters` has."""

    kind: str
    name: str
    shape: Shape
    state: State | None


@dataclass(frozen=True)
class PlannedCall:
    """One call of a block, and the states of its operands and results; names are unique in it."""

    op: str
    name: str
    module: str
    shapes: tuple[Shape, ...]
    operands: tuple[State, ...]
    results: tuple[State, ...]


@dataclass(frozen=True)
class PlannedBlock:
    """A distinct block: the paths of its instances, what it takes, computes and gives."""

    instances: tuple[str, ...]
    placeholders: tuple[PlannedPlaceholder, ...]
    calls: tuple[PlannedCall, ...]
    outputs: tuple[State | None, ...]


@dataclass(frozen=True)
class Plan:
    """What a compilation chose over tp: `msc.compile(..., plan=plan)` makes the same program.

    mesh, micro_batches: what it was made for; without tp there is nothing to choose, and no block.
    parameters: the state of every parameter that the loss depends on.
    """

    mesh: Mesh
    micro_batches: int
    parameters: Mapping[str, State]
    blocks: tuple[PlannedBlock, ...]
    loss: State

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, to be read by `load`."""
        try:
            Path(path).write_text(_text(self.to_json()))
        except OSError as error:
            raise PlanError(f"The plan cannot be written to '{path}': {error}") from error

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Plan) -> Plan:
        """Read a plan from a JSON file, or from its data; a plan passes through.

        Raises `PlanError` for what is no plan, or one of another version.
        """
        if isinstance(source, Plan):
            return source
        if isinstance(source, Mapping):
            return cls._read(source, "The plan")
        if not isinstance(source, (str, Path)):
            raise PlanError(f"plan is a {type(source).__name__}; it is an msc.Plan or a file.")
        try:
            data = json.loads(Path(source).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(f"Plan file '{source}' cannot be read: {error}") from error
        return cls._read(data, f"Plan file '{source}'")

    @classmethod
    def _read(cls, data: Any, what: str) -> Plan:
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise PlanError(f"{what} is not one that program.plan.save(file) has written.")
        if data.get("version") != VERSION:
            raise PlanError(
                f"{what} is of version {data.get('version')!r}; this MSC reads version {VERSION}. "
                "Compile without it and save the plan again."
            )
        try:
            return cls(
                Mesh(tuple(data["mesh"].items())),
                int(data["micro_batches"]),
                {name: _state(state) for name, state in data["parameters"].items()},
                tuple(map(_block, data["blocks"])),
                _state(data["loss"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"{what} is damaged: {type(error).__name__}: {error}. "
                "Compile without it and save the plan again."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, equal for equal plans."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "mesh": dict(self.mesh.axes),
            "micro_batches": self.micro_batches,
            "parameters": {name: _state_data(state) for name, state in self.parameters.items()},
            "blocks": [_block_data(block) for block in self.blocks],
            "loss": _state_data(self.loss),
        }


# -- to JSON


def _text(data: Mapping[str, Any]) -> str:
    """The JSON text of a plan, one line for each parameter, placeholder and call."""
    lines = [f"{json.dumps(key)}: {json.dumps(data[key])}" for key in _HEAD]
    pairs = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data["parameters"].items())
    lines.append('"parameters": {\n  ' + ",\n  ".join(pairs) + "}")
    blocks = []
    for block in data["blocks"]:
        parts = [f'"instances": {json.dumps(block["instances"])}']
        for key in ("placeholders", "calls"):
            parts.append(f'"{key}": [\n    ' + ",\n    ".join(map(json.dumps, block[key])) + "]")
        parts.append(f'"outputs": {json.dumps(block["outputs"])}')
        blocks.append("{" + ",\n   ".join(parts) + "}")
    lines.append('"blocks": [\n  ' + ",\n  ".join(blocks) + "]")
    lines.append(f'"loss": {json.dumps(data["loss"])}')
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _state_data(state: State) -> Any:
    return str(state) if isinstance(state.value, Replicate) else encode(state.value)


def _block_data(block: PlannedBlock) -> dict[str, Any]:
    return {
        "instances": list(block.instances),
        "placeholders": [_placeholder_data(each) for each in block.placeholders],
        "calls": [_call_data(each) for each in block.calls],
        "outputs": [None if s is None else _state_data(s) for s in block.outputs],
    }


def _placeholder_data(value: PlannedPlaceholder) -> dict[str, Any]:
    data = {"kind": value.kind, "name": value.name, "shape": list(value.shape)}
    return data if value.state is None else {**data, "state": _state_data(value.state)}


def _call_data(call: PlannedCall) -> dict[str, Any]:
    return {
        "op": call.op,
        "name": call.name,
        "module": call.module,
        "shapes": [list(shape) for shape in call.shapes],
        "operands": [_state_data(state) for state in call.operands],
        "results": [_state_data(state) for state in call.results],
    }


# -- from JSON


def _state(data: Any) -> State:
    for state in (REPLICATED, VARYING):
        if data == str(state):
            return state
    placement = Decoder().decode(data, {})
    if isinstance(placement, Shard):
        return State(placement, placement)
    if isinstance(placement, Partial):
        return State(placement, PARTIAL.grad)
    raise ValueError(f"{data!r} is no state of a value")


def _block(data: Mapping[str, Any]) -> PlannedBlock:
    return PlannedBlock(
        tuple(data["instances"]),
        tuple(map(_placeholder, data["placeholders"])),
        tuple(map(_call, data["calls"])),
        tuple(None if state is None else _state(state) for state in data["outputs"]),
    )


def _placeholder(data: Mapping[str, Any]) -> PlannedPlaceholder:
    state = _state(data["state"]) if "state" in data else None
    return PlannedPlaceholder(data["kind"], data["name"], tuple(data["shape"]), state)


def _call(data: Mapping[str, Any]) -> PlannedCall:
    return PlannedCall(
        data["op"],
        data["name"],
        data["module"],
        tuple(tuple(shape) for shape in data["shapes"]),
        tuple(map(_state, data["operands"])),
        tuple(map(_state, data["results"])),
    )
