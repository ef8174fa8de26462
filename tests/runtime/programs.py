"""Rank graphs that tests run on several executors."""

from __future__ import annotations

import functools

from torch import fx

from msc.ir import actions
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from tests.runtime.build import (
    ATEN,
    C10D,
    Builder,
    all_gather,
    all_reduce,
    recv,
    reduce_scatter,
    send,
)


def every_collective(rank: int) -> fx.GraphModule:
    """Two ranks of tp: each kind of collective once, two of them in flight together."""
    build = Builder("layers.0")
    x = build.input("x", 4, 2)
    first = build.call(C10D.all_reduce.default, x, "sum", "tp")
    second = build.call(C10D.all_gather_into_tensor.default, x, 2, "tp")
    gathered, reduced = build.wait(second), build.wait(first)
    scattered = reduce_scatter(build, gathered, 2, "tp")
    largest = all_reduce(build, x, "tp", "max")
    sent, received = ((1, 3), (1, 2)) if rank == 0 else ((2, 2), (3, 2))
    mixed = build.collective(C10D.all_to_all_single.default, x, list(received), list(sent), "tp")
    alone = all_gather(build, x, 1, "dp")
    return build.done(gathered, reduced, scattered, largest, mixed, alone)


@functools.cache
def block() -> fx.GraphModule:
    """`(x, w) -> (x w, summed over tp, + relu x; relu x)`."""
    build = Builder("layers.0")
    x, w = build.input("x", 4, 8), build.input("w", 8, 8)
    start = build.call(C10D.all_reduce.default, build.call(ATEN.mm.default, x, w), "sum", "tp")
    relu = build.call(ATEN.relu.default, x)
    return build.done(build.call(ATEN.add.Tensor, build.wait(start), relu), relu)


def two_blocks(rank: int) -> fx.GraphModule:
    """The same block twice."""
    build = Builder()
    x, w = build.input("x", 4, 8), build.input("w", 8, 8)
    first = build.item(build.graph_call("first", block(), x, w), 0)
    second = build.graph_call("second", block(), first, w)
    return build.done(build.item(second, 0), build.item(second, 1))


def exchange(rank: int) -> fx.GraphModule:
    """Two stages swap a message of two tensors, both directions in flight at once."""
    build = Builder()
    x, y = build.input("x", 2, 3), build.input("y")
    there, back = ("forward", "backward") if rank == 0 else ("backward", "forward")
    sending = send(build, [x, y], 1 - rank, there)
    receiving = recv(build, 1 - rank, back, (2, 3), ())
    both = build.call(actions.wait, receiving)
    build.call(actions.wait, sending)
    doubled = build.call(ATEN.mul.Tensor, build.item(both, 0), 2.0)
    return build.done(doubled, build.item(both, 1))


def accumulation(rank: int) -> fx.GraphModule:
    """Three micro-batches, summed; the first part is also a result of its own."""
    build = Builder()
    x = build.input("x", 6, 2)
    part = x.meta["val"][:2]
    parts = [build.call(actions.micro_batch, x, 0, index, 3, val=part) for index in range(3)]
    total = build.call(actions.accumulate, None, (parts[0], parts[0]))
    for part in parts[1:]:
        total = build.call(actions.accumulate, total, (part, None))
    first = parts[0]
    return build.done(build.item(total, 0), build.item(total, 1), first)


def large_sum(rank: int) -> fx.GraphModule:
    """An all-reduce of 640 kB."""
    build = Builder()
    x = build.input("x", 2, 40_000)
    return build.done(all_reduce(build, x, "tp"))


def twin_groups(rank: int) -> fx.GraphModule:
    """Two groups of the same ranks, with collectives in flight on both."""
    build = Builder()
    x = build.input("x", 4)
    first = build.call(C10D.all_reduce.default, x, "sum", "dp,tp")
    second = build.call(C10D.all_gather_into_tensor.default, x, 2, "tp")
    return build.done(build.wait(second), build.wait(first))


def fused(rank: int) -> fx.GraphModule:
    """Two ranks of tp: a gather with two GEMMs and a weight gradient, and two reductions.

    The gathered dim is the second, so that rows of a rank do not lie together.
    """
    build = Builder("layers.0")
    x, w, v = build.input("x", 2, 3, 8), build.input("w", 6, 8), build.input("v", 8, 5)
    b, other = build.input("b", 6), build.input("other", 2, 6, 3)
    args = (x, 1, [w, v], [b, None], [False, True], [other], [False], True, 2, "tp")
    whole = build.call(ALL_GATHER_MATMUL, *args)
    y, z, gradient, gathered = (build.item(whole, index) for index in range(4))
    first = build.call(MATMUL_REDUCE_SCATTER, y, w, None, True, 1, 2, "tp")
    second = build.call(MATMUL_REDUCE_SCATTER, y, w, gathered, True, 0, 2, "tp")
    return build.done(z, gradient, gathered, first, second)
