"""Fused collectives between processes: in shared memory where it is, else one after the other.

In shared memory (`msc.runtime.shared_memory`) a gathering rank puts its shard, multiplies it, and
then multiplies each other shard straight from where its rank has put it, the next rank's first. A
reducing rank multiplies the rows of each other rank straight into that rank's memory, the next
rank's first and its own last, and sums what it has been given in rank order, so that results are
equal from run to run, bit for bit.

gloo has no such memory: whatever it sends costs the processor that multiplies about as much as it
hides, so elsewhere the collective and the GEMMs run unfused (`docs/architecture.md`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from msc.cost.flops import nbytes
from msc.ir.communication import FUSED, group_of, moved_tensors
from msc.ir.ops.fused_collectives import (
    from_parts,
    into_parts,
    over_rows,
    part_shape,
    product,
    products,
)
from msc.runtime.shared_memory import SharedMemory

Gather = Callable[[Tensor], Tensor]
ReduceScatter = Callable[[Tensor], Tensor]


def shared_bytes(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """By group, the bytes of shared memory that the largest of these fused collectives needs."""
    found: dict[str, int] = {}
    for node in nodes:
        part, whole = sorted(nbytes(tensor) for tensor in moved_tensors(node))
        reduces = FUSED[node.target] == "matmul_reduce_scatter"
        needed = whole * (whole // part) if reduces else whole
        found[group_of(node)] = max(found.get(group_of(node), 0), needed)
    return found


def gather_then_multiply(
    gather: Gather,
    size: int,
    x: Tensor,
    dim: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transposed: Sequence[bool],
    others: Sequence[Tensor],
    is_first: Sequence[bool],
    keep: bool,
) -> list[Tensor]:
    """`all_gather_matmul` as a gather along dim 0, which `gather` does, and GEMMs."""
    gathered = from_parts(gather(x.contiguous()), x.shape, dim, size)
    return products(gathered, weights, biases, transposed, others, is_first, keep)


def multiply_then_reduce(
    reduce_scatter: ReduceScatter,
    size: int,
    x: Tensor,
    weight: Tensor,
    add: Tensor | None,
    transposed: bool,
    dim: int,
) -> Tensor:
    """`matmul_reduce_scatter` as a GEMM and a reduce-scatter of dim 0."""
    own = product(x, weight, add, transposed)
    shape = part_shape(own.shape, dim, size)
    return reduce_scatter(into_parts(own, dim, size)).view(shape)


def _alone_all_gather_matmul(x: Tensor, *operands: Any) -> list[Tensor]:
    *rest, size, _ = operands

    def gather(value: Tensor) -> Tensor:
        return value.new_empty((size * value.shape[0], *value.shape[1:]))

    return gather_then_multiply(gather, size, x, *rest)


def _alone_matmul_reduce_scatter(x: Tensor, *operands: Any) -> Tensor:
    *rest, size, _ = operands

    def reduce_scatter(value: Tensor) -> Tensor:
        return value.new_empty((value.shape[0] // size, *value.shape[1:]))

    return multiply_then_reduce(reduce_scatter, size, x, *rest)


UNFUSED: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": _alone_all_gather_matmul,
    "matmul_reduce_scatter": _alone_matmul_reduce_scatter,
}
"""What each of them does to memory where it runs unfused, on any one rank; sends nothing."""


def all_gather_matmul(
    memory: SharedMemory,
    site: str,
    x: Tensor,
    dim: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transposed: Sequence[bool],
    others: Sequence[Tensor],
    is_first: Sequence[bool],
    keep: bool,
) -> list[Tensor]:
    """`msc.ir.ops.fused_collectives.all_gather_matmul` in shared memory."""
    size, here = memory.size, memory.position
    memory.begin(f"all_gather_matmul at {site}")
    shards = memory.room((size, *x.shape), x.dtype)
    shards[here].copy_(x)
    memory.put()
    whole = (*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 : -1])
    results = [
        x.new_empty((*whole, weight.shape[1 if flag else 0]))
        for weight, flag in zip(weights, transposed, strict=True)
    ]
    for source in _from(here, size):
        if source != here:
            memory.wait_for_shard(source)
        rows = _as_runs(shards[source], dim)
        for result, weight, bias, flag in zip(results, weights, biases, transposed, strict=True):
            for run, out in zip(rows, _rows_of(result, source, dim, size), strict=True):
                _multiply(run, weight, bias, flag, out)
    if others or keep:
        gathered = from_parts(shards.flatten(0, 1), x.shape, dim, size)
        results += over_rows(gathered, others, is_first)
        if keep:  # a copy, unless the shards had to be copied into one value
            lies_there = gathered.data_ptr() == shards.data_ptr()
            results.append(gathered.clone() if lies_there else gathered)
    return results


def matmul_reduce_scatter(
    memory: SharedMemory,
    site: str,
    x: Tensor,
    weight: Tensor,
    add: Tensor | None,
    transposed: bool,
    dim: int,
) -> Tensor:
    """`msc.ir.ops.fused_collectives.matmul_reduce_scatter` in shared memory."""
    size, here = memory.size, memory.position
    n = weight.shape[1 if transposed else 0]
    shape = part_shape((*x.shape[:-1], n), dim, size)
    memory.begin(f"matmul_reduce_scatter at {site}")
    summands = memory.room((size, size, *shape), x.dtype)  # [owner, source]
    x = x.contiguous()
    summed = add.contiguous() if add is not None and add.dim() > 1 else None
    for owner in (*_from(here, size)[1:], here):
        rows = _rows_of(x, owner, dim, size)
        added = [add] * len(rows) if summed is None else _rows_of(summed, owner, dim, size)
        outs = _as_runs(summands[owner, here], dim)
        for run, one, out in zip(rows, added, outs, strict=True):
            _multiply(run, weight, one, transposed, out)
        if owner != here:
            memory.put_for(owner)
    for source in range(size):
        if source != here:
            memory.wait_for_summand(source)
    own = summands[here]
    total = torch.add(own[0], own[1])
    for source in range(2, size):
        total += own[source]
    return total


def _from(here: int, size: int) -> list[int]:
    """All positions, from this one on."""
    return [(here + step) % size for step in range(size)]


def _as_runs(part: Tensor, dim: int) -> tuple[Tensor, ...]:
    """A contiguous shard as matrices, one for each run of rows that lie together in the whole."""
    return part.view(math.prod(part.shape[:dim]), -1, part.shape[-1]).unbind(0)


def _rows_of(whole: Tensor, position: int, dim: int, size: int) -> tuple[Tensor, ...]:
    """The same runs of a contiguous whole, of the part of one position along `dim`."""
    before = math.prod(whole.shape[:dim])
    return whole.view(before, size, -1, whole.shape[-1])[:, position].unbind(0)


def _multiply(
    rows: Tensor, weight: Tensor, add: Tensor | None, transposed: bool, out: Tensor
) -> None:
    """`rows @ weight.T + add` into `out`; transposed: `rows @ weight + add`."""
    matrix = weight if transposed else weight.t()
    if add is None:
        torch.mm(rows, matrix, out=out)
    else:
        torch.addmm(add, rows, matrix, out=out)
