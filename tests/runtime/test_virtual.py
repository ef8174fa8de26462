"""The virtual executor: results, and what it says when ranks do not fit together."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.ir import actions
from msc.ir.errors import CommunicationError, InputError, PlanError
from msc.ir.mesh import Mesh
from msc.runtime.virtual import VirtualExecutor
from tests.runtime import programs
from tests.runtime.build import ATEN, C10D, Builder, all_gather, all_reduce, recv, send

TP = Mesh.parse("tp=2")
PP = Mesh.parse("pp=2")
Write = Callable[[Builder, fx.Node], Any]


def per_rank(*writes: Write) -> Callable[[int], fx.GraphModule]:
    """A program for each rank on one input `x` of four elements."""
    graphs: list[fx.GraphModule] = []
    for number, write in enumerate(writes):
        build = Builder(f"layers.{number}")
        graphs.append(build.done(write(build, build.input("x", 4))))
    return graphs.__getitem__


def numbers(count: int) -> list[list[torch.Tensor]]:
    return [[torch.arange(4, dtype=torch.float64) + 10 * rank] for rank in range(count)]


def failure(mesh: Mesh, *writes: Write, **options: Any) -> str:
    with pytest.raises(CommunicationError) as error:
        VirtualExecutor(mesh, per_rank(*writes), **options).run(numbers(mesh.size))
    return str(error.value)


def test_each_collective() -> None:
    x, y = (torch.arange(8, dtype=torch.float64).view(4, 2) + 10 * rank for rank in range(2))
    out = VirtualExecutor(TP, programs.every_collective).run([[x], [y]])
    both = torch.cat([x, y])
    for own, shard, mixed, alone in (
        (out[0], 2 * both[:4], torch.cat([x[:1], y[:2]]), x),
        (out[1], 2 * both[4:], torch.cat([x[1:], y[2:]]), y),
    ):
        expected = (both, x + y, shard, torch.maximum(x, y), mixed, alone)
        torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_nested_graphs_wait_inside() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    w = [torch.randn(8, 8, dtype=torch.float64) for _ in range(2)]
    out = VirtualExecutor(TP, programs.two_blocks).run([[x, w[0]], [x, w[1]]])
    middle = x @ w[0] + x @ w[1] + x.relu()
    expected = middle @ w[0] + middle @ w[1] + middle.relu()
    for own in out:
        torch.testing.assert_close(own, (expected, middle.relu()), rtol=0, atol=0)


@pytest.mark.parametrize("rendezvous", [False, True])
def test_stages_exchange_messages(rendezvous: bool) -> None:
    inputs = [[torch.full((2, 3), 1.0 + rank), torch.tensor(5.0 + rank)] for rank in range(2)]
    inputs = [[value.double() for value in own] for own in inputs]
    out = VirtualExecutor(PP, programs.exchange, rendezvous=rendezvous).run(inputs)
    for rank in range(2):
        other = inputs[1 - rank]
        torch.testing.assert_close(out[rank], (2 * other[0], other[1]), rtol=0, atol=0)


def test_messages_of_a_channel_meet_in_order() -> None:
    def sender(build: Builder, x: fx.Node) -> Any:
        doubled = build.call(ATEN.mul.Tensor, x, 2.0)
        for token in [send(build, [x], 1, "forward"), send(build, [doubled], 1, "forward")]:
            build.call(actions.wait, token)
        return x

    def receiver(build: Builder, x: fx.Node) -> Any:
        tokens = [recv(build, 0, "forward", (4,)) for _ in range(2)]
        second = build.item(build.call(actions.wait, tokens[1]), 0)
        return build.item(build.call(actions.wait, tokens[0]), 0), second

    out = VirtualExecutor(PP, per_rank(sender, receiver)).run(numbers(2))
    x = numbers(1)[0][0]
    torch.testing.assert_close(out[1][0], (x, 2 * x), rtol=0, atol=0)


def test_a_step_accumulates_without_touching_what_it_returns() -> None:
    x = torch.arange(12, dtype=torch.float64).view(6, 2)
    ((total, first, part),) = VirtualExecutor(Mesh.parse("tp=1"), programs.accumulation).run([[x]])
    assert torch.equal(total, x[:2] + x[2:4] + x[4:])
    assert torch.equal(first, x[:2])
    assert torch.equal(part, x[:2])


def test_ranks_do_not_share_memory() -> None:
    def write(build: Builder, x: fx.Node) -> Any:
        return build.call(ATEN.add_.Tensor, x, build.call(actions.coordinate, "tp", val=0))

    x = torch.zeros(4, dtype=torch.float64)
    out = VirtualExecutor(TP, per_rank(write, write)).run([[x], [x]])
    assert [float(own[0][0]) for own in out] == [0.0, 1.0]


def test_mismatch_names_both_ranks() -> None:
    text = failure(
        TP, lambda b, x: all_reduce(b, x, "tp"), lambda b, x: all_reduce(b, x, "tp", "max")
    )
    assert text == (
        "ranks disagree on collective 0 of group 'tp' (0, 1):\n"
        "  rank 0: all_reduce(f64[4], sum) on 'tp' at %all_reduce_default in rank_program "
        "(layers.0)\n"
        "  rank 1: all_reduce(f64[4], max) on 'tp' at %all_reduce_default in rank_program_2 "
        "(layers.1)"
    )


def test_unlike_shapes_are_a_mismatch() -> None:
    def shorter(build: Builder, x: fx.Node) -> Any:
        return all_gather(build, build.call(ATEN.narrow.default, x, 0, 0, 2), 2, "tp")

    text = failure(TP, lambda b, x: all_gather(b, x, 2, "tp"), shorter)
    assert "rank 0: all_gather(f64[4], 2) on 'tp'" in text
    assert "rank 1: all_gather(f64[2], 2) on 'tp'" in text


def test_unlike_messages_are_a_mismatch() -> None:
    text = failure(
        PP,
        lambda b, x: (x, b.call(actions.wait, send(b, [x], 1, "forward"))),
        lambda b, x: b.call(actions.wait, recv(b, 0, "forward", (3,))),
    )
    assert text == (
        "ranks disagree on a message of channel 'forward':\n"
        "  rank 0: send (f64[4]) to rank 1 on channel 'forward' at %send in rank_program "
        "(layers.0)\n"
        "  rank 1: recv from rank 0 on channel 'forward' at %recv in rank_program_2 (layers.1), "
        "which expects (torch.float64 [3])"
    )


def test_row_counts_that_differ_are_a_mismatch() -> None:
    def exchange(received: list[int], sent: list[int]) -> Write:
        return lambda b, x: b.collective(C10D.all_to_all_single.default, x, received, sent, "tp")

    text = failure(TP, exchange([1, 1], [1, 3]), exchange([2, 2], [2, 2]))
    assert text == (
        "ranks disagree on collective 0 of group 'tp' (0, 1): rank 0 sends 3 rows to rank 1, "
        "which expects 2"
    )


def test_deadlock_says_who_waits_for_whom() -> None:
    """Rank 1 skips a collective and ends; rank 0 waits."""
    text = failure(TP, lambda b, x: all_reduce(b, all_reduce(b, x, "tp"), "tp"),
                   lambda b, x: all_reduce(b, x, "tp"))  # fmt: skip
    assert text == (
        "deadlock: no rank can go on.\n"
        "  rank 0 waits in all_reduce(f64[4], sum) on 'tp' at %all_reduce_default_1 in "
        "rank_program (layers.0): collective 1 of group (0, 1) lacks rank 1\n"
        "  rank 1 has finished"
    )


def test_sends_in_a_ring_deadlock_only_under_rendezvous() -> None:
    def swap(other: int, there: str, back: str) -> Write:
        def write(build: Builder, x: fx.Node) -> Any:
            build.call(actions.wait, send(build, [x], other, there))
            return build.item(build.call(actions.wait, recv(build, other, back, (4,))), 0)

        return write

    writes = swap(1, "forward", "backward"), swap(0, "backward", "forward")
    out = VirtualExecutor(PP, per_rank(*writes)).run(numbers(2))
    assert torch.equal(out[0][0], numbers(2)[1][0])
    assert failure(PP, *writes, rendezvous=True) == (
        "deadlock: no rank can go on.\n"
        "  rank 0 waits in send (f64[4]) to rank 1 on channel 'forward' at %send in rank_program "
        "(layers.0): it waits for rank 1 to receive\n"
        "  rank 1 waits in send (f64[4]) to rank 0 on channel 'backward' at %send in "
        "rank_program_2 (layers.1): it waits for rank 0 to receive"
    )


def test_what_nobody_receives_is_reported() -> None:
    def send_only(build: Builder, x: fx.Node) -> Any:
        build.call(actions.wait, send(build, [x], 1, "forward"))
        return x

    assert failure(PP, send_only, lambda b, x: x) == (
        "all ranks have finished, but:\n"
        "  rank 0: send (f64[4]) to rank 1 on channel 'forward' at %send in rank_program "
        "(layers.0) was never received"
    )


def test_writing_to_what_is_in_flight_is_reported() -> None:
    def write(build: Builder, x: fx.Node) -> Any:
        start = build.call(C10D.all_reduce.default, x, "sum", "tp")
        build.call(ATEN.mul_.Tensor, x, 2.0)
        return build.wait(start)

    assert failure(TP, write, write).startswith(
        "rank 0 wrote to the input of all_reduce(f64[4], sum) on 'tp' at %all_reduce_default in "
        "rank_program (layers.0) while it was in flight."
    )


def test_writing_before_the_wait_is_reported_though_the_result_is_there() -> None:
    """Rank 1 starts last, so the collective has happened; on a real network it may go on."""

    def write(build: Builder, x: fx.Node) -> Any:
        start = build.call(C10D.all_reduce.default, x, "sum", "tp")
        build.call(ATEN.mul_.Tensor, x, 2.0)
        return build.wait(start)

    text = failure(TP, lambda b, x: all_reduce(b, x, "tp"), write)
    assert text.startswith("rank 1 wrote to the input of all_reduce(f64[4], sum) on 'tp'")


@pytest.mark.parametrize("rendezvous", [False, True])
def test_a_message_may_be_overwritten_after_its_wait_only(rendezvous: bool) -> None:
    def sender(early: bool) -> Write:
        def write(build: Builder, x: fx.Node) -> Any:
            token = send(build, [x], 1, "forward")
            if early:
                build.call(ATEN.mul_.Tensor, x, 2.0)
            build.call(actions.wait, token)
            return build.call(ATEN.mul_.Tensor, x, 2.0)

        return write

    def receiver(build: Builder, x: fx.Node) -> Any:
        return build.item(build.call(actions.wait, recv(build, 0, "forward", (4,))), 0)

    executor = VirtualExecutor(PP, per_rank(sender(False), receiver), rendezvous=rendezvous)
    assert torch.equal(executor.run(numbers(2))[1][0], numbers(2)[0][0])
    text = failure(PP, sender(True), receiver, rendezvous=rendezvous)
    assert text.startswith("rank 0 wrote to the input of send (f64[4]) to rank 1")


def test_a_wrong_group_size_is_reported() -> None:
    write: Write = lambda b, x: all_gather(b, x, 3, "tp")  # noqa: E731
    assert failure(TP, write, write) == (
        "rank 0: all_gather(f64[4], 3) on 'tp' at %all_gather_into_tensor_default in rank_program "
        "(layers.0) counts 3 members of (0, 1)"
    )


def test_only_members_use_a_group() -> None:
    write: Write = lambda b, x: all_reduce(b, x, "pp[0,2]")  # noqa: E731
    with pytest.raises(PlanError, match=r"Rank 1 is at pp=1 and so in no group 'pp\[0,2\]'"):
        VirtualExecutor(Mesh.parse("pp=3"), per_rank(write, write, write)).run(numbers(3))


def test_a_missing_input_is_refused() -> None:
    with pytest.raises(InputError, match=r"^Rank 1 got 0 inputs; its program takes 1: x\.$"):
        VirtualExecutor(TP, per_rank(lambda b, x: x, lambda b, x: x)).run([*numbers(1), []])


def test_an_op_that_fails_names_its_rank() -> None:
    def write(build: Builder, x: fx.Node) -> Any:
        return build.call(ATEN.view.default, x, [5], val=x.meta["val"])

    with pytest.raises(RuntimeError) as error:
        VirtualExecutor(TP, per_rank(lambda b, x: x, write)).run(numbers(2))
    assert error.value.__notes__ == ["on rank 1 of the virtual executor"]


GRID = Mesh.parse("dp=2,tp=2")
AXES = {"tp": (1,), "dp": (0,), "dp,tp": (0, 1)}
Step = tuple[str, str, int, int]
STEPS = st.tuples(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "max", "rank", "wait"]),
    st.sampled_from(sorted(AXES)),
    st.integers(0, 99),
    st.integers(0, 3),
)


def reference(kind: str, group: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A collective on `value[dp, tp, ...]`, by whole-array operations."""
    axes = AXES[group]
    size = 2 ** len(axes)
    total = (np.max if kind == "max" else np.sum)(value, axis=axes, keepdims=True)
    if kind in ("all_reduce", "max"):
        return np.broadcast_to(total, value.shape)
    if kind == "reduce_scatter":
        pieces = total.reshape(*total.shape[:2], size, -1)
        return np.stack(
            [[pieces[d % pieces.shape[0], t % pieces.shape[1], index(group, d, t)]
              for t in range(2)] for d in range(2)]
        )  # fmt: skip
    rows = np.moveaxis(value, axes, range(len(axes)))
    rows = rows.reshape(size, *rows.shape[len(axes) :])
    joined = np.moveaxis(rows, 0, -2).reshape(*rows.shape[1:-1], -1)
    for axis in axes:
        joined = np.expand_dims(joined, axis)
    return np.broadcast_to(joined, (2, 2, joined.shape[-1]))


def index(group: str, dp: int, tp: int) -> int:
    return {"tp": tp, "dp": dp, "dp,tp": 2 * dp + tp}[group]


def random_program(
    steps: Sequence[Step], value: np.ndarray[Any, Any]
) -> tuple[fx.GraphModule, list[np.ndarray[Any, Any]]]:
    """A graph that follows `steps`, and what all ranks' results are, stacked."""
    build = Builder()
    done = [(build.input("x", 16), value)]
    flying: list[tuple[fx.Node, np.ndarray[Any, Any]]] = []
    for kind, group, choice, later in steps:
        node, own = done[choice % len(done)]
        size = 2 ** len(AXES[group])
        if kind == "wait" and flying:
            start, result = flying.pop(later % len(flying))
            done.append((build.wait(start), result))
        elif kind == "rank":
            at = build.call(actions.coordinate, "tp", val=torch.empty((), device="meta"))
            scaled = own + np.arange(2)[None, :, None]
            done.append((build.call(ATEN.add.Tensor, node, at, val=node.meta["val"]), scaled))
        elif kind == "all_gather" and own.shape[-1] <= 256:
            start = build.call(C10D.all_gather_into_tensor.default, node, size, group)
            flying.append((start, reference(kind, group, own)))
        elif kind == "reduce_scatter" and own.shape[-1] % size == 0:
            start = build.call(C10D.reduce_scatter_tensor.default, node, "sum", size, group)
            flying.append((start, reference(kind, group, own)))
        elif kind in ("all_reduce", "max"):
            op = "max" if kind == "max" else "sum"
            start = build.call(C10D.all_reduce.default, node, op, group)
            flying.append((start, reference(kind, group, own)))
    done += [(build.wait(start), result) for start, result in flying]
    return build.done(*[node for node, _ in done]), [result for _, result in done]


@settings(deadline=None, max_examples=60)
@given(st.lists(STEPS, max_size=12), st.integers(0, 2**16), st.booleans())
def test_any_program_in_any_interleaving(steps: list[Step], seed: int, shuffle: bool) -> None:
    value = np.random.default_rng(seed).integers(-4, 5, (2, 2, 16)).astype(np.float64)
    graph, expected = random_program(steps, value)
    pick = random.Random(seed).choice if shuffle else None
    inputs = [[torch.from_numpy(own)] for own in value.reshape(4, 16)]
    out = VirtualExecutor(GRID, lambda rank: graph, pick=pick).run(inputs)
    for rank, results in enumerate(out):
        for found, whole in zip(results, expected, strict=True):
            assert np.array_equal(found.numpy(), whole.reshape(4, -1)[rank])
