"""The parameters of a checkpoint as Hugging Face's safetensors files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from msc.checkpoint.place import Place
from msc.ir.dump import make_folder
from msc.ir.errors import InputError
from msc.pretrained import INDEX, SINGLE
from msc.runtime.checkpoint.saved_state import SavedState


def export(source: Place, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> list[Path]:
    """Write the parameters, under every name of the model, as Hugging Face's safetensors files.

    In several files with an index where they are larger than `shard_bytes` together; returns all.
    Raises `DamagedError` if a tensor is damaged, `InputError` for a dtype that holds no fractions,
    or files without room for a byte.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise InputError(f"{dtype} would cut the parameters to whole numbers; give a floating one.")
    if shard_bytes < 1:
        raise InputError(f"A file of {shard_bytes} bytes holds nothing; allow larger ones.")
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
        folder / (SINGLE if len(groups) == 1 else f"model-{n:05d}-of-{len(groups):05d}.safetensors")
        for n in range(1, len(groups) + 1)
    ]
    for file, group in zip(files, groups, strict=True):
        tensors = {name: _cast(state[names[name]], dtype) for name in group}
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
