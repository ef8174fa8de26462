"""Predicted memory is the largest sum of what is live, counted by hand on small graphs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.kernel_calls.device import kernels_for
from msc.ir import actions
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.ir.optimizer import AdamW
from msc.runtime.memory.predict import MemoryPredictor
from tests.passes.graphs import compilation, layers, through
from tests.runtime.build import ATEN, C10D, Builder, all_reduce, recv, send

WEIGHTS = 8 * (8 * 8 + 4 * 8 * 16)
"""Bytes of the parameters of two `layers` and their head."""
ACTIVATION = 8 * 4 * 16
"""Bytes of what a layer computes of four samples and saves."""
INPUT = 8 * 4 * 8
LOSS = 8


def predicted(mesh: str, micro_batches: int = 1, optimizer: AdamW | None = None) -> list[int]:
    unit = compilation(layers(2), mesh, micro_batches, optimizer=optimizer)
    return [MemoryPredictor().bytes(gm) for gm in through("build-rank-graphs", unit).rank_graphs]


def test_a_step_of_one_micro_batch() -> None:
    # most is live at the end of the backward: all gradients, and that of the first activation; what
    # was saved has ended where it was last read
    assert predicted("") == [WEIGHTS + INPUT + LOSS + ACTIVATION + WEIGHTS]


def test_the_second_sum_of_gradients_has_memory_of_its_own() -> None:
    """The gradients of two micro-batches and their sum; later ones are added into it."""
    assert predicted("", 2) == [WEIGHTS + INPUT + LOSS + 3 * WEIGHTS]
    assert predicted("", 4) == [WEIGHTS + INPUT + LOSS + 3 * WEIGHTS]


def test_moments_count() -> None:
    with_optimizer = predicted("", 1, AdamW())
    step = 8
    assert with_optimizer == [predicted("")[0] + 2 * WEIGHTS + step]


def test_buckets_are_copies() -> None:
    """The gradients and their bucket, then the bucket and its sum; what was saved is gone."""
    state = WEIGHTS + INPUT // 2 + LOSS
    assert predicted("dp=2") == [state + 2 * WEIGHTS]


def test_1f1b_holds_more_on_the_first_stage() -> None:
    """When the gradients of two micro-batches are summed, the third one's forward has run."""
    one, *_ = predicted("pp=2", 4)
    layer = 8 * 2 * 8 * 16
    sent = INPUT // 4
    saved = 8 * 16  # its input is a view of the rank's
    assert one == layer + INPUT + saved + sent + 3 * layer


def built(build: Builder, *results: fx.Node) -> int:
    return MemoryPredictor().bytes(build.done(*results))


def test_values_end_with_their_last_reader() -> None:
    build = Builder()
    x = build.input("x", 10)
    for _ in range(3):
        x = build.call(ATEN.sin.default, x)
    assert built(build, x) == 8 * 10 * 3  # the input is held; then one value and the next


def test_items_of_a_tuple_end_on_their_own() -> None:
    build = Builder()
    x = build.input("x", 10)
    parts = build.call(ATEN.split_copy.Tensor, x, 5)
    left, right = build.item(parts, 0), build.item(parts, 1)
    first = build.call(ATEN.sin.default, left)
    assert built(build, build.call(ATEN.cos.default, first), right) == 8 * (10 + 10 + 5)


def test_views_take_nothing_and_a_sum_is_added_to() -> None:
    build = Builder()
    x = build.input("x", 4, 10)
    half = x.meta["val"][:2]
    parts = [build.call(actions.micro_batch, x, 0, i, 2, val=half) for i in (0, 1, 0)]
    total = build.call(actions.accumulate, None, (parts[0],))
    total = build.call(actions.accumulate, total, (parts[1],))
    total = build.call(actions.accumulate, total, (parts[2],))
    assert built(build, build.item(total, 0)) == 8 * (40 + 20)


def test_a_pointwise_result_may_lie_over_its_operand() -> None:
    build = Builder()
    x = build.input("x", 10)
    y = build.call(ATEN.add.Tensor, x, 1)
    assert built(build, build.call(ATEN.mul.Tensor, y, 2)) == 8 * 20


def test_what_a_kernel_needs_only_inside_counts() -> None:
    """Dropout hashes the index of each element: 8 bytes for each, several times."""
    build = Builder()
    x, key = build.input("x", 1000), build.input("key", dtype=torch.int64)
    dropped = build.call(torch.ops.msc.dropout.default, x, 0.5, key, [None], [1000])
    assert built(build, dropped) > 8 * 4 * 1000


def test_a_message_is_held_until_it_has_arrived() -> None:
    def sending(early: bool) -> int:
        build = Builder()
        x = build.input("x", 10)
        message = build.call(ATEN.sin.default, x)
        token = send(build, [message], 1, "pp:0>1")
        if early:
            build.call(actions.wait, token)
        y = build.call(ATEN.cos.default, x)
        if not early:
            build.call(actions.wait, token)
        return built(build, y)

    assert sending(early=True) == 8 * 20
    assert sending(early=False) == 8 * 30


def test_a_receive_takes_memory_from_its_start() -> None:
    build = Builder()
    x = build.input("x", 10)
    token = recv(build, 0, "pp:0>1", (10,), (5,))
    token.meta["val"] = None
    y = build.call(ATEN.sin.default, x)
    z = build.call(ATEN.cos.default, y)
    shapes = tuple(torch.empty(n, dtype=torch.float64, device="meta") for n in (10, 5))
    values = build.call(actions.wait, token, val=shapes)
    total = build.call(ATEN.add.Tensor, z, build.call(operator.getitem, values, 0))
    # the input, y and z, and the message
    assert built(build, total) == 8 * (10 + 20 + 15)


def test_a_reduction_has_a_result_of_its_own() -> None:
    build = Builder()
    x = build.input("x", 10)
    bucket = build.call(actions.flatten, [x], val=x.meta["val"])
    total = all_reduce(build, bucket, "dp")
    views = build.call(actions.unflatten, total, [(10,)], val=(x.meta["val"],))
    assert built(build, build.item(views, 0)) == 8 * 30
    starts = [n for n in bucket.users if n.target is C10D.all_reduce.default]
    assert len(starts) == 1


def test_a_fused_collective_needs_what_it_needs_unfused() -> None:
    """The gathered value beside the product, or the product beside its part of the sum."""
    build = Builder()
    x, w = build.input("x", 4, 10), build.input("w", 5, 10)
    args: tuple[Any, ...] = (x, 0, [w], [None], [False], [], [], False, 2, "tp")
    y = build.item(build.call(ALL_GATHER_MATMUL, *args), 0)
    assert built(build, y) == 8 * (40 + 50 + 80 + 40)

    build = Builder()
    x, w = build.input("x", 8, 10), build.input("w", 5, 10)
    y = build.call(MATMUL_REDUCE_SCATTER, x, w, None, False, 0, 2, "tp")
    assert built(build, y) == 8 * (80 + 50 + 40 + 20)


def test_kernels_of_fused_collectives_need_no_gathered_value_of_their_own() -> None:
    """What ranks share holds it, and what they sum, from the first step on."""
    build = Builder()
    x, w, v = (build.input(n, *s, dtype=torch.float32) for n, s in SHAPES.items())
    args: tuple[Any, ...] = (x, 0, [w], [None], [False], [], [], False, 2, "tp")
    y = build.item(build.call(ALL_GATHER_MATMUL, *args), 0)
    z = build.call(MATMUL_REDUCE_SCATTER, y, v, None, False, 0, 2, "tp")
    choice = KernelChoice(kernels_for("interpreter"))
    found = MemoryPredictor(choice).bytes(build.done(z))
    assert choice.has_fused
    buffers = 2 * (4 * 8 * 16 + 4 * 8 * 16)  # rows of x, and products: each [8, 16], twice
    flags = 4 * 256  # announcements, flags and two sets of counters, each in a place of its own
    values = 4 * 16 + 16 * 16 + 16 * 16 + 8 * 16 + 4 * 16  # the inputs, y and z
    assert found == buffers + flags + 4 * values


SHAPES = {"x": (4, 16), "w": (16, 16), "v": (16, 16)}


def test_what_a_fused_gather_keeps_stays() -> None:
    build = Builder()
    x, w = build.input("x", 4, 10), build.input("w", 5, 10)
    args: tuple[Any, ...] = (x, 0, [w], [None], [False], [], [], True, 2, "tp")
    fused = build.call(ALL_GATHER_MATMUL, *args)
    y, whole = build.item(fused, 0), build.item(fused, 1)
    z = build.call(ATEN.sin.default, build.call(ATEN.cat.default, [y, y, y]))
    assert built(build, z, whole) == 8 * (40 + 50 + 80 + 2 * 120)
