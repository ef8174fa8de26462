"""Which gradients are reduced together: buckets, in the order in which the backward makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from msc.cost.flops import nbytes

_SMALLEST = 2**20


def buckets(
    names: Sequence[str], gradients: Mapping[str, fx.Node], bucket_bytes: int
) -> list[list[str]]:
    """Groups of gradients of one dtype, each of at most `bucket_bytes` unless it is of one.

    `names` stand in the order of the forward.
    """
    found: list[list[str]] = []
    filled = 0
    whole = sum(nbytes(gradients[name].meta["val"]) for name in names)
    # not all in one: the first should leave long before the last gradient is there
    limit = min(bucket_bytes, max(_SMALLEST, whole // 8))
    for name in reversed(names):
        value = gradients[name].meta["val"]
        same = found and gradients[found[-1][0]].meta["val"].dtype == value.dtype
        if not same or filled + nbytes(value) > limit:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += nbytes(value)
    return found
