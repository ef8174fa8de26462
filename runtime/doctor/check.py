"""What a check has found, and how it is judged: never better than what is known.

A check fails by a wrong answer, by a limit that no working machine misses, or by falling behind the
same machine's reference. One that has only been measured says so: it has not passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

PASS = "pass"
FAIL = "fail"
MEASURED = "measured"
SKIPPED = "skipped"

SLACK = 0.7
"""Of its reference, what a rate may fall to; a time may grow to 1 / SLACK of its own."""


@dataclass(frozen=True)
class Value:
    """A measured number. floor and ceiling: what no working machine goes below or above."""

    number: float
    unit: str
    floor: float | None = None
    ceiling: float | None = None

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.ceiling is None

    def __str__(self) -> str:
        return f"{self.number:.4g} {self.unit}"


@dataclass(frozen=True)
class Check:
    """name: of the check. status: one of the words above. values: by name. detail: what is wrong,
    or what was seen. ranks: whom it blames, where it can; none of them means this machine. facts:
    names that must be there again, such as network interfaces, against the reference.
    """

    name: str
    status: str
    detail: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    facts: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Check:
        """What `to_json` gave."""
        values = {name: Value(**value) for name, value in data["values"].items()}
        lists = {name: tuple(data[name]) for name in ("ranks", "facts")}
        return Check(**{**data, **lists, "values": values})


def passed(name: str, detail: str = "", **values: Value) -> Check:
    """The answer was right; what was measured beside it is judged by `judge`."""
    return Check(name, PASS, detail, values)


def measured(name: str, detail: str = "", **values: Value) -> Check:
    """Nothing has a right answer here."""
    return Check(name, MEASURED, detail, values)


def failed(name: str, detail: str, ranks: tuple[int, ...] = (), **values: Value) -> Check:
    """The answer was wrong, or there was none."""
    return Check(name, FAIL, detail, values, ranks)


def run_check(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; one that raises has failed, with what it raised."""
    started = time.perf_counter()
    try:
        found = check()
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        found = failed(name, f"{type(error).__name__}: {text}")
    return replace(found, seconds=time.perf_counter() - started)


@dataclass(frozen=True)
class Known:
    """What a check has found on a sound machine: values by name, and the facts of a `Check`."""

    values: Mapping[str, float]
    facts: tuple[str, ...]


Reference = Mapping[str, Known]
"""By the name of the check."""


def judge(check: Check, reference: Reference | None) -> Check:
    """The check as its limits and the reference judge it; what has failed stays so."""
    if check.status in (FAIL, SKIPPED):
        return check
    problems = [p for name, value in check.values.items() if (p := _beyond(name, value))]
    known = (reference or {}).get(check.name)
    if known is not None:
        for name, value in check.values.items():
            if name in known.values:
                problems += _behind(name, value, known.values[name])
        missing = [fact for fact in known.facts if fact not in check.facts]
        if missing:
            problems.append(f"missing against the reference: {', '.join(missing)}")
    if problems:
        detail = "; ".join([*problems, *([check.detail] if check.detail else [])])
        return replace(check, status=FAIL, detail=detail)
    if check.status == MEASURED and known is not None:
        return replace(check, status=PASS)
    return check


def _beyond(name: str, value: Value) -> str:
    if value.floor is not None and value.number < value.floor:
        return f"{name} is {value}, and no working machine has less than {value.floor:g}"
    if value.ceiling is not None and value.number > value.ceiling:
        return f"{name} is {value}, and no working machine takes more than {value.ceiling:g}"
    return ""


def _behind(name: str, value: Value, known: float) -> list[str]:
    if value.is_rate:
        return (
            [f"{name} is {value}, {value.number / known:.0%} of the reference"]
            if value.number < SLACK * known
            else []
        )
    # a short time may double by chance, and harms nobody while it is far from its ceiling
    assert value.ceiling is not None
    limit = max(known / SLACK, known + value.ceiling / 10)
    return [f"{name} is {value}, the reference {known:g}"] if value.number > limit else []
