"""Which tensors travel together over dp: buckets, in the order in which they are made or read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import fx

from msc.cost.collectives import collective_seconds
from msc.cost.flops import nbytes
from msc.cost.topology import group_spans
from msc.ir.groups import Group
from msc.passes.compilation import Settings

_SMALLEST = 2**20


def buckets(
    names: Sequence[str], gradients: Mapping[str, fx.Node], limit: float
) -> list[list[str]]:
    """Groups of gradients of one dtype, each of at most `limit` bytes unless it is of one.

    `names` stand in the order of the forward.
    """
    found: list[list[str]] = []
    filled = 0
    for name in reversed(names):
        value = gradients[name].meta["val"]
        same = found and gradients[found[-1][0]].meta["val"].dtype == value.dtype
        if not same or filled + nbytes(value) > limit:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += nbytes(value)
    return found


def bucket_limit(settings: Settings, kind: str, group: str, whole: float) -> float:
    """Bytes of a bucket, where `whole` bytes are to be moved by collectives of `kind` on a group.

    n buckets cost n latencies, and the last one, whose time nothing hides, a part 1/n of all bytes:
    n L + whole / (n B) is least for buckets of sqrt(whole L B) bytes. Without a cluster `L B` is
    not known; then it is a few buckets of at most `Settings.bucket_bytes`.
    """
    cluster = settings.cost.cluster
    if cluster is None:
        # not all in one: the first should leave long before the last gradient is there
        return min(settings.bucket_bytes, max(_SMALLEST, whole / 8))
    stages = range(settings.mesh.axis_size("pp"))
    parsed = Group.parse(group)
    spans = group_spans(settings.mesh, parsed, stages, cluster.devices_per_node)
    latency = max(collective_seconds(cluster, kind, 0.0, span) for span in spans)
    moving = max(collective_seconds(cluster, kind, whole, span) for span in spans) - latency
    return math.sqrt(latency / moving) * whole if moving > 0 else whole
