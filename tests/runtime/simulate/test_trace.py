"""The trace: complete events by process and thread, nested on each thread, whole and as a file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from msc.ir import actions
from msc.ir.errors import UserError
from msc.runtime.simulate import SimulationResult
from msc.runtime.simulate.trace import trace_events
from tests.runtime.build import C10D, Builder, all_reduce, recv, send
from tests.runtime.simulate.build import SIDE, on_each, value, work


def layer() -> fx.GraphModule:
    build = Builder("layers.3.mlp")
    x = value(build)
    token = build.call(C10D.all_reduce.default, work(build, x), "sum", "tp")
    return build.done(build.wait(token))


def stages(rank: int) -> fx.GraphModule:
    """Two stages of two ranks: stage 0 computes a layer and sends it."""
    build = Builder()
    x = value(build)
    if rank < 2:
        y = build.item(build.graph_call("chunk0_forward", layer(), x), 0)
        build.call(actions.wait, send(build, [y], 1, "pp:0>1"))
        return build.done(y)
    got = build.call(actions.wait, recv(build, 0, "pp:0>1", (SIDE, SIDE)))
    return build.done(all_reduce(build, build.item(got, 0), "tp"))


def simulated() -> SimulationResult:
    return on_each("pp=2,tp=2", stages)


def event(events: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    (found,) = [each for each in events if fields.items() <= each.items()]
    return found


def test_the_events_of_a_rank() -> None:
    trace = trace_events(simulated())
    assert trace["otherData"] == {"mesh": "pp=2,tp=2", "cluster": "seconds"}
    events = [each for each in trace["traceEvents"] if each["pid"] == 0]
    assert event(events, name="process_name")["args"] == {"name": "r0: rank 0"}
    threads = {
        each["args"]["name"]: each["tid"] for each in events if each["name"] == "thread_name"
    }
    assert list(threads) == ["compute", "tp", "pp:0>1"]
    complete = {"ph": "X", "pid": 0}
    second = 1e6
    assert event(events, name="chunk0_forward") == {
        "name": "chunk0_forward", "cat": "call", "ts": 0, "dur": 2 * second, "tid": 0, **complete
    }  # fmt: skip
    assert event(events, name="mm_default (mlp)") == {
        "name": "mm_default (mlp)", "cat": "compute", "ts": 0, "dur": second, "tid": 0,
        **complete,
    }  # fmt: skip
    assert event(events, name="wait all_reduce tp") == {
        "name": "wait all_reduce tp", "cat": "wait", "ts": second, "dur": second, "tid": 0,
        **complete,
    }  # fmt: skip
    size = 8 * SIDE * SIDE
    args = {"node": "all_reduce_default", "module": "mlp", "bytes": size, "exposed_us": second}
    assert event(events, name="all_reduce") == {
        "name": "all_reduce", "cat": "communication", "ts": second, "dur": second,
        "tid": threads["tp"], "args": args, **complete,
    }  # fmt: skip
    assert event(events, name="send")["tid"] == threads["pp:0>1"]
    counters = [each for each in events if each["ph"] == "C"]
    assert counters[0] == {
        "name": "memory", "ph": "C", "ts": 0, "pid": 0, "args": {"bytes": size}
    }  # fmt: skip


def test_slices_of_a_thread_nest() -> None:
    """Each is inside those that began before it and are not over, in the order of the file."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for each in trace_events(simulated())["traceEvents"]:
        if each["ph"] == "X":
            threads[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    assert len(threads) == 4 * 3  # compute, tp and the channel
    for slices in threads.values():
        assert [begin for begin, _ in slices] == sorted(begin for begin, _ in slices)
        open_until: list[float] = []
        for begin, end in slices:  # in the order of the file
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_a_saved_trace_is_json(tmp_path: Path) -> None:
    simulated().save_trace(tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text())
    assert found == json.loads(json.dumps(trace_events(simulated())))
    for each in found["traceEvents"]:
        assert {"name", "ph", "pid"} <= each.keys()
        assert each["ph"] in ("X", "M", "C")
        if each["ph"] == "X":
            assert each["dur"] >= 0
            assert isinstance(each["tid"], int)


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing.t.json' cannot be written"):
        simulated().save_trace(tmp_path / "missing" / "t.json")
    with pytest.raises(UserError, match=r"cannot be written: .Errno"):
        simulated().save_trace(tmp_path)
