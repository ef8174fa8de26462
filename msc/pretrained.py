"""`msc.load_pretrained`: a program that starts from safetensors files, read slice by slice."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from msc.ir.errors import UserError
from msc.ir.layout import ParameterLayout
from msc.ir.mesh import Mesh
from msc.program import Program
from msc.saved_tensors import SavedTensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load_pretrained(program: Program, path: str | Path) -> Program:
    """`program` with the parameters in `path`, a safetensors file, or a folder of Hugging Face's.

    Names are those of the plain module's `state_dict`; a tied parameter may have any of its names.
    Nothing is read now but the files' headers: each rank reads its slices when it starts. Buffers
    stay as they were; those of a model on `meta` come from `msc.init(model, seed)`.

    Raises `UserError` if a parameter is missing or of another shape, or a tensor in the files is
    none of the model's.
    """
    files = _files(Path(path))
    source = PretrainedTensors(program, files)
    result = copy.copy(program)
    result.start_from(source)
    return result


class PretrainedTensors(SavedTensors):
    """The tensors of several files, under the names that the program has for them."""

    def __init__(self, program: Program, files: list[Path]) -> None:
        advice = "It is cut short or damaged: copy it, or save the model, again."
        self._opened = [SavedTensors(file, advice=advice) for file in files]
        places = {name: each for each in self._opened for name in each}
        self._found: dict[str, tuple[str, SavedTensors]] = {}
        self._extra = program.extra_state()
        self._program = program
        self.state_names = tuple(self._extra)
        self.digest = _digest(files)
        known = set(self._extra) | set(program.buffers)
        missing = []
        for name, layout in program.parameters.items():
            names = (name, *layout.aliases)
            known.update(names)
            stored = next((each for each in names if each in places), None)
            if stored is None:
                missing.append(name)
                continue
            self._found[name] = stored, places[stored]
            shape = places[stored].shape(stored)
            if shape != layout.shape:
                raise UserError(
                    f"'{stored}' has shape {list(shape)} in the files, and {list(layout.shape)} in "
                    "the model."
                )
        unknown = sorted(places.keys() - known)
        if missing or unknown:
            raise UserError(
                "The files are of another model: "
                + "; ".join(
                    f"{len(names)} {what}, such as '{names[0]}'"
                    for names, what in (
                        (missing, "parameters are missing"),
                        (unknown, "tensors are none of the model's"),
                    )
                    if names
                )
                + "."
            )

    def __getitem__(self, name: str) -> Tensor:
        if name in self._found:
            stored, file = self._found[name]
            return file[stored]
        value = self._program.stored("buffer", name)
        if value is None:
            value = self._extra.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        if name in self._found or name in self._extra:
            return True
        return isinstance(name, str) and self._program.stored("buffer", name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._found, *self._extra}))

    def __len__(self) -> int:
        return len({*self._found, *self._extra})

    def shard(
        self, layout: ParameterLayout, mesh: Mesh, rank: int, stored: str | None = None
    ) -> Tensor:
        found, file = self._found[layout.name]
        return file.shard(layout, mesh, rank, stored or found)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        try:
            weights = json.loads((path / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path / INDEX} has no weight_map: {error}.") from error
        return [path / name for name in sorted(set(weights.values()))]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    raise UserError(
        f"{path} has neither {SINGLE} nor {INDEX}. Give a folder of Hugging Face's, what "
        "`msc ckpt export --hf` wrote, or one safetensors file."
    )


def _digest(files: list[Path]) -> str:
    """Of the headers: what ranks compare, so that all start from files of the same form."""
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            found.update(opened.read(length))
    return found.hexdigest()
