"""Events by hand: what overlaps, what is exposed, who waits for whom, and what cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.ir import actions
from msc.ir.communication import POINT_TO_POINT, WAITS
from msc.ir.errors import CommunicationError, PlanError, VerifyError
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.runtime.simulate import SimulationResult
from msc.runtime.simulate.durations import COSTS
from tests.runtime import programs
from tests.runtime.build import C10D, Builder, all_reduce, recv, send
from tests.runtime.simulate.build import SECONDS, SIDE, on_each, run, value, work

SHAPE = (SIDE, SIDE)


def start(build: Builder, x: fx.Node, group: str = "tp") -> fx.Node:
    return build.call(C10D.all_reduce.default, x, "sum", group)


def times(result: SimulationResult) -> list[tuple[float, float, float, float]]:
    """Of each class: computing, bubble, skew, exposed communication."""
    for each in result.classes:
        found = each.compute_seconds + each.bubble_seconds + each.skew_seconds
        assert found + sum(each.exposed.values()) == pytest.approx(result.step_seconds)
    return [
        (c.compute_seconds, c.bubble_seconds, c.skew_seconds, sum(c.exposed.values()))
        for c in result.classes
    ]


def test_computing_alone() -> None:
    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        return build.done(work(build, value(build), 3))

    result = on_each("", program)
    assert result.step_seconds == 3
    assert times(result) == [(3, 0, 0, 0)]
    assert (result.exposed, result.bubble, result.hfu, result.mfu) == ({}, 0, 1, None)


@pytest.mark.parametrize(("meanwhile", "exposed"), [(0, 1), (1, 0), (3, 0)])
def test_a_collective_is_hidden_by_what_is_computed_meanwhile(meanwhile: int, exposed: int) -> None:
    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        token = start(build, work(build, x))
        other = work(build, x, meanwhile)
        return build.done(build.wait(token), other)

    result = on_each("tp=2", program)
    assert result.step_seconds == 1 + max(1, meanwhile)
    assert times(result) == [(1 + meanwhile, 0, 0, exposed)] * 2
    (total,) = result.classes[0].communication.values()
    assert (total.calls, total.seconds, total.hidden_seconds) == (1, 1, 1 - exposed)


def test_operations_of_a_group_run_one_after_the_other() -> None:
    """The second waits for the first on their stream; the first is then exposed as well."""

    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        first, second = start(build, x), start(build, x)
        done = build.wait(second)
        return build.done(build.wait(first), done)

    result = on_each("tp=2", program)
    assert times(result) == [(0, 0, 0, 2)] * 2
    assert [each.exposed_seconds for each in result.classes[0].transfers] == [1, 1]
    assert [each.begin for each in result.classes[0].transfers] == [0, 1]


def test_a_collective_is_exposed_from_when_it_is_waited_for() -> None:
    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        token = start(build, build.input("large", 2 * SIDE, SIDE))  # takes two seconds
        y = work(build, x)
        return build.done(build.wait(token), y)

    assert times(on_each("tp=2", program)) == [(1, 0, 0, 1)] * 2


def test_a_stream_may_stand_still_between_two_operations() -> None:
    """One rank waits for the second, which the other starts two seconds after the first is over."""

    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        first = start(build, x)
        y = work(build, x, 3 * rank)
        second = start(build, y)
        done = build.wait(second)
        return build.done(build.wait(first), done)

    assert times(on_each("tp=2", program)) == [(0, 0, 2, 2), (3, 0, 0, 1)]


def test_groups_have_streams_of_their_own() -> None:
    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        first, second = start(build, x, "tp"), start(build, x, "dp")
        return build.done(build.wait(first), build.wait(second))

    result = on_each("dp=2,tp=2", program)
    assert result.step_seconds == 1
    assert result.exposed == {"tp": 1, "dp": 0}


def test_a_rank_that_has_less_to_do_waits_for_the_others() -> None:
    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        return build.done(all_reduce(build, work(build, x, 1 + 2 * rank), "tp"))

    result = on_each("tp=2", program)
    assert times(result) == [(1, 0, 2, 1), (3, 0, 0, 1)]


def test_a_message_needs_both_sides() -> None:
    """Stage 1 waits a second for stage 0, both for the transfer; at the end stage 0 is idle."""

    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        if rank == 0:
            token = send(build, [work(build, x)], 1, "pp:0>1")
            build.call(actions.wait, token)
            return build.done(x)
        got = build.call(actions.wait, recv(build, 0, "pp:0>1", SHAPE))
        return build.done(work(build, build.item(got, 0)))

    result = on_each("pp=2", program)
    assert result.step_seconds == 3
    assert times(result) == [(1, 1, 0, 1), (1, 1, 0, 1)]
    assert result.bubble == 0.5
    assert list(result.classes[0].communication) == [("pp", "send")]
    assert list(result.classes[1].communication) == [("pp", "recv")]


def test_the_two_directions_of_a_pair_do_not_wait_for_each_other() -> None:
    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        there, back = ("pp:0>1", "pp:1>0") if rank == 0 else ("pp:1>0", "pp:0>1")
        sending = send(build, [x], 1 - rank, there)
        got = build.call(actions.wait, recv(build, 1 - rank, back, SHAPE))
        build.call(actions.wait, sending)
        return build.done(build.item(got, 0))

    assert on_each("pp=2", program).step_seconds == 1


def test_communication_may_cross_the_borders_of_graphs() -> None:
    """One graph starts a reduction, another one waits for it; a third computes meanwhile."""

    def starts() -> fx.GraphModule:
        build = Builder()
        x = value(build)
        return build.done(x, (start(build, x), x))

    def waits() -> fx.GraphModule:
        build = Builder()
        return build.done(build.wait(value(build)))

    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        both = build.item(build.graph_call("starts", starts(), x), 1)
        token = build.item(both, 0)
        y = work(build, x)
        inner = Builder()
        inner.item(inner.graph_call("waits", waits(), value(inner)), 0)
        outer = inner.done()
        return build.done(y, build.graph_call("outer", outer, token))

    result = on_each("tp=2", program)
    assert result.step_seconds == 1
    assert times(result) == [(1, 0, 0, 0)] * 2


def test_a_graph_that_is_called_twice_takes_twice_as_long() -> None:
    result = on_each("tp=2", programs.two_blocks)
    (total,) = result.classes[0].communication.values()
    assert total.calls == 2
    assert result.classes[0].flops == {next(iter(result.classes[0].flops)): 2 * 2 * 4 * 8 * 8}


@pytest.mark.parametrize(
    ("mesh", "program"),
    [
        ("tp=2", programs.every_collective),
        ("pp=2", programs.exchange),
        ("", programs.accumulation),
        ("dp=2,tp=2", programs.twin_groups),
    ],
)
def test_what_the_other_executors_run(mesh: str, program: object) -> None:
    result = on_each(mesh, program)  # type: ignore[arg-type]
    times(result)


PLANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=6)


@settings(max_examples=30)
@given(PLANS, st.booleans())
def test_time_adds_up_and_the_order_of_ranks_does_not_matter(
    plan: list[tuple[int, int, bool]], stages: bool
) -> None:
    """Two ranks compute for different times between reductions, which they wait for late."""
    axis = "pp" if stages else "tp"

    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x = value(build)
        open_tokens = []
        for left, right, waits in plan:
            open_tokens.append(start(build, x, axis))
            work(build, x, right if rank else left)
            if waits:
                build.wait(open_tokens.pop())
        return build.done(*(build.wait(token) for token in open_tokens))

    one, other = (
        run(f"{axis}=2", [program(0), program(1)]),
        run(f"{axis}=2", [program(1), program(0)]),
    )
    assert times(one) == times(other)[::-1]
    for each in one.classes:
        for total in each.communication.values():
            assert 0 <= total.exposed_seconds <= total.seconds == len(plan)


def test_memory_is_that_of_the_graph_at_its_times() -> None:
    build = Builder()
    x = value(build)
    y = work(build, x)
    z = work(build, y)
    (one,) = run("", [build.done(z)]).classes
    size = 8 * SIDE * SIDE
    assert one.memory == ((0, size), (0, 2 * size), (1, 3 * size), (2, 2 * size))
    assert one.peak_memory_bytes == 3 * size


def refusal(mesh: str, *graphs: fx.GraphModule) -> str:
    with pytest.raises((CommunicationError, VerifyError, PlanError)) as error:
        run(mesh, graphs)
    return str(error.value)


def receives(stage: int) -> fx.GraphModule:
    build = Builder()
    return build.done(build.call(actions.wait, recv(build, stage, f"pp:{stage}", SHAPE)))


def reduces(*groups: str, x: tuple[int, ...] = SHAPE, waits: bool = True) -> fx.GraphModule:
    build = Builder()
    tokens = [start(build, build.input("x", *x), group) for group in groups]
    return build.done(*(build.wait(token) for token in tokens if waits))


def test_a_deadlock_says_who_waits_for_whom() -> None:
    assert refusal("pp=2", receives(1), receives(0)) == (
        "deadlock: no rank can go on.\n"
        "  r0 waits in message on 'pp:1' (%recv), which r1 has not started\n"
        "  r1 waits in message on 'pp:0' (%recv), which r0 has not started"
    )


def test_what_only_one_rank_starts_is_named() -> None:
    assert refusal("tp=2", reduces("tp", waits=False), reduces()) == (
        "all ranks have finished, but:\n"
        "  all_reduce on 'tp' (%all_reduce_default), which r1 never started"
    )


def test_ranks_that_disagree_are_named() -> None:
    assert refusal("tp=2", reduces("tp"), reduces("tp", x=(4,))) == (
        "ranks disagree on operation 0 of 'tp': all_reduce of 512 bytes at "
        "%all_reduce_default, all_reduce of 32 bytes at %all_reduce_default."
    )


def test_a_peer_that_is_no_stage_is_refused() -> None:
    assert "stage 0 sends to or receives from stage 3; the mesh pp=2 has stages 0 to 1" in refusal(
        "pp=2", receives(3), receives(0)
    )


def test_a_wait_for_nothing_is_refused() -> None:
    build = Builder()
    text = refusal("", build.done(build.wait(value(build))))
    assert text == "a node waits for %x, which starts nothing."


def test_an_action_without_a_cost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lion() -> None:
        """An optimizer that nobody knows."""

    monkeypatch.setattr(actions, "ACTIONS", {*actions.ACTIONS, lion})
    build = Builder()
    build.call(lion, val=())
    text = refusal("", build.done())
    assert text.startswith("%lion is an action 'lion' that the simulator has no cost for. Add it")


def test_every_action_has_a_cost_or_communicates() -> None:
    assert set(COSTS) == actions.ACTIONS - POINT_TO_POINT.keys() - WAITS


def test_a_fused_collective_hides_its_transfer_beside_its_gemm() -> None:
    """Of two shards of 128 rows, two tiles, the second arrives while the first is multiplied."""
    build = Builder()
    x, w = build.input("x", 128, SIDE), build.input("w", SIDE, SIDE)
    args: tuple[Any, ...] = (x, 0, [w], [None], [False], [], [], False, 2, "tp")
    graph = build.done(build.item(build.call(ALL_GATHER_MATMUL, *args), 0))
    computing = 2 * (128 / SIDE) / SECONDS.fused_gemm_rate
    for slower, transfer in ((1, 16), (4, 64)):
        links = SECONDS.node_bytes_per_s / slower
        cluster = dataclasses.replace(SECONDS, node_bytes_per_s=links)
        result = run("tp=2", [graph, graph], cluster)
        (total,) = result.classes[0].communication.values()
        assert total.seconds == transfer
        exposed = max(0.0, transfer - computing / 2)
        for found in times(result):
            assert found == pytest.approx((computing, 0, 0, exposed))
        assert total.exposed_seconds == pytest.approx(exposed)


def test_a_fused_collective_waits_for_its_group_and_its_stream() -> None:
    """Rank 1 comes a second later, and both wait for a collective that is still under way."""

    def program(rank: int) -> fx.GraphModule:
        build = Builder()
        x, w = value(build), build.input("w", SIDE, SIDE)
        first = start(build, work(build, x, rank))
        args = (x, w, None, False, 0, 2, "tp")
        fused = build.call(MATMUL_REDUCE_SCATTER, *args)
        return build.done(build.wait(first), fused)

    result = on_each("tp=2", program)
    one, other = times(result)
    assert one[2] == pytest.approx(1)
    assert other[2] == 0
    (before, fused), _ = (each.transfers for each in result.classes)
    assert (before.begin, fused.begin) == (1, 2)
    assert before.exposed_seconds == 1
