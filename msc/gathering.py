"""Whole tensors from the shards that real ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from msc.program import Program


def gather_buffers(
    program: Program, held: Mapping[str, Tensor], rank: int, device: torch.device
) -> dict[str, Tensor]:
    """The buffers that the forward writes, on every rank, on the CPU. Collective."""
    found = {}
    for name, layout in program.buffers.items():
        if layout.stage is None:
            continue
        owner = layout.writer(program.mesh)
        if owner == rank:
            value = held[name].to(device).contiguous()
        else:
            value = torch.empty(layout.shape, dtype=layout.dtype, device=device)
        dist.broadcast(value, owner)
        found[name] = value.cpu().clone()
    return found


def gather_whole(
    program: Program,
    shards: Mapping[str, Tensor],
    rank: int,
    device: torch.device,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The whole tensors of parameters, or of what is sharded like them, on every rank.

    `shards` are this rank's, by parameter name; `names` those to gather, by default all parameters
    that some stage holds. Collective: the rank with the first copy of a shard broadcasts it, all of
    one dtype in one piece. The results are on the CPU and share no memory with the shards.
    """
    mesh = program.mesh
    held = {
        name: layout
        for name, layout in program.parameters.items()
        if layout.stages and (names is None or name in names)
    }
    buckets: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, layout in held.items():
        for owner in layout.owners(mesh):
            buckets.setdefault((owner, program.dtype_of(layout)), []).append(name)
    parts: dict[tuple[int, str], Tensor] = {}
    for (owner, dtype), members in sorted(buckets.items(), key=lambda item: str(item[0])):
        shapes = [torch.Size(held[name].local_shape(mesh, owner)) for name in members]
        if owner == rank:
            flat = torch.cat([shards[name].reshape(-1).to(device) for name in members])
        else:
            numel = sum(shape.numel() for shape in shapes)
            flat = torch.empty(numel, dtype=dtype, device=device)
        dist.broadcast(flat, owner)
        pieces = torch.split(flat.cpu(), [shape.numel() for shape in shapes])
        for name, shape, piece in zip(members, shapes, pieces, strict=True):
            parts[owner, name] = piece.view(shape)
    return {
        name: layout.whole([parts[owner, name] for owner in layout.owners(mesh)], mesh).clone()
        for name, layout in held.items()
    }
