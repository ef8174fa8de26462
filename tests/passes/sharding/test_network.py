"""Cost networks: the search finds what trying every combination finds, however it is cut short."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from msc.ir.placement import REPLICATED, VARYING, State, sharded
from msc.passes.sharding.network import LARGEST, CostNetwork, NoSolutionError
from msc.passes.sharding.reads import Read, add_reads

COSTS = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5, 1000.0, math.inf])


@dataclass(frozen=True)
class Drawn:
    """A network as data: sizes of the variables, tables by their variables, amounts of options."""

    sizes: tuple[int, ...]
    tables: tuple[tuple[tuple[int, ...], NDArray[np.float64]], ...]
    amounts: dict[int, tuple[float, ...]]

    def network(self) -> CostNetwork:
        network = CostNetwork()
        for size in self.sizes:
            network.variable([0.0] * size)
        for scope, costs in self.tables:
            network.table(scope, costs)
        for variable, amounts in self.amounts.items():
            network.amount(variable, amounts)
        return network

    def amount(self, options: tuple[int, ...]) -> float:
        return sum(amounts[options[v]] for v, amounts in self.amounts.items())

    def cost(self, options: tuple[int, ...]) -> float:
        return math.fsum(float(c[tuple(options[v] for v in scope)]) for scope, c in self.tables)

    def every(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(size) for size in self.sizes)))

    def cheapest(self, bound: float) -> float:
        allowed = (o for o in self.every() if self.amount(o) <= bound)
        return min((self.cost(options) for options in allowed), default=math.inf)


@st.composite
def networks(draw: st.DrawFn) -> Drawn:
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)))
    scopes = st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=3, unique=True)
    tables = []
    for _ in range(draw(st.integers(1, 7))):
        scope = tuple(draw(scopes))
        shape = [sizes[v] for v in scope]
        count = math.prod(shape)
        costs = draw(st.lists(COSTS, min_size=count, max_size=count))
        tables.append((scope, np.asarray(costs).reshape(shape)))
    holders = draw(st.lists(st.sampled_from(range(len(sizes))), max_size=3, unique=True))
    numbers = st.sampled_from([0.0, 1.0, 2.0, 4.0])
    amounts = {
        v: tuple(draw(st.lists(numbers, min_size=sizes[v], max_size=sizes[v]))) for v in holders
    }
    return Drawn(sizes, tuple(tables), amounts)


@given(networks(), st.sampled_from([LARGEST, 4, 1]), st.sampled_from([math.inf, 6.0, 3.0, 1.0]))
@settings(deadline=None)
def test_no_combination_is_cheaper(drawn: Drawn, largest: int, bound: float) -> None:
    """Also where tables may not grow, so that an integer program has to finish the work."""
    best = drawn.cheapest(bound)
    if math.isinf(best):
        with pytest.raises(NoSolutionError):
            drawn.network().solve(bound, largest)
        return
    found = drawn.network().solve(bound, largest)
    options = tuple(found.options)
    assert drawn.amount(options) <= bound
    assert found.cost == pytest.approx(drawn.cost(options), rel=1e-9)
    assert found.cost == pytest.approx(best, rel=1e-6, abs=1e-6)


@given(networks())
@settings(deadline=None)
def test_a_bound_that_nothing_keeps_says_what_is_needed(drawn: Drawn) -> None:
    legal = [drawn.amount(o) for o in drawn.every() if math.isfinite(drawn.cost(o))]
    if not legal or min(legal) == 0:
        return
    with pytest.raises(NoSolutionError) as caught:
        drawn.network().solve(min(legal) / 2)
    assert caught.value.least == min(legal)


def test_the_first_of_equal_options_is_taken() -> None:
    network = CostNetwork()
    network.variable([0.3, 0.1 + 0.2, 0.3])  # the second is larger by a rounding
    network.variable([0.1 + 0.2, 0.3])
    assert network.solve().options == [0, 0]


def test_costs_of_all_magnitudes_are_told_apart() -> None:
    """One part in 1e12 decides, and the integer program sees it too."""
    for largest in (LARGEST, 1):
        network = CostNetwork()
        a, b = network.variable([0.0, 1e12]), network.variable([0.0, 0.0])
        network.table((a, b), np.asarray([[2.0, 1.0], [0.0, 0.0]]))
        assert network.solve(largest=largest).options == [0, 1]


STATES = [REPLICATED, VARYING, sharded(0), sharded(1)]
WANTED = st.lists(st.sampled_from(STATES), min_size=1, max_size=3)


@given(WANTED, st.lists(WANTED, min_size=1, max_size=4), st.sampled_from([10**6, 1]), st.data())
@settings(deadline=None)
def test_each_conversion_is_paid_once(
    made: list[State], wanted: list[list[State]], largest: int, data: st.DataObject
) -> None:
    prices = {
        (have, want): 0.0 if have == want else data.draw(st.sampled_from([1.0, 4.0, math.inf]))
        for have in STATES
        for want in STATES
    }
    network = CostNetwork()
    source = network.variable([0.0] * len(made))
    reads = [Read(network.variable([0.0] * len(states)), states) for states in wanted]
    reads.append(Read(reads[0].variable, wanted[0][::-1]))  # a second operand of the first reader
    add_reads(network, Read(source, made), reads, lambda h, w: prices[h, w], largest)
    best = math.inf
    for have in made:
        for options in itertools.product(*(range(len(states)) for states in wanted)):
            picked = [states[o] for states, o in zip(wanted, options, strict=True)]
            picked.append(wanted[0][::-1][options[0]])
            best = min(best, sum(prices[have, want] for want in set(picked)))
    if math.isinf(best):
        with pytest.raises(NoSolutionError):
            network.solve()
    else:
        assert network.solve().cost == best
