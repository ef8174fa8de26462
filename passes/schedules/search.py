"""Schedule "auto": of many rules, those whose orders end first at the modelled costs.

Every named schedule is tried with every number of virtual stages that is allowed, with its own
limits and with wider ones, at equal costs and at the modelled ones. What needs more memory than
there is drops out; without a bound on memory, what keeps more activations than 1F1B. Where nothing
fits, narrower limits are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from msc.passes.schedules.list_scheduler import list_schedule
from msc.passes.schedules.rules import Rules, may_have, rules_of
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
    bound = kept if memory is None else memory

    def key(schedule: Schedule) -> tuple[bool, float, float]:
        needed = _activations(schedule.rules, cut(schedule.rules), schedule.orders)
        if memory is not None:
            state = cut(schedule.rules).state
            needed = [own + other for own, other in zip(needed, state, strict=True)]
        if max(needed) > bound:
            return True, max(needed), 0.0
        return False, makespan(schedule.orders, schedule.stages, schedule.modelled), max(needed)

    steps = sorted({1, num_stages // 2, num_stages - 1} - {0})
    best: Schedule | None = None
    for changes in ([0, *steps], [-less for less in steps]):
        if best is not None and not key(best)[0]:
            break
        found = [
            Schedule(name, rules, cut(rules).runs, list_schedule(rules, planned), planned, costs)
            for name, rules in candidates(num_stages, many, micro_batches, changes)
            for costs in (cut(rules).costs,)
            for planned in (_equal(rules), costs)
        ]
        best = min(found if best is None else [best, *found], key=key)
    assert best is not None  # any number of virtual stages has a schedule
    return best


def candidates(
    num_stages: int, many: Sequence[int], micro_batches: int, changes: Sequence[int] = (0,)
) -> Iterator[tuple[str, Rules]]:
    """Named rules with numbers of virtual stages out of `many`, and limits that differ from theirs.

    changes: how many more micro-batches may be in flight, or fewer where it is negative.
    """
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        for virtual in many:
            if not may_have(name, virtual) or (name, virtual) == ("interleaved", 1):
                continue  # the latter is 1f1b
            rules = rules_of(name, num_stages, virtual, micro_batches)
            for by in changes:
                more = f" with {abs(by)} {'more' if by > 0 else 'fewer'} in flight" if by else ""
                yield name + more, _changed(rules, by)


def _changed(rules: Rules, by: int) -> Rules:
    """Rules with other limits, but none so low that no order keeps to them."""
    virtual = rules.stages.virtual
    least, own = virtual, 1
    if rules.in_order:  # a group goes through all chunks of a stage
        least, own = (virtual - 1) * rules.group + 1, rules.group
    return replace(
        rules,
        in_flight=tuple(min(n, max(own, n + by)) if by < 0 else n + by for n in rules.in_flight),
        held=tuple(min(n, max(least, n + by)) if by < 0 else n + by for n in rules.held),
    )


def _activations(rules: Rules, layers: Cut, orders: Orders) -> list[float]:
    """The most bytes of activations that each stage holds."""
    return [peak_held(order, layers.activations) for order in orders]


def _equal(rules: Rules) -> Costs:
    return Costs.equal(rules.stages.num_chunks, rules.split)
