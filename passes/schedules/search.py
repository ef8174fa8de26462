"""Schedule "auto": of many rules, those whose orders end first at the modelled costs.

Every named schedule is tried with every number of virtual stages that is allowed, with its own
limits and with wider ones, at equal costs and at the modelled ones. What needs more memory than
there is drops out; without a bound on memory, what keeps more activations than 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from msc.passes.schedules.list_scheduler import list_schedule
from msc.passes.schedules.rules import UNLIMITED, Rules, may_have, rules_of
from msc.passes.schedules.schedule import Schedule
from msc.passes.schedules.timeline import Costs, Orders, makespan, peak_held

_MOST_VIRTUAL = 4


@dataclass(frozen=True)
class Cut:
    """The layers of a model in chunks.

    runs: of each chunk, the numbers of its block instances. activations: bytes that a chunk keeps
    of one micro-batch; state: bytes of a stage's parameters, gradients and moments.
    """

    runs: list[list[int]]
    costs: Costs
    activations: tuple[float, ...]
    state: tuple[float, ...]


def best_schedule(
    num_stages: int,
    virtual: int | None,
    micro_batches: int,
    num_layers: int,
    cut: Callable[[Rules], Cut],
    memory: float | None,
) -> Schedule:
    """The schedule that ends first of those that fit; the smallest if none fits.

    virtual: chunks per stage, None for any number up to 4. memory: bytes of a rank.
    """
    if virtual is not None:
        many: tuple[int, ...] = (virtual,)
    else:
        many = tuple(v for v in range(1, _MOST_VIRTUAL + 1) if v * num_stages <= num_layers) or (1,)
    usual = rules_of("1f1b", num_stages, 1, micro_batches)
    kept = max(_activations(usual, cut(usual), list_schedule(usual, _equal(usual))))
    found: list[tuple[tuple[bool, float, float, int], Schedule]] = []
    for name, rules in candidates(num_stages, many, micro_batches):
        layers = cut(rules)
        for planned in (_equal(rules), layers.costs):
            orders = list_schedule(rules, planned)
            needed = _activations(rules, layers, orders)
            if memory is not None:
                needed = [own + state for own, state in zip(needed, layers.state, strict=True)]
            fits = max(needed) <= (kept if memory is None else memory)
            time = makespan(orders, rules.stages, layers.costs) if fits else 0.0
            key = (not fits, time, max(needed), len(found))
            found.append((key, Schedule(name, rules, layers.runs, orders, planned, layers.costs)))
    return min(found, key=lambda each: each[0])[1]


def candidates(
    num_stages: int, many: tuple[int, ...], micro_batches: int
) -> Iterator[tuple[str, Rules]]:
    """Named rules with numbers of virtual stages out of `many`, and with wider limits."""
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        for virtual in many:
            if not may_have(name, virtual) or (name, virtual) == ("interleaved", 1):
                continue  # the latter is 1f1b
            rules = rules_of(name, num_stages, virtual, micro_batches)
            yield name, rules
            for more in sorted({1, num_stages // 2, num_stages - 1} - {0}):
                yield f"{name} with {more} more in flight", _wider(rules, more)


def _activations(rules: Rules, layers: Cut, orders: Orders) -> list[float]:
    """The most bytes of activations that each stage holds."""
    return [peak_held(order, layers.activations) for order in orders]


def _wider(rules: Rules, more: int) -> Rules:
    return replace(
        rules,
        in_flight=tuple(min(UNLIMITED, limit + more) for limit in rules.in_flight),
        held=tuple(min(UNLIMITED, limit + more) for limit in rules.held),
    )


def _equal(rules: Rules) -> Costs:
    return Costs.equal(rules.stages.num_chunks, rules.split)
