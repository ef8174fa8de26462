"""Collectives and their products in one kernel: which kernels, and what each rank gives them.

A plan is made of shapes and dtypes, as those of other ops; what it binds is one rank's side of a
call. The memory that ranks share, flags and the order of copies are the runtime's
(`msc.runtime.fused_kernels`), which adds them to the arguments of each launch.

Kernels know rows one rank's after another's. Where the dim that is cut is not the first, results
of a gather, or what a scatter multiplies, are copied into that order, as the unfused pair copies
what it moves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernel_calls.call import dense, one_dtype, rows, warn_once
from msc.codegen.kernel_calls.device import Kernels
from msc.codegen.kernels import gather_gemm, gather_weight_gradient, gemm_scatter
from msc.codegen.kernels.description import Kernel, Target, Tiles, ceil_div
from msc.codegen.kernels.dtypes import check_dtype, on_tensor_cores
from msc.codegen.kernels.epilogue import Epilogue
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gather_weight_gradient import GatherWeightGradient
from msc.codegen.kernels.gemm_scatter import GemmScatter
from msc.codegen.kernels.protocol import Chunks, splits_for
from msc.codegen.kernels.tiles import product_tiles, scatter_tiles, several_tiles
from msc.ir.errors import PlanError
from msc.ir.ops.fused_collectives import from_parts, into_parts, over_rows, part_shape
from msc.ir.torch_private import storage_key

SPARE = 36
"""Processors left to copies where several ranks share a device, so that what kernels wait for can
always run: a copy inside one device may take processors, as one between devices does not."""


@dataclass(frozen=True)
class GatherLaunch:
    """A kernel that reads gathered rows: in which argument, and its other tensors."""

    kernel: Kernel
    gathered: str
    values: dict[str, Tensor]


@dataclass(frozen=True)
class BoundGather:
    """One rank's side of a call: `shard` [rows, k] is what it gives.

    finish: makes the op's results of the gathered rows when all kernels have been launched.
    """

    shard: Tensor
    launches: tuple[GatherLaunch, ...]
    finish: Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class GatherPlan:
    """How kernels compute an `msc.all_gather_matmul`.

    columns: of the gathered rows. products: kernels, each with the numbers of its weights; several
    weights of one layout share a kernel. over: kernels of products over rows, one for each of
    `others`; none where the library takes them from the gathered rows, behind the kernels.
    """

    chunks: Chunks
    columns: int
    dtype: torch.dtype
    products: tuple[tuple[Kernel, tuple[int, ...]], ...]
    over: tuple[Kernel, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All of them, in the order in which they are launched."""
        return (*(kernel for kernel, _ in self.products), *self.over)

    def bind(
        self,
        x: Tensor,
        dim: int,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        transposed: Sequence[bool],
        others: Sequence[Tensor],
        is_first: Sequence[bool],
        keep: bool,
        size: int,
        group: str,
    ) -> BoundGather:
        """A rank's side; operands as those of the op."""
        rows_of_all = size * self.chunks.chunk
        whole = (*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 : -1])
        widths = [w.shape[1 if flag else 0] for w, flag in zip(weights, transposed, strict=True)]
        made = [x.new_empty((rows_of_all, width)) for width in widths]
        launches: list[GatherLaunch] = []
        for kernel, numbers in self.products:
            values: dict[str, Tensor] = {}
            for place, number in enumerate(numbers):
                suffix = f"_{place}" if len(numbers) > 1 else ""
                bias = biases[number]
                values[f"b{suffix}"] = dense(weights[number])
                values[f"c{suffix}"] = made[number]
                if bias is not None:
                    values[f"bias{suffix}"] = dense(bias)
            launches.append(GatherLaunch(kernel, "a", values))
        gradients: list[Tensor] = []
        for kernel, other, first in zip(self.over, others, is_first, strict=False):
            n, k = other.shape[-1], self.columns
            parts = rows(into_parts(other.reshape(*whole, n), dim, size))
            dw = x.new_empty((k, n) if first else (n, k))
            gradients.append(dw)
            own, gathered = ("x", "dy") if first else ("dy", "x")
            launches.append(GatherLaunch(kernel, gathered, {own: parts, "dw": dw}))

        def finish(gathered: Tensor) -> list[Tensor]:
            results = [
                from_parts(y, (*x.shape[:-1], width), dim, size)
                for y, width in zip(made, widths, strict=True)
            ]
            results += gradients
            left = [] if self.over else others
            if left or keep:
                value = from_parts(gathered, x.shape, dim, size)
                results += over_rows(value, left, is_first[: len(left)])
            if keep:  # a copy, unless the rows had to be copied into their order
                lies_there = storage_key(value) == storage_key(gathered)
                form = torch.contiguous_format
                results.append(value.clone(memory_format=form) if lies_there else value)
            return results

        return BoundGather(rows(x), tuple(launches), finish)

    def allocate(self, x: Tensor, *operands: Any) -> list[Tensor]:
        """What a call does to memory besides that which ranks share, on any one rank."""
        shared = x.new_empty(()).expand(self.chunks.rows, self.columns)
        return self.bind(x, *operands).finish(shared)


@dataclass(frozen=True)
class BoundScatter:
    """One rank's side of a call: tensors of its own; `finish` makes the op's result."""

    values: dict[str, Tensor]
    finish: Callable[[], Tensor]


@dataclass(frozen=True)
class ScatterPlan:
    """How kernels compute an `msc.matmul_reduce_scatter`.

    staged: [ranks, rows of a rank, columns] of what ranks store at an owner. counters: of one set.
    """

    kernels: tuple[Kernel, ...]
    staged: tuple[int, int, int]
    counters: int
    dtype: torch.dtype

    def bind(
        self,
        x: Tensor,
        weight: Tensor,
        add: Tensor | None,
        transposed: bool,
        dim: int,
        size: int,
        group: str,
    ) -> BoundScatter:
        """A rank's side; operands as those of the op."""
        _, chunk, n = self.staged
        result = x.new_empty((chunk, n))
        values = {"a": rows(into_parts(x, dim, size)), "b": dense(weight), "c": result}
        if add is not None and add.dim() == 1:
            values["bias"] = dense(add)
        elif add is not None:
            values["residual"] = rows(into_parts(add, dim, size))
        shape = part_shape((*x.shape[:-1], n), dim, size)
        return BoundScatter(values, lambda: result.view(shape))

    def allocate(self, *operands: Any) -> Tensor:
        """What a call does to memory besides that which ranks share, on any one rank."""
        return self.bind(*operands).finish()


class FusedCall:
    """What executors run for a fused collective whose kernels they can launch.

    `failure` is set, on all ranks of a group alike, where a kernel does not compile or ranks have
    no memory in common: from then on the unfused pair does the work. op, where: as of `KernelCall`.
    """

    def __init__(self, op: str, where: str, plan: GatherPlan | ScatterPlan, group: str) -> None:
        self.op = op
        self.where = where
        self.plan = plan
        self.group = group
        self.failure = ""
        self.__name__ = f"{op.replace('.', '_')}_kernel"

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All that it may launch."""
        return self.plan.kernels

    def fail(self, failure: str, speaks: bool) -> None:
        """Give up the kernels; of the ranks that do so together one `speaks`, once for each op."""
        self.failure = failure
        if speaks:
            warn_once(
                self.op,
                f"{self.op}{self.where} runs without its Triton kernel on all ranks of "
                f"'{self.group}': {failure}. From now on the collective and the products follow "
                "each other.",
            )


def gather_plan(
    kernels: Kernels,
    x: Tensor,
    dim: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transposed: Sequence[bool],
    others: Sequence[Tensor],
    is_first: Sequence[bool],
    keep: bool,
    size: int,
    group: str,
) -> GatherPlan:
    """Kernels for an `msc.all_gather_matmul`, or `PlanError` with the reason why not."""
    op = "all-gather + products"
    target = _target(kernels, op, size)
    dtype = one_dtype(op, x, *weights, *biases, *others)
    check_dtype(op, dtype)
    k = x.shape[-1]
    m = size * (x.numel() // max(1, k))
    widths = [w.shape[1 if flag else 0] for w, flag in zip(weights, transposed, strict=True)]
    _not_empty(op, m, k, *widths, *(other.shape[-1] for other in others))
    alike: dict[tuple[bool, bool], list[int]] = {}
    for number, (flag, bias) in enumerate(zip(transposed, biases, strict=True)):
        alike.setdefault((flag, bias is not None), []).append(number)
    made = [
        _product(target, (m, k), tuple(widths[n] for n in numbers), size, dtype, *form)
        for form, numbers in alike.items()
    ]
    tiles = sum(map(_tile_count, made))
    splits = splits_for(max(1, tiles), target.processors, Chunks(m, size).chunk)
    products = [gather_gemm.emit(dataclasses.replace(each, splits=splits)) for each in made]
    # the library multiplies over rows as fast as any kernel, once all rows are there
    in_kernels = kernels.everywhere or not weights
    over = [
        _over_rows(target, (m, k, other.shape[-1]), first, size, dtype, splits)
        for other, first in zip(others, is_first, strict=True)
        if in_kernels
    ]
    return GatherPlan(
        Chunks(m, size, splits),
        k,
        x.dtype,
        tuple((kernel, tuple(n)) for kernel, n in zip(products, alike.values(), strict=True)),
        tuple(over),
    )


def scatter_plan(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    add: Tensor | None,
    transposed: bool,
    dim: int,
    size: int,
    group: str,
) -> ScatterPlan:
    """Kernels for an `msc.matmul_reduce_scatter`, or `PlanError` with the reason why not."""
    op = "product + reduce-scatter"
    target = _target(kernels, op, size)
    dtype = one_dtype(op, x, weight, add)
    check_dtype(op, dtype)
    k = x.shape[-1]
    n = weight.shape[1 if transposed else 0]
    m = x.numel() // max(1, k)
    _not_empty(op, m, n, k)
    chunk = Chunks(m, size).chunk
    added = "" if add is None else "bias" if add.dim() == 1 else "residual"
    made = GemmScatter(
        m,
        n,
        k,
        size,
        dtype,
        target,
        _scatter_tiles(target, (chunk, n, k), dtype, added),
        "kn" if transposed else "nk",
        add=added,
    )
    both = (gemm_scatter.emit(made), gemm_scatter.emit_sum(made))
    return ScatterPlan(both, (size, chunk, n), made.counters, x.dtype)


def _target(kernels: Kernels, op: str, size: int) -> Target:
    """What one rank has of the device."""
    assert kernels.target is not None
    if kernels.unfused:
        raise PlanError(kernels.unfused)
    if size < 2:
        raise PlanError(f"{op}: a group of one rank moves nothing that could be hidden")
    if not kernels.shared:
        return kernels.target
    processors = (kernels.target.processors - SPARE) // size
    if processors < 1:
        raise PlanError(
            f"{op}: the kernels of {size} ranks, which wait for each other, do not fit on "
            f"{kernels.target.processors} processors at once"
        )
    return dataclasses.replace(kernels.target, processors=processors)


def _not_empty(op: str, *sizes: int) -> None:
    if not math.prod(sizes):
        raise PlanError(f"{op}: a product with sizes {', '.join(map(str, sizes))} is empty")


def _product(
    target: Target,
    gathered: tuple[int, int],
    widths: tuple[int, ...],
    ranks: int,
    dtype: str,
    transposed: bool,
    bias: bool,
) -> GatherGemm:
    m, k = gathered
    epilogue = Epilogue(bias=bias)
    tiles = product_tiles(target, (m // ranks, max(widths), k), dtype, epilogue)
    if len(widths) > 1 and not target.interpreted:
        # in float32 a third stage spills on sm_80
        own = dataclasses.replace(tiles, stages=2)
        tiles = several_tiles(target) if on_tensor_cores(dtype) else own
    layout = "kn" if transposed else "nk"
    return GatherGemm(m, k, widths, ranks, dtype, target, tiles, layout, epilogue=epilogue)


def _tile_count(gather: GatherGemm) -> int:
    tiles = gather.tiles
    columns = sum(ceil_div(width, tiles.n) for width in gather.widths)
    return gather.ranks * ceil_div(gather.chunks.chunk, tiles.m) * columns


def _scatter_tiles(target: Target, size: tuple[int, int, int], dtype: str, added: str) -> Tiles:
    if target.interpreted or not on_tensor_cores(dtype):
        return product_tiles(target, size, dtype, Epilogue())
    # a residual is read tile by tile into registers, of which larger tiles leave none
    return several_tiles(target) if added == "residual" else scatter_tiles(target)


def _over_rows(
    target: Target, size: tuple[int, int, int], first: bool, ranks: int, dtype: str, splits: int
) -> Kernel:
    """gathered [m, k] with another [m, n]: [k, n] where it comes first, else [n, k]."""
    m, k, n = size
    rows_, columns = (k, n) if first else (n, k)
    tiles = product_tiles(target, (rows_, columns, m // ranks), dtype, Epilogue())
    gathered = "dy" if first else "x"
    return gather_weight_gradient.emit(
        GatherWeightGradient(m, rows_, columns, gathered, ranks, dtype, target, tiles, splits)
    )
