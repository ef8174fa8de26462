"""Write a program to a folder and read it back: compile once, run on every rank.

    program.json         mesh, layouts, inputs, options, report, plan, digests
    stage0.graphs.json   the graphs of each class of ranks (`msc.ir.serialize`)
    model.safetensors    whole parameters and buffers that have values; not what `msc.init` draws

`program.json` is written last and removed first, so that a folder that has one is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from safetensors.torch import save_file
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from msc.capture.inputs import InputInfo, InputSpec
from msc.cost.measurements import Measurements
from msc.initialization import recipe_from_json
from msc.ir.data_shard import DataShard
from msc.ir.dump import make_folder
from msc.ir.encoding import Decoder, encode
from msc.ir.errors import UserError
from msc.ir.layout import BufferLayout, InputLayout, ParameterLayout, class_names
from msc.ir.mesh import Mesh
from msc.ir.optimizer.saved import optimizer_from_json, optimizer_to_json
from msc.ir.plan import Plan
from msc.ir.serialize import fingerprint, graphs_from_json, to_text
from msc.program import Program
from msc.report import CompileReport, ScheduleReport
from msc.saved_tensors import SavedTensors

FORMAT = "msc program"
VERSION = 4
PROGRAM = "program.json"
TENSORS = "model.safetensors"


def save_program(program: Program, folder: str | Path) -> None:
    """Write `program` into `folder`, which is created; a program that was there is replaced.

    Raises `UserError` if the batch holds something that has no text.
    """
    path = Path(folder)
    make_folder(path)
    description = describe(program)
    (path / PROGRAM).unlink(missing_ok=True)
    files = [_graphs_file(name) for name in program.class_names]
    for index, file in enumerate(files):
        _write(path / file, to_text(program.serialized(index)))
    for stale in path.glob(_graphs_file("*")):
        if stale.name not in files:
            stale.unlink()
    _save_tensors(program, path / TENSORS)
    _write(path / PROGRAM, json.dumps(description, indent=1, allow_nan=False) + "\n")


def load_program(folder: str | Path, rank: int | None = None) -> Program:
    """Read the program in `folder`.

    Graphs and values are read when they are first used; with `rank`, that rank's graph is read now,
    so that a fault in it shows here, and the other stages' never unless they are asked for.

    Raises `UserError` for a folder without a program, a program of another version of MSC, and
    files that do not belong together.
    """
    path = Path(folder)
    data = _read_description(path)
    digests: list[str] = data["classes"]
    mesh = Mesh(tuple((name, size) for name, size in data["mesh"]))
    names = class_names(mesh.axis_size("pp"), data["tp_bounds"])
    source = None
    if data["has_tensors"]:
        source = SavedTensors(path / TENSORS, data["state_names"], data["values_digest"])
    graphs = SavedGraphs(path, names, digests)
    program = Program(
        mesh=mesh,
        rank_graphs=graphs,
        chunk_graphs=graphs.chunk_graphs,
        parameters={p["name"]: _parameter(p) for p in data["parameters"]},
        buffers={b["name"]: BufferLayout(*_shaped(b), b["stage"]) for b in data["buffers"]},
        tp_bounds=data["tp_bounds"],
        inputs=tuple(InputLayout(*_shaped(i), i["batch_dim"]) for i in data["inputs"]),
        input_spec=_input_spec(data["input_spec"]),
        dtype=_decode(data["dtype"]),
        master=_decode(data["master"]),
        optimizer=None if data["optimizer"] is None else optimizer_from_json(data["optimizer"]),
        micro_batches=data["micro_batches"],
        separable=data["separable"],
        backend=data["backend"],
        measured=None if data["measured"] is None else Measurements.load(data["measured"]),
        report=_report(data["report"]),
        source=source,
        plan=Plan.load(data["plan"]),
        recipe=None if data["recipe"] is None else recipe_from_json(data["recipe"]),
        digests=digests,
    )
    if program.fingerprint != data["fingerprint"]:
        raise UserError(
            f"{path / PROGRAM} was changed: its fingerprint is not that of its contents. "
            "Save the program again with program.save(folder)."
        )
    if rank is not None:
        program.rank_graph(rank)
    return program


class SavedGraphs(Sequence[fx.GraphModule]):
    """The rank graphs of all classes, each read and checked when it is first asked for."""

    def __init__(self, folder: Path, names: Sequence[str], digests: Sequence[str]) -> None:
        self._folder = folder
        self._names = names
        self._digests = digests
        self._graphs: dict[int, dict[str, fx.GraphModule]] = {}

    def __len__(self) -> int:
        return len(self._digests)

    @overload
    def __getitem__(self, index: int) -> fx.GraphModule: ...

    @overload
    def __getitem__(self, index: slice) -> list[fx.GraphModule]: ...

    def __getitem__(self, index: int | slice) -> fx.GraphModule | list[fx.GraphModule]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._class(range(len(self))[index])["step"]

    def chunk_graphs(self, index: int) -> dict[str, fx.GraphModule]:
        """The forward and backward graph of a class's chunk, by name."""
        return {name: gm for name, gm in self._class(index).items() if name != "step"}

    def _class(self, index: int) -> dict[str, fx.GraphModule]:
        if index not in self._graphs:
            self._graphs[index] = self._read(index)
        return self._graphs[index]

    def _read(self, index: int) -> dict[str, fx.GraphModule]:
        file = self._folder / _graphs_file(self._names[index])
        data = _read_json(file)
        if fingerprint(data) != self._digests[index]:
            raise UserError(
                f"{file} does not belong to {self._folder / PROGRAM}: its fingerprint differs. The "
                "file was changed, or comes from another program. Save the program again with "
                "program.save(folder)."
            )
        return graphs_from_json(data)


# -- to JSON


def describe(program: Program) -> dict[str, Any]:
    """What `program.json` holds: plain data, equal for equal programs."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": program.fingerprint,
        "classes": list(program.class_digests),
        "tp_bounds": list(program.tp_bounds),
        "mesh": [list(axis) for axis in program.mesh],
        "parameters": [_parameter_data(p) for p in program.parameters.values()],
        "buffers": [{**_shaped_data(b), "stage": b.stage} for b in program.buffers.values()],
        "inputs": [{**_shaped_data(i), "batch_dim": i.batch_dim} for i in program.inputs],
        "input_spec": _input_spec_data(program.input_spec),
        "dtype": encode(program.dtype),
        "master": encode(program.master),
        "optimizer": None if program.optimizer is None else optimizer_to_json(program.optimizer),
        "micro_batches": program.micro_batches,
        "separable": program.separable,
        "backend": program.backend,
        "measured": None if program.measured is None else program.measured.to_json(),
        "report": {**program.report.to_json(), "search_cost": program.report.search_cost},
        "plan": program.plan.to_json(),
        "has_tensors": bool(_stored(program)),
        "recipe": None if program.recipe is None else program.recipe.to_json(),
        "values_digest": program.values_digest,
        "state_names": sorted(_state(program)),
    }


def _stored(program: Program) -> dict[str, str]:
    """Name -> kind of the tensors that are written: those that no recipe draws."""
    if not program.has_values:
        return {}
    drawn = program.recipe.draws if program.recipe is not None else {}
    names = dict.fromkeys(program.parameters, "parameter") | dict.fromkeys(
        program.buffers, "buffer"
    )
    state = _state(program)
    names = {name: "state" for name in state} | names
    return {
        name: kind
        for name, kind in names.items()
        if name in state or name not in drawn or program.stored(kind, name) is not None
    }


def _state(program: Program) -> dict[str, Tensor]:
    """The extra entries of the plain module's state_dict, where there are values."""
    return program.extra_state() if program.has_values else {}


def _parameter_data(layout: ParameterLayout) -> dict[str, Any]:
    return {
        **_shaped_data(layout),
        "trainable": layout.trainable,
        "aliases": list(layout.aliases),
        "shards": {axis: encode(shard) for axis, shard in layout.shards.items()},
        "stages": list(layout.stages),
        "data": None if layout.data is None else [layout.data.dim, layout.data.parts],
    }


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the batch in JSON: a tensor, by its description, or a constant."""

    name: str
    info: InputInfo | None
    constant: Any

    def data(self) -> dict[str, Any]:
        if self.info is not None:
            return {**_shaped_data(self.info), "batch_dim": self.info.batch_dim}
        try:
            return {"name": self.name, "constant": encode(self.constant)}
        except TypeError as error:
            raise UserError(
                f"The program cannot be saved: its input '{self.name}' is a constant for which "
                f"there is no text: {error}. Pass tensors, numbers, strings, flags or None."
            ) from error


def _input_spec_data(spec: InputSpec) -> dict[str, Any]:
    leaves = [
        _Leaf(name, leaf if isinstance(leaf, InputInfo) else None, leaf)
        for name, leaf in zip(spec.names, spec.leaves, strict=True)
    ]
    try:
        structure = json.loads(pytree.treespec_dumps(spec.structure))
    except (NotImplementedError, TypeError) as error:
        raise UserError(
            f"The program cannot be saved: the structure of its batch has no text ({error}). Pass "
            "the batch as tuples, lists and dicts."
        ) from error
    return {
        "structure": structure,
        "keywords": spec.keywords,
        "leaves": [leaf.data() for leaf in leaves],
    }


def _shaped_data(value: Any) -> dict[str, Any]:
    return {"name": value.name, "shape": list(value.shape), "dtype": encode(value.dtype)}


# -- from JSON


def _parameter(data: Mapping[str, Any]) -> ParameterLayout:
    return ParameterLayout(
        *_shaped(data),
        trainable=data["trainable"],
        aliases=tuple(data["aliases"]),
        shards={axis: _decode(shard) for axis, shard in data["shards"].items()},
        stages=tuple(data["stages"]),
        data=None if data["data"] is None else DataShard(*data["data"]),
    )


def _input_spec(data: Mapping[str, Any]) -> InputSpec:
    leaves = [
        InputInfo(*_shaped(leaf), leaf["batch_dim"])
        if "shape" in leaf
        else _decode(leaf["constant"])
        for leaf in data["leaves"]
    ]
    structure = pytree.treespec_loads(json.dumps(data["structure"]))
    names = tuple(leaf["name"] for leaf in data["leaves"])
    return InputSpec(structure, data["keywords"], names, tuple(leaves))


def _report(data: Mapping[str, Any]) -> CompileReport:
    return CompileReport(
        sharded=data["sharded"],
        collectives=tuple({k: (v[0], v[1]) for k, v in s.items()} for s in data["collectives"]),
        fallbacks=tuple(data["fallbacks"]),
        notes=tuple(data["notes"]),
        replicated=tuple(data["replicated"]),
        distinct_blocks=data["distinct_blocks"],
        instances=data["instances"],
        chunks=tuple(tuple(chunk) for chunk in data["chunks"]),
        rewrites=tuple(data["rewrites"]),
        fused_collectives=tuple(data["fused_collectives"]),
        fused_losses=tuple(data["fused_losses"]),
        epilogues=tuple(data["epilogues"]),
        model_flops=data["model_flops"],
        search_cost=data["search_cost"],
        schedule=ScheduleReport(
            data["schedule"]["name"],
            data["schedule"]["virtual_stages"],
            data["schedule"]["bubble"],
            tuple(data["schedule"]["live_activations"]),
        ),
        chunk_stages=tuple(data["chunk_stages"]),
    )


def _shaped(data: Mapping[str, Any]) -> tuple[str, tuple[int, ...], torch.dtype]:
    return data["name"], tuple(data["shape"]), _decode(data["dtype"])


def _decode(data: Any) -> Any:
    return Decoder().decode(data, {})


# -- files


def _graphs_file(name: str) -> str:
    return f"{name}.graphs.json"


def _write(file: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    os.replace(part, file)


def _save_tensors(program: Program, file: Path) -> None:
    part = file.with_name(file.name + ".part")
    names = _stored(program)
    if not names:
        file.unlink(missing_ok=True)
        return
    read = {"parameter": program.read_parameter, "buffer": program.read_buffer}
    tensors = {name: read[kind](name) for name, kind in names.items() if kind in read}
    tensors |= {n: v for n, v in _state(program).items() if n not in tensors}
    # copies: the file format takes no two names of one memory
    save_file({n: v.detach().cpu().contiguous().clone() for n, v in tensors.items()}, part)
    os.replace(part, file)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError as error:
        raise UserError(
            f"{file} is missing. Save the program again with program.save(folder)."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}. Save the program again.") from error


def _read_description(folder: Path) -> dict[str, Any]:
    file = folder / PROGRAM
    if not file.is_file():
        raise UserError(
            f"{folder} holds no program: it has no {PROGRAM}. Give a folder that "
            "program.save(folder) has written."
        )
    data = _read_json(file)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{file} does not describe a program of MSC.")
    if data.get("version") != VERSION:
        raise UserError(
            f"{file} is of version {data.get('version')!r}; this MSC reads version {VERSION}. "
            "Compile and save the program again with it."
        )
    return data
