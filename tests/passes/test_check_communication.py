"""The static check accepts what runs and finds planted faults, whatever the size of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.ir import actions
from msc.ir.errors import CommunicationError, PlanError
from msc.ir.mesh import Mesh
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.passes.check_communication import check_communication
from msc.passes.rank_colors import color_ranks
from msc.runtime.virtual import VirtualExecutor
from tests.runtime.build import (
    C10D,
    Builder,
    all_gather,
    all_reduce,
    recv,
    reduce_scatter,
    send,
)

Write = Callable[[Builder, fx.Node], Any]


def program(write: Write, path: str = "") -> fx.GraphModule:
    build = Builder(path)
    x = build.input("x", 4)
    write(build, x)
    return build.done(x)


def check_stages(mesh: Mesh, *writes: Write) -> None:
    """Check a program per pp coordinate."""
    graphs = [program(write, f"layers.{number}") for number, write in enumerate(writes)]

    def stage(rank: int) -> int:
        return mesh.coordinate(rank).get("pp", 0)

    check_communication(mesh, lambda rank: graphs[stage(rank)], stage)


def failure(mesh: str, *writes: Write) -> str:
    with pytest.raises(CommunicationError) as error:
        check_stages(Mesh.parse(mesh), *writes)
    return str(error.value)


def receive(build: Builder, stage: int, channel: str, *shape: int) -> None:
    build.call(actions.wait, recv(build, stage, channel, shape))


def deliver(build: Builder, x: fx.Node, stage: int, channel: str) -> None:
    build.call(actions.wait, send(build, [x], stage, channel))


def test_a_pipeline_with_tied_weights_passes() -> None:
    def first(build: Builder, x: fx.Node) -> None:
        deliver(build, all_reduce(build, x, "tp"), 1, "forward")
        receive(build, 1, "backward", 4)
        all_reduce(build, x, "pp[0,2]")
        reduce_scatter(build, x, 4, "dp")

    def middle(build: Builder, x: fx.Node) -> None:
        receive(build, 0, "forward", 4)
        deliver(build, x, 2, "forward")
        receive(build, 2, "backward", 4)
        deliver(build, x, 0, "backward")

    def last(build: Builder, x: fx.Node) -> None:
        receive(build, 1, "forward", 4)
        deliver(build, x, 1, "backward")
        all_reduce(build, x, "pp[0,2]")
        all_gather(build, x, 4, "dp")

    check_stages(Mesh.parse("pp=3,dp=4,tp=2"), first, middle, last)


def test_a_missing_collective_is_found() -> None:
    text = failure(
        "pp=2,dp=2",
        lambda b, x: all_reduce(b, all_reduce(b, x, "pp"), "pp"),
        lambda b, x: all_reduce(b, x, "pp"),
    )
    assert text == (
        "deadlock: no rank can go on.\n"
        "  rank 0 (pp=0,dp=0; 1 more alike) waits in all_reduce(f64[4], sum) on 'pp' at "
        "%all_reduce_default_1 (layers.0): on group 'pp', rank 2 (pp=1,dp=0; 1 more alike) has not "
        "started operation 1\n"
        "  rank 2 (pp=1,dp=0; 1 more alike) has ended"
    )


def test_swapped_collectives_are_found() -> None:
    def swapped(build: Builder, x: fx.Node) -> None:
        all_reduce(build, x, "pp", "max")
        all_reduce(build, x, "pp")

    def straight(build: Builder, x: fx.Node) -> None:
        all_reduce(build, x, "pp")
        all_reduce(build, x, "pp", "max")

    assert failure("pp=2", straight, swapped) == (
        "ranks disagree on operation 0 of group 'pp':\n"
        "  rank 0 (pp=0): all_reduce(f64[4], sum) on 'pp' at %all_reduce_default (layers.0)\n"
        "  rank 1 (pp=1): all_reduce(f64[4], max) on 'pp' at %all_reduce_default (layers.1)"
    )


def test_groups_waited_for_in_opposite_order_are_found() -> None:
    """Each side is consistent on each group; together they wait in a ring."""
    text = failure(
        "pp=2",
        lambda b, x: (all_reduce(b, x, "pp"), all_reduce(b, x, "pp[0,1]")),
        lambda b, x: (all_reduce(b, x, "pp[0,1]"), all_reduce(b, x, "pp")),
    )
    assert text.startswith("deadlock: no rank can go on.\n  rank 0 (pp=0) waits in all_reduce")
    assert "on group 'pp', rank 1 (pp=1) has not started operation 0" in text
    assert "on group 'pp[0,1]', rank 0 (pp=0) has not started operation 0" in text


def test_unlike_shapes_are_found() -> None:
    text = failure(
        "pp=2",
        lambda b, x: deliver(b, x, 1, "forward"),
        lambda b, x: receive(b, 0, "forward", 2, 2),
    )
    assert text == (
        "ranks disagree on operation 0 of channel 'forward':\n"
        "  rank 0 (pp=0): send (f64[4]) to rank 1 on channel 'forward' at %send (layers.0)\n"
        "  rank 1 (pp=1): recv (f64[2,2]) from rank 0 on channel 'forward' at %recv (layers.1)"
    )


def test_sends_in_a_ring_are_found() -> None:
    def swap(other: int, there: str, back: str) -> Write:
        def write(build: Builder, x: fx.Node) -> None:
            deliver(build, x, other, there)
            receive(build, other, back, 4)

        return write

    assert failure("pp=2", swap(1, "forward", "backward"), swap(0, "backward", "forward")) == (
        "deadlock: no rank can go on.\n"
        "  rank 0 (pp=0) waits in send (f64[4]) to rank 1 on channel 'forward' at %send (layers.0):"
        " on channel 'forward', rank 1 (pp=1) has not started operation 0\n"
        "  rank 1 (pp=1) waits in send (f64[4]) to rank 0 on channel 'backward' at %send "
        "(layers.1): on channel 'backward', rank 0 (pp=0) has not started operation 0"
    )


def test_both_directions_on_one_channel_are_found() -> None:
    """Started before either is waited for, they still run in order on one communicator."""

    def swap(other: int, channels: tuple[str, str]) -> Write:
        def write(build: Builder, x: fx.Node) -> None:
            tokens = [send(build, [x], other, channels[0]), recv(build, other, channels[1], (4,))]
            for token in tokens:
                build.call(actions.wait, token)

        return write

    check_stages(Mesh.parse("pp=2"), swap(1, ("up", "down")), swap(0, ("down", "up")))
    text = failure("pp=2", swap(1, ("both", "both")), swap(0, ("both", "both")))
    assert "on channel 'both', rank 1 (pp=1) is at send (f64[4]) to rank 0" in text


def test_a_send_that_nobody_receives_is_found() -> None:
    """Also where nobody waits for it."""
    assert failure("pp=2", lambda b, x: send(b, [x], 1, "forward"), lambda b, x: x) == (
        "all ranks end, but:\n"
        "  rank 0 (pp=0): send (f64[4]) to rank 1 on channel 'forward' at %send (layers.0): on "
        "channel 'forward', rank 1 (pp=1) has not started operation 0"
    )


def test_a_fault_in_a_nested_graph_names_its_path() -> None:
    def outer(op: str) -> fx.GraphModule:
        inner = program(lambda b, x: all_reduce(b, x, "pp", op), "layers.5")
        return program(lambda b, x: b.graph_call("chunk_3", inner, x))

    graphs = outer("sum"), outer("max")
    with pytest.raises(CommunicationError, match=r"chunk_3/%all_reduce_default \(layers.5\)"):
        check_communication(Mesh.parse("pp=2"), graphs.__getitem__, int)


def test_tokens_pass_through_nested_graphs() -> None:
    """A chunk starts a send and another waits for it."""

    def programs(waits: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
        start, finish = Builder(), Builder()
        starting = start.done(send(start, [start.input("x", 4)], 1, "forward"))
        finish.call(actions.wait, finish.graph.placeholder("token"))
        finishing = finish.done(None)
        outer = Builder()
        token = outer.item(outer.graph_call("start", starting, outer.input("x", 4)), 0)
        outer.graph_call("finish", finishing, token)
        if waits:
            receive(outer, 1, "backward", 4)

        def back(build: Builder, x: fx.Node) -> None:
            if waits:
                deliver(build, x, 0, "backward")
            receive(build, 0, "forward", 4)

        return outer.done(None), program(back)

    check_communication(Mesh.parse("pp=2"), programs(False).__getitem__, int)
    with pytest.raises(CommunicationError, match="deadlock"):
        check_communication(Mesh.parse("pp=2"), programs(True).__getitem__, int)


def test_ranks_of_one_class_with_unlike_peers_are_told_apart() -> None:
    """tp=0 and tp=1 of stage 1 differ, so the two halves of stage 0, one class, do too."""
    mesh = Mesh.parse("pp=2,dp=3,tp=2")
    sender = program(lambda b, x: deliver(b, x, 1, "forward"))
    good = program(lambda b, x: receive(b, 0, "forward", 4))
    bad = program(lambda b, x: receive(b, 0, "forward", 5))

    def class_of(rank: int) -> str:
        at = mesh.coordinate(rank)
        return "sender" if at["pp"] == 0 else ("good", "bad")[at["tp"]]

    programs = {"sender": sender, "good": good, "bad": bad}
    colors = color_ranks(mesh, [class_of(rank) for rank in range(12)], programs)
    assert colors.representatives == (0, 1, 6, 7)
    assert colors.counts == (3, 3, 3, 3)
    with pytest.raises(CommunicationError, match=r"rank 7 \(pp=1,dp=0,tp=1; 2 more alike\): recv"):
        check_communication(mesh, lambda rank: programs[class_of(rank)], class_of)


def test_a_group_across_classes_is_simulated() -> None:
    """The classes split tp itself, as uneven shards do."""
    mesh = Mesh.parse("dp=2,tp=2")
    graphs = [
        program(lambda b, x: all_reduce(b, x, "tp")),
        program(lambda b, x: all_reduce(b, x, "tp", "max")),
    ]
    with pytest.raises(CommunicationError, match="ranks disagree on operation 0 of group 'tp'"):
        check_communication(mesh, lambda rank: graphs[rank % 2], lambda rank: rank % 2)


def test_the_work_does_not_grow_with_dp() -> None:
    """The same programs on 2 and on 1500 replicas: equally many graphs and simulated ranks."""
    asked: list[int] = []
    graphs = [
        program(lambda b, x: deliver(b, all_reduce(b, x, "dp"), 1, "forward")),
        program(lambda b, x: receive(b, 0, "forward", 4)),
    ]
    for replicas in (2, 1500):
        mesh = Mesh.parse(f"pp=2,dp={replicas},tp=2")

        def graph(rank: int, mesh: Mesh = mesh) -> fx.GraphModule:
            asked.append(rank)
            return graphs[mesh.coordinate(rank)["pp"]]

        classes = [mesh.coordinate(rank)["pp"] for rank in range(mesh.size)]
        check_communication(mesh, graph, classes.__getitem__)
        assert len(color_ranks(mesh, classes, dict(enumerate(graphs))).representatives) == 2
    assert asked == [0, 4, 0, 3000]


def test_axes_that_decide_nothing_are_not_listed() -> None:
    """Ten million ranks of 4 classes: 4 ranks are asked for; the same faults are found."""
    mesh = Mesh.parse("pp=2,dp=2500000,tp=2")
    asked: list[int] = []

    def class_of(rank: int) -> tuple[int, int]:
        asked.append(rank)
        at = mesh.coordinate(rank)
        return at["pp"], at["tp"]

    def programs(length: int) -> dict[tuple[int, int], fx.GraphModule]:
        sender = program(lambda b, x: deliver(b, all_reduce(b, x, "dp"), 1, "forward"))
        good = program(lambda b, x: receive(b, 0, "forward", 4))
        other = program(lambda b, x: receive(b, 0, "forward", length))
        return {(0, 0): sender, (0, 1): sender, (1, 0): good, (1, 1): other}

    def check(length: int) -> None:
        graphs = programs(length)
        check_communication(mesh, lambda rank: graphs[class_of(rank)], class_of, ("pp", "tp"))

    check(4)
    assert set(asked) == {0, 1, 5_000_000, 5_000_001}
    with pytest.raises(CommunicationError) as error:
        check(5)
    assert "rank 5000001 (pp=1,dp=0,tp=1; 2499999 more alike): recv" in str(error.value)


def test_an_axis_whose_coordinates_a_group_names_is_listed() -> None:
    """Only replicas 0 and 1 are members; the class does not depend on dp."""
    graph = program(lambda b, x: all_reduce(b, x, "dp[0,1]"))
    with pytest.raises(PlanError, match=r"Rank 2 is at dp=2 and so in no group 'dp\[0,1\]'"):
        check_communication(Mesh.parse("dp=3"), lambda rank: graph, lambda rank: 0, ())


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (
            lambda b, x: all_reduce(b, x, "pp[0,1]"),
            "Rank 2 is at pp=2 and so in no group 'pp[0,1]' (mesh pp=3). "
            "Only its members may use a group.",
        ),
        (
            lambda b, x: all_gather(b, x, 2, "pp"),
            "%all_gather_into_tensor_default counts 2 members of group 'pp', which has 3 on mesh "
            "pp=3.",
        ),
        (
            lambda b, x: send(b, [x], 3, "forward"),
            "A program sends to or receives from stage 3; axis 'pp' of mesh pp=3 has 3 ranks.",
        ),
        (
            lambda b, x: send(b, [x], 1, "forward"),
            "Rank 1 (pp=1) sends to itself or receives from itself.",
        ),
    ],
)
def test_groups_and_peers_must_exist(write: Write, text: str) -> None:
    graph = program(write)
    with pytest.raises(PlanError) as error:
        check_communication(Mesh.parse("pp=3"), lambda rank: graph, lambda rank: 0)
    assert str(error.value) == text


ACTIONS = st.sampled_from(["send up", "recv up", "send down", "recv down", "wait", "sum"])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(ACTIONS, max_size=5), min_size=2, max_size=2))
def test_what_passes_runs(lists: Sequence[Sequence[str]]) -> None:
    """Random programs of two stages: whatever the check accepts, the virtual executor completes."""

    def write(own: Sequence[str], other: int) -> Write:
        def body(build: Builder, x: fx.Node) -> None:
            tokens: list[fx.Node] = []
            for action in own:
                verb, _, channel = action.partition(" ")
                if verb == "send":
                    tokens.append(send(build, [x], other, channel))
                elif verb == "recv":
                    tokens.append(recv(build, other, channel, (4,)))
                elif verb == "wait" and tokens:
                    build.call(actions.wait, tokens.pop(0))
                elif verb == "sum":
                    build.call(C10D.all_reduce.default, x, "sum", "pp")

        return body

    mesh = Mesh.parse("pp=2")
    graphs = [program(write(own, 1 - stage)) for stage, own in enumerate(lists)]
    inputs = [[torch.zeros(4, dtype=torch.float64)] for _ in range(2)]
    executor = VirtualExecutor(mesh, graphs.__getitem__, rendezvous=True)
    try:
        check_communication(mesh, graphs.__getitem__, int)
    except CommunicationError:
        return
    executor.run(inputs)


def test_the_check_refuses_what_does_not_run() -> None:
    """The other half: on separate channels per direction the two agree exactly."""
    mesh = Mesh.parse("pp=2")
    for first in (("send", "recv"), ("recv", "send")):
        for second in (("send", "recv"), ("recv", "send")):

            def write(order: tuple[str, str], stage: int) -> Write:
                def body(build: Builder, x: fx.Node) -> None:
                    for verb in order:
                        if verb == "send":
                            deliver(build, x, 1 - stage, ("up", "down")[stage])
                        else:
                            receive(build, 1 - stage, ("down", "up")[stage], 4)

                return body

            graphs = [program(write(order, stage)) for stage, order in enumerate((first, second))]
            inputs = [[torch.zeros(4, dtype=torch.float64)] for _ in range(2)]
            outcomes = []
            for attempt in (
                lambda g=graphs: check_communication(mesh, g.__getitem__, int),
                lambda g=graphs, i=inputs: VirtualExecutor(
                    mesh, g.__getitem__, rendezvous=True
                ).run(i),
            ):
                try:
                    attempt()
                    outcomes.append(True)
                except CommunicationError:
                    outcomes.append(False)
            assert outcomes == [first != second] * 2


def fused_gather(build: Builder, x: fx.Node, rows: int = 4, size: int = 2) -> None:
    """A gather along dim 0 inside a GEMM."""
    given, w = build.input("g", rows, 3), build.input("w", 5, 3)
    args: tuple[Any, ...] = (given, 0, [w], [None], [False], [], [], False, size, "pp")
    build.call(ALL_GATHER_MATMUL, *args)


def fused_reduce(build: Builder, x: fx.Node) -> None:
    given, w = build.input("p", 4, 3), build.input("v", 5, 3)
    build.call(MATMUL_REDUCE_SCATTER, given, w, None, False, 0, 2, "pp")


def test_fused_collectives_meet_and_need_not_multiply_alike() -> None:
    def other(build: Builder, x: fx.Node) -> None:
        given, w = build.input("g", 4, 3), build.input("w", 7, 3)
        args: tuple[Any, ...] = (given, 0, [w, w], [None, None], [False] * 2, [], [], True, 2, "pp")
        build.call(ALL_GATHER_MATMUL, *args)
        fused_reduce(build, x)

    def one(build: Builder, x: fx.Node) -> None:
        fused_gather(build, x)
        fused_reduce(build, x)

    check_stages(Mesh.parse("pp=2,tp=2"), one, other)


def test_a_fused_collective_meets_no_other_kind_or_size() -> None:
    assert failure("pp=2", fused_gather, fused_reduce) == (
        "ranks disagree on operation 0 of group 'pp':\n"
        "  rank 0 (pp=0): all_gather_matmul(f64[4,3], 2) on 'pp' at %all_gather_matmul_default "
        "(layers.0)\n"
        "  rank 1 (pp=1): matmul_reduce_scatter(f64[4,5], 2) on 'pp' at "
        "%matmul_reduce_scatter_default (layers.1)"
    )
    unfused = failure("pp=2", fused_gather, lambda b, x: all_gather(b, x, 2, "pp"))
    assert "rank 1 (pp=1): all_gather(f64[4], 2) on 'pp'" in unfused
    longer = failure("pp=2", fused_gather, lambda b, x: fused_gather(b, x, rows=6))
    assert "all_gather_matmul(f64[6,3], 2)" in longer
    with pytest.raises(PlanError, match="counts 3 members of group 'pp', which has 2"):
        check_stages(Mesh.parse("pp=2"), lambda b, x: fused_gather(b, x, size=3), fused_gather)


def test_a_fused_collective_waits_for_all_before_it_goes_on() -> None:
    """So it may not stand before another collective here and behind it there."""

    def first(build: Builder, x: fx.Node) -> None:
        fused_gather(build, x)
        all_reduce(build, x, "pp[0,1]")

    def second(build: Builder, x: fx.Node) -> None:
        all_reduce(build, x, "pp[0,1]")
        fused_gather(build, x)

    text = failure("pp=2", first, second)
    assert text.startswith("deadlock: no rank can go on.\n  rank 0 (pp=0) waits in all_gather_mat")
