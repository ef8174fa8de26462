"""Schedule "auto": of many rules, those whose orders end first at the modelled costs.

Every named schedule is tried with every number of virtual stages that is allowed, ordered at equal
costs and at the modelled ones, and with wider and narrower limits. What needs more memory than
there is drops out; without a bound, what needs more than 1F1B on its fullest stage. Of many
micro-batches a few rounds stand for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from msc.passes.schedules.list_scheduler import list_schedule
from msc.passes.schedules.rules import Rules, may_have, rules_of
from msc.passes.schedules.schedule import Schedule
from msc.passes.schedules.timeline import Costs, Orders, makespan, peak_held

_MOST_VIRTUAL = 6
_ROUNDS = 3
_NEARLY = 1.15
"""An estimate is at most that wrong."""


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


def ranked_schedules(
    num_stages: int,
    virtual: int | None,
    micro_batches: int,
    num_layers: int,
    cut: Callable[[Rules], Cut],
    memory: float | None,
) -> Iterator[Schedule]:
    """The schedule that ends first of those that fit; then the rest.

    The smallest comes first if none fits. Whether one fits is estimated from what blocks save, and
    the caller may know better: of the rest those that fit, or nearly, come by when they end, then
    the others by what they need.

    virtual: chunks per stage, None for any number up to 6. memory: bytes of a rank.
    """
    if virtual is not None:
        many: tuple[int, ...] = (virtual,)
    else:
        many = tuple(v for v in range(1, _MOST_VIRTUAL + 1) if v * num_stages <= num_layers) or (1,)
    few = micro_batches
    if micro_batches > (_ROUNDS + 1) * num_stages:
        few = _ROUNDS * num_stages + micro_batches % num_stages
    bound = memory
    if bound is None:
        usual = rules_of("1f1b", num_stages, 1, few)
        bound = _memory(cut(usual), list_schedule(usual, _equal(usual)))
    steps = sorted({1, num_stages // 2, num_stages - 1} - {0})
    found: list[tuple[bool, float, float, int, bool]] = []
    changes = [0, *steps, *(-n for n in steps)]
    for number, (_, rules, by) in enumerate(candidates(num_stages, many, few, changes)):
        layers = cut(rules)
        for equal in (False, True)[: 1 if by else 2]:
            orders = list_schedule(rules, _equal(rules) if equal else layers.costs)
            needed = _memory(layers, orders)
            ends = makespan(orders, rules.stages, layers.costs)
            found.append((needed > bound, ends, needed, number, equal))
    found.sort()
    first = found[0] if not found[0][0] else min(found, key=lambda each: each[2:])
    rest = sorted(
        (each for each in found if each is not first),
        key=lambda each: (0.0, *each[1:]) if each[2] <= _NEARLY * bound else (1.0, *each[2:]),
    )
    named = list(candidates(num_stages, many, micro_batches, changes))
    for *_, number, equal in (first, *rest):
        name, rules, _ = named[number]
        layers = cut(rules)
        planned = _equal(rules) if equal else layers.costs
        orders = list_schedule(rules, planned)
        yield Schedule(name, rules, layers.runs, orders, planned, layers.costs)


def candidates(
    num_stages: int, many: Sequence[int], micro_batches: int, changes: Sequence[int] = (0,)
) -> Iterator[tuple[str, Rules, int]]:
    """Names and rules with virtual stages out of `many`, and limits that differ by `changes`.

    A change is how many more micro-batches may be in flight, or fewer where it is negative.
    """
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        for virtual in many:
            if not may_have(name, virtual) or (name, virtual) == ("interleaved", 1):
                continue  # the latter is 1f1b
            rules = rules_of(name, num_stages, virtual, micro_batches)
            for by in changes:
                more = f" with {abs(by)} {'more' if by > 0 else 'fewer'} in flight" if by else ""
                yield name + more, _changed(rules, by), by


def _changed(rules: Rules, by: int) -> Rules:
    """Rules with other limits, but none so low that no order keeps to them."""
    virtual = rules.stages.virtual
    least, own = virtual, 1
    if rules.in_order:  # a group goes through all chunks of a stage
        least, own = (virtual - 1) * rules.group_size + 1, rules.group_size
    return replace(
        rules,
        in_flight=tuple(min(n, max(own, n + by)) if by < 0 else n + by for n in rules.in_flight),
        held=tuple(min(n, max(least, n + by)) if by < 0 else n + by for n in rules.held),
    )


def _memory(layers: Cut, orders: Orders) -> float:
    """Bytes of the fullest stage: its state, and the most activations that it holds."""
    held = [peak_held(order, layers.activations) for order in orders]
    return max(own + state for own, state in zip(held, layers.state, strict=True))


def _equal(rules: Rules) -> Costs:
    return Costs.equal(rules.stages.num_chunks, rules.split)
