"""Recompute as little as keeps every rank within a budget.

The choice of a stage is the cheapest within a bound on the bytes that it saves (`choice`). What
else is alive at the peak depends on the choice, so the finished program says: it is built for a
choice and its memory predicted, and the bound is searched between the leanest choice and saving
everything. Of the programs that were built the cheapest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msc.ir.errors import PlanError
from msc.passes.recompute.choice import Choice, StageProgram

_ROUNDS = 8
"""Programs built at most, besides those that save everything and as little as possible."""


@dataclass
class _Search:
    """The bound of one stage: `best` fits, and to save `too_much` does not."""

    program: StageProgram
    best: Choice | None
    peak: int
    too_much: int
    rest: float = 0.0  # what was alive at the last peak besides what was saved

    def proposal(self, budget: float) -> Choice | None:
        """A choice between the best one and what is too much; None if there is nothing left."""
        if self.best is None:
            return None
        low, high = self.best.saved_bytes, self.too_much
        limit = budget - self.rest
        if not low < limit < high:
            limit = (low + high) / 2
        found = self.program.cheapest(limit)
        if found is None or not low < found.saved_bytes < high or found.cost >= self.best.cost:
            found = self.program.cheapest(high - 1)
        if found is None or found.saved_bytes <= low or found.cost >= self.best.cost:
            return None
        return found

    def learn(self, choice: Choice, peak: int, budget: float) -> None:
        """Take a choice whose program needs `peak` bytes into account."""
        self.rest = peak - choice.saved_bytes
        if peak <= budget:
            self.best, self.peak = choice, peak
        else:
            self.too_much = choice.saved_bytes


def within_budget(
    stages: Sequence[StageProgram],
    budget: float,
    peaks: Callable[[Sequence[Choice | None]], list[int]],
    advice: str = "",
) -> list[Choice | None]:
    """The choice of each stage, None where everything may be saved.

    peaks: the predicted bytes of each stage of the program built for given choices. Raises
    `PlanError` where the leanest choice needs more than the budget, with `advice` after its own.
    """
    everything = peaks([None] * len(stages))
    if max(everything) <= budget:
        return [None] * len(stages)
    leanest = [program.leanest() for program in stages]
    lean_peaks = peaks(leanest)
    searches: list[_Search] = []
    for stage, program in enumerate(stages):
        if everything[stage] <= budget:
            searches.append(_Search(program, None, everything[stage], 0))
            continue
        all_saved = program.cheapest(float("inf"))
        assert all_saved is not None  # to keep everything is a solution
        search = _Search(program, leanest[stage], lean_peaks[stage], all_saved.saved_bytes)
        search.rest = everything[stage] - all_saved.saved_bytes
        searches.append(search)
    _require_fit(searches, lean_peaks, budget, advice)
    for _ in range(_ROUNDS):
        proposals = [search.proposal(budget) for search in searches]
        if not any(proposals):
            break
        found = peaks([p or s.best for p, s in zip(proposals, searches, strict=True)])
        for search, proposal, peak in zip(searches, proposals, found, strict=True):
            if proposal is not None:
                search.learn(proposal, peak, budget)
    return [search.best for search in searches]


def _require_fit(
    searches: Sequence[_Search], lean_peaks: Sequence[int], budget: float, advice: str
) -> None:
    over = [s for s, search in enumerate(searches) if search.best and lean_peaks[s] > budget]
    if over:
        worst = max(over, key=lean_peaks.__getitem__)
        raise PlanError(
            f"MemoryBudget allows {budget:,.0f} bytes per rank, but pipeline stage {worst} needs "
            f"{lean_peaks[worst]:,} even if it recomputes all that it can (parameters, gradients, "
            "optimizer state, inputs, and what one block's backward needs at once). Allow as much, "
            f"or use more tp or pp ranks, or more micro-batches{advice}."
        )
