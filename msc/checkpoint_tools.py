"""What the commands `msc ckpt` do: list, check, compare, reshard, export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from msc.checkpointing import HISTORY, PLAN, state_tensors
from msc.ir.dump import make_folder
from msc.ir.errors import UserError
from msc.program import Program
from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.committing import Committer
from msc.runtime.checkpoint.dcp import METADATA, dcp_metadata
from msc.runtime.checkpoint.image import Image
from msc.runtime.checkpoint.manifest import DamagedError, folder_name
from msc.runtime.checkpoint.reading import check_same_model
from msc.runtime.checkpoint.saved_state import SavedState
from msc.runtime.checkpoint.states import written_by
from msc.runtime.checkpoint.storage import Storage, open_storage
from msc.runtime.checkpoint.writer import PartWriter

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Place:
    """A checkpoint: the storage, and its folder in it."""

    storage: Storage
    folder: str

    def __str__(self) -> str:
        return f"{self.storage}/{self.folder}"

    def open(self) -> SavedState:
        """Raises `UserError` if its records are damaged."""
        try:
            return SavedState(self.storage, self.folder)
        except DamagedError as error:
            raise UserError(f"{self} is damaged: {error}.") from error


def find(url: str, step: int | None = None) -> Place:
    """The newest complete checkpoint in a folder, or that of a step, or the one that `url` is.

    Raises `UserError` if there is none.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if name.startswith("step-") and step is None:
        return Place(open_storage(parent or "."), name)
    storage = open_storage(url)
    found = catalog.checkpoints(storage)
    steps = sorted({each.step for each in found if each.complete})
    for each in found:
        if each.complete and step in (None, each.step):
            return Place(storage, each.folder)
    if not steps:
        raise UserError(f"{url} has no complete checkpoint.")
    raise UserError(f"{url} has no complete checkpoint of step {step}; it has those of {steps}.")


@dataclass(frozen=True)
class Difference:
    """How a tensor differs between two checkpoints; "" if not at all."""

    name: str
    what: str


def differences(one: SavedState, other: SavedState) -> Iterator[Difference]:
    """Every tensor of both, compared bit for bit."""
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            yield Difference(name, f"only in the {'second' if name in other else 'first'}")
        elif one.descriptions[name] != other.descriptions[name]:
            a, b = one.descriptions[name], other.descriptions[name]
            yield Difference(name, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        else:
            yield Difference(name, _difference(one[name], other[name]))


def _difference(a: Tensor, b: Tensor) -> str:
    if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return ""
    count = int((a != b).sum())
    gap = (a.double() - b.double()).abs().max()
    return f"{count} of {a.numel()} elements, by {float(gap):.3g} at most"


def reshard(source: Place, target: str, program: Program) -> Place:
    """Write a checkpoint as the ranks of `program`'s mesh would have written it.

    Raises `UserError` if it is of another model, or `target` has a checkpoint of that step.
    """
    state = source.open()
    commit = state.commit
    storage = open_storage(target)
    if any(each.step == commit.step and each.complete for each in catalog.checkpoints(storage)):
        raise UserError(f"{target} has a complete checkpoint of step {commit.step} already.")
    wanted = state_tensors(program)
    check_same_model(state.descriptions, wanted)
    mesh = program.mesh
    images = [Image(written_by(wanted.tensors, mesh, rank)) for rank in range(mesh.size)]
    for rank, image in enumerate(images):
        memory = torch.zeros(image.size, dtype=torch.uint8)
        image.frames_into(memory)
        for place, elements in zip(image.places, image.elements(memory), strict=True):
            elements.copy_(state.box(place.tensor.name, place.piece.box))
        writer = PartWriter(storage, rank, commit.attempt, tuple(image.stored()), image.size)
        writer.write(commit.step, memoryview(memory.numpy()))  # type: ignore[arg-type]
    files = {
        PLAN: json.dumps(program.plan.to_json()).encode(),
        METADATA: dcp_metadata([image.stored() for image in images]),
    }
    facts = {
        **commit.state,
        "mesh": [list(axis) for axis in mesh],
        "micro_batches": program.micro_batches,
        "program": program.fingerprint,
    }
    committer = Committer(
        storage, mesh.size, commit.attempt, files, None, (), lambda event, **facts: None, 0.0
    )
    committer.expect(commit.step, facts, {HISTORY: state.file(HISTORY).decode()})
    committer.poll()
    return Place(storage, folder_name(commit.step, commit.attempt))


def export(source: Place, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> list[Path]:
    """Write the parameters, under every name of the model, as Hugging Face's safetensors files.

    In several files with an index where they are larger than `shard_bytes` together; returns all.
    Raises `UserError` if a tensor is damaged.
    """
    state = source.open()
    aliases = state.commit.state["aliases"]
    names = {}
    for key in state:
        kind, _, name = key.partition(".")
        if kind in ("model", "buffer"):
            names.update(dict.fromkeys((name, *aliases.get(name, ())), key))
    groups: list[list[str]] = [[]]
    filled = 0
    for name, key in sorted(names.items()):
        size = _nbytes(state, key, dtype)
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    make_folder(folder)
    files = [
        folder / (MODEL if len(groups) == 1 else f"model-{n:05d}-of-{len(groups):05d}.safetensors")
        for n in range(1, len(groups) + 1)
    ]
    for file, group in zip(files, groups, strict=True):
        try:
            tensors = {name: _cast(state[names[name]], dtype) for name in group}
        except DamagedError as error:
            raise UserError(f"{source} is damaged: {error}.") from error
        part = file.with_name(file.name + ".part")
        save_file(tensors, part, metadata={"format": "pt"})
        shutil.move(part, file)
    if len(groups) > 1:
        weight_map = {
            name: file.name for file, group in zip(files, groups, strict=True) for name in group
        }
        total = sum(_nbytes(state, key, dtype) for key in names.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        files.append(folder / INDEX)
    return files


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _nbytes(state: SavedState, key: str, dtype: torch.dtype | None) -> int:
    described = state.descriptions[key]
    stored: torch.dtype = getattr(torch, described.dtype)
    kind = dtype if dtype is not None and stored.is_floating_point else stored
    return torch.Size(described.shape).numel() * kind.itemsize
