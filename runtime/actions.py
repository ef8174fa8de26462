"""What actions that stay on one rank do to tensors (see `msc.ir.actions`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from msc.ir.errors import InputError
from msc.ir.mesh import Mesh
from msc.ir.optimizer.learning_rate import LearningRate, Phase
from msc.ir.torch_private import add_each, add_each_
from msc.runtime.adam import adam
from msc.runtime.lamb import lamb, lamb_sums
from msc.runtime.sgd import sgd
from msc.runtime.shards import flatten_shards, unflatten_shards

MaybeTensors = Sequence[Tensor | None]


class LocalActions:
    """The local half of `rt`: the methods that generated code calls for actions of one rank."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh = mesh
        self.rank = rank
        self._coordinate = mesh.coordinate(rank)

    def coordinate(self, axis: str) -> Tensor:
        """This rank's coordinate on `axis`; 0 on an axis that the mesh does not name."""
        return torch.tensor(self._coordinate.get(axis, 0), dtype=torch.int64)

    def stage_rank(self, stage: int) -> int:
        """The rank at pp coordinate `stage` that is elsewhere as this one."""
        return self.mesh.rank({**self._coordinate, "pp": stage})

    @staticmethod
    def arrived(value: Tensor | Callable[[], Tensor]) -> Tensor:
        """An input; a function is called for it."""
        return value if isinstance(value, Tensor) else value()

    @staticmethod
    def micro_batch_index(index: int) -> Tensor:
        """`index` as a 0-dim int64 tensor on the CPU."""
        return torch.tensor(index, dtype=torch.int64)

    @staticmethod
    def micro_batch(value: Tensor, dim: int, index: int, count: int) -> Tensor:
        """Part `index` of `count` equal parts of `value` along `dim`; a view.

        Raises `InputError` if the dim does not split into `count` equal parts.
        """
        length, rest = divmod(value.shape[dim], count)
        if rest:
            raise InputError(
                f"Dim {dim} of an input has {value.shape[dim]} elements on this rank, which "
                f"{count} micro-batches do not divide (shape {tuple(value.shape)})."
            )
        return value.narrow(dim, index * length, length)

    @staticmethod
    def accumulate(
        total: MaybeTensors | None, parts: MaybeTensors, dtype: torch.dtype | None = None
    ) -> tuple[Tensor | None, ...]:
        """`total + parts` in new tensors; None as total gives the parts themselves, in `dtype`."""
        if total is None:
            return tuple(part if part is None else part.to(dtype or part.dtype) for part in parts)
        return _accumulate(total, parts, dtype, in_place=False)

    @staticmethod
    def accumulate_(
        total: MaybeTensors, parts: MaybeTensors, dtype: torch.dtype | None = None
    ) -> tuple[Tensor | None, ...]:
        """`total + parts`, added into the tensors of `total`."""
        return _accumulate(total, parts, dtype, in_place=True)

    @staticmethod
    def flatten(values: Sequence[Tensor]) -> Tensor:
        """One contiguous 1-D tensor that holds all values in order; a copy."""
        return torch.cat([value.reshape(-1) for value in values])

    @staticmethod
    def unflatten(bucket: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
        """The views of `bucket` with the given shapes, one after the other."""
        sizes = [torch.Size(shape) for shape in shapes]
        parts = torch.split(bucket, [size.numel() for size in sizes])
        return tuple(part.view(size) for part, size in zip(parts, sizes, strict=True))

    flatten_shards = staticmethod(flatten_shards)
    unflatten_shards = staticmethod(unflatten_shards)

    @staticmethod
    def squared_norm(values: MaybeTensors, copies: Sequence[int]) -> Tensor:
        """The sum of all squares in float64, `values[i]` counted one over `copies[i]`."""
        parts = [
            torch.linalg.vector_norm(value, dtype=torch.float64).square() / count
            for value, count in zip(values, copies, strict=True)
            if value is not None
        ]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)

    @staticmethod
    def learning_rate(step: Tensor, phases: Sequence[Phase], held: float) -> Tensor:
        """The rate of a step, 0-dim float64 on the device of `step`."""
        return LearningRate(tuple(phases), held).at(step)

    adam = staticmethod(adam)
    sgd = staticmethod(sgd)
    lamb_sums = staticmethod(lamb_sums)
    lamb = staticmethod(lamb)


def _accumulate(
    total: MaybeTensors, parts: MaybeTensors, dtype: torch.dtype | None, *, in_place: bool
) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = []
    both: list[tuple[int, Tensor, Tensor]] = []
    for index, (old, part) in enumerate(zip(total, parts, strict=True)):
        # What is taken over alone is copied: the next sum may add into every tensor of this one.
        if part is None:
            result.append(old if in_place or old is None else old.clone())
        elif old is None:
            result.append(part.to(dtype or part.dtype, copy=True))
        else:
            result.append(old)
            both.append((index, old, part))
    if both:
        indices, left, right = zip(*both, strict=True)
        if in_place:
            add_each_(left, right)
        else:
            for index, value in zip(indices, add_each(left, right), strict=True):
                result[index] = value
    return tuple(result)
