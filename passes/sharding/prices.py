"""What moving a value from one state to another costs over an axis, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msc.cost import CostModel
from msc.cost.flops import nbytes
from msc.ir.placement import EVEN, PARTIAL, REPLICATED, VARYING, Partial, Shard, State
from msc.ir.values import tensors_of
from msc.passes.sharding.calls import Value


@dataclass(frozen=True)
class Payload:
    """A value as the ranks of the axis move it.

    nbytes: of the whole, for one micro-batch of one rank of dp; outer: by dim, the product of the
    dims before it. Collectives move along the first dim: another one that has more than one row
    before it is copied into place, in each direction.
    """

    nbytes: float
    outer: tuple[float, ...]

    @classmethod
    def of(cls, value: Value, share: float) -> Payload:
        """`share` is the part of the value that one micro-batch of one rank holds."""
        tensor = tensors_of(value[0])[value[1]]
        outer = tuple(math.prod(tensor.shape[:dim]) * share for dim in range(tensor.dim()))
        return cls(nbytes(tensor) * share, outer)

    def copied(self, state: State) -> bool:
        """Whether moving the shards of `state` takes a copy beside the collective."""
        return (
            isinstance(state.value, Shard)
            and state.value.dim < len(self.outer)
            and (self.outer[state.value.dim] > 1 or state.value.split != EVEN)
        )


def conversion_cost(
    have: State, want: State, payload: Payload, size: int, gradient: bool, model: CostModel
) -> float | None:
    """Cost of the collectives of both directions; None where there is no conversion."""
    if have == want or (not gradient and have.value == want.value):
        return 0.0
    copies = sum(model.compute(0, 2 * payload.nbytes) for s in (have, want) if payload.copied(s))

    def price(kind: str, backward: str = "") -> float:
        steps = [kind] if kind else []
        steps += [backward] if gradient and backward else []
        return sum(model.collective(step, payload.nbytes, size) + copies for step in steps)

    local = model.compute(0, payload.nbytes)
    if isinstance(have.value, Shard):
        if want == VARYING:
            return price("all_gather", "reduce_scatter")
        if want == REPLICATED:
            return price("all_gather")
        if isinstance(want.value, Shard):
            return price("all_gather", "reduce_scatter") + local
        return None
    if isinstance(have.value, Partial):
        if want == REPLICATED:
            if have.value.op == "max" and gradient:
                return None
            return price("all_reduce")
        if have.value.op != "sum":
            return None
        if want == VARYING:
            return price("all_reduce", "all_reduce")
        return price("reduce_scatter", "all_gather") if isinstance(want.value, Shard) else None
    if isinstance(want.value, Shard):
        return local if have == VARYING else price("", "all_gather") + local
    if want == VARYING:
        return price("", "all_reduce")
    if want == PARTIAL:
        return local if have == VARYING else price("", "all_reduce") + local
    return None


def send_cost(state: State, payload: Payload, size: int, gradient: bool, model: CostModel) -> float:
    """Cost of passing a value in `state`, and its gradient back, to the next pipeline stage."""
    local = payload.nbytes / size if isinstance(state.value, Shard) else payload.nbytes
    return model.send(local) * (2 if gradient else 1)
