"""A check passes by an answer or by a reference, never by a guess."""

from __future__ import annotations

import json

import pytest

from msc.runtime.doctor.check import Check, Known, Value, failed, judge, measured, passed, run_check

REFERENCE = {"memory": Known({"bandwidth": 10.0}, ())}


def memory(rate: float) -> Check:
    return measured("memory", bandwidth=Value(rate, "GB/s", floor=0.5))


@pytest.mark.parametrize(
    ("rate", "status"), [(9.0, "pass"), (7.1, "pass"), (6.9, "fail"), (0.1, "fail")]
)
def test_a_rate_is_held_to_the_reference(rate: float, status: str) -> None:
    assert judge(memory(rate), REFERENCE).status == status


def test_without_a_reference_nothing_measured_passes() -> None:
    assert judge(memory(9.0), None).status == "measured"
    assert judge(memory(9.0), {}).status == "measured"
    bad = judge(memory(0.1), None)
    assert bad.status == "fail"
    assert bad.detail == "bandwidth is 0.1 GB/s, and no working machine has less than 0.5"


@pytest.mark.parametrize(
    ("seconds", "status"), [(0.001, "pass"), (0.05, "pass"), (0.2, "fail"), (2.0, "fail")]
)
def test_a_time_may_grow_a_little(seconds: float, status: str) -> None:
    check = passed("names", reverse=Value(seconds, "s", ceiling=1.0))
    known = {"names": Known({"reverse": 0.001}, ())}
    assert judge(check, known).status == status


def test_what_was_there_must_be_there() -> None:
    check = Check("interfaces", "measured", facts=("eth0",))
    known = {"interfaces": Known({}, ("eth0", "mlx5_0:1"))}
    found = judge(check, known)
    assert (found.status, found.detail) == ("fail", "missing against the reference: mlx5_0:1")


def test_a_wrong_answer_stays_wrong() -> None:
    assert judge(failed("memory", "differs"), REFERENCE).status == "fail"
    assert judge(Check("memory", "skipped"), REFERENCE).status == "skipped"


def test_what_raises_has_failed() -> None:
    def broken() -> Check:
        raise OSError("no such device\nmore")

    found = run_check("thing", broken)
    assert (found.status, found.detail) == ("fail", "OSError: no such device")


def test_json_gives_it_back() -> None:
    check = Check("a", "fail", "why", {"x": Value(1.5, "s", ceiling=2.0)}, (1, 2), ("eth0",), 0.25)
    assert Check.from_json(json.loads(json.dumps(check.to_json()))) == check
