"""Recompute so little that every rank keeps within a budget.

What is alive at the peak depends on the choice, and not only by what is saved: a backward that
recomputes more may itself need more than a leaner choice frees. So the finished program says: it is
built for a choice and its memory predicted. Tried are the named policies and, for bounds on what a
stage saves at even steps between the leanest choice and everything, the cheapest choices within
them (`choice`). Of what was tried and fits, a stage takes the cheapest. A budget is refused only
after every bound was tried. The bounds do not depend on the budget, so the bytes of a program that
one budget gave are a budget that is kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msc.ir.errors import PlanError
from msc.passes.recompute.choice import Choice, StageProgram

_STEPS = 32
"""Bounds of a stage: step 0 lets everything be saved, step 32 as little as possible."""

_COARSE_FIRST = sorted(range(_STEPS), key=lambda step: (-(step & -step), step))
"""The steps but the last: the half, the quarters, the eighths, and so on; at the end step 0."""

_ALWAYS = 3
"""Of these are tried in any case: as far as the quarters, for the peak may fall and rise again."""


class _Search:
    """The choices of one stage that were tried, with the bytes of their programs."""

    def __init__(self, program: StageProgram, budget: float, everything: int) -> None:
        """everything: the bytes of the program that saves all."""
        self._program = program
        self._budget = budget
        all_saved = program.everything_saved()
        self._most = all_saved.saved_bytes
        self._tried = [(all_saved, everything)]
        self._steps: dict[int, Choice] = {}
        self._points = self._to_try()

    def proposal(self) -> Choice | None:
        """A choice whose program is to be built next; None if there is nothing left."""
        return next((c for c in self._points if all(c != old for old, _ in self._tried)), None)

    def learn(self, choice: Choice, peak: int) -> None:
        """Take into account that a choice's program needs `peak` bytes."""
        self._tried.append((choice, peak))

    def best(self) -> Choice | None:
        """The cheapest choice that fits; of several, what saves most. None if none fits."""
        fitting = [choice for choice, peak in self._tried if peak <= self._budget]
        return min(fitting, key=lambda c: (c.cost, -c.saved_bytes), default=None)

    def least(self) -> int:
        """The bytes of the smallest program."""
        return min(peak for _, peak in self._tried)

    def _to_try(self) -> Iterator[Choice]:
        """What to try, given at each point what was learned so far."""
        lean = self._steps[_STEPS] = self._program.leanest()
        yield from (lean, *self._program.named())
        for count, step in enumerate(_COARSE_FIRST):
            if count >= _ALWAYS and self.best() is not None:
                break
            yield self._at(step)
        while (between := self._cheaper_step()) is not None:
            yield self._at(between)

    def _at(self, step: int) -> Choice:
        lean = self._steps[_STEPS]
        found = self._program.cheapest(self._bound(step))
        # The solver may give up at its limit of nodes; the leanest choice is within every bound.
        self._steps[step] = lean if found is None else found
        return self._steps[step]

    def _bound(self, step: int) -> int:
        lean = self._steps[_STEPS].saved_bytes
        return self._most - (self._most - lean) * step // _STEPS

    def _cheaper_step(self) -> int | None:
        """A step half-way between the cheapest that fits and the next that does not."""
        best = self.best()
        if best is None:
            return None
        fits = {step: self._fits(choice) for step, choice in self._steps.items()}
        above = sum(self._bound(step) > best.saved_bytes for step in range(_STEPS))
        high = min((step for step, fit in fits.items() if fit), default=above)
        low = max((step for step, fit in fits.items() if not fit and step < high), default=-1)
        return (low + high) // 2 if high - low > 1 else None

    def _fits(self, choice: Choice) -> bool:
        return any(old == choice and peak <= self._budget for old, peak in self._tried)


def within_budget(
    stages: Sequence[StageProgram],
    budget: float,
    peaks: Callable[[Sequence[Choice | None]], list[int]],
    advice: str = "",
) -> list[Choice | None]:
    """The choice of each stage, None where everything may be saved.

    peaks: the predicted bytes of each stage of the program built for given choices; those of a
    stage depend on its own choice alone. Raises `PlanError` where no choice of a stage that was
    tried fits, with the fewest bytes found, and with `advice` after its own.
    """
    everything = peaks([None] * len(stages))
    searches = {
        stage: _Search(program, budget, everything[stage])
        for stage, program in enumerate(stages)
        if everything[stage] > budget
    }
    while True:
        proposals = [searches[s].proposal() if s in searches else None for s in range(len(stages))]
        if not any(proposals):
            break
        for stage, peak in enumerate(peaks(proposals)):
            proposal = proposals[stage]
            if proposal is not None:
                searches[stage].learn(proposal, peak)
    chosen = {stage: search.best() for stage, search in searches.items()}
    over = [stage for stage, choice in chosen.items() if choice is None]
    if over:
        worst = max(over, key=lambda stage: searches[stage].least())
        raise PlanError(
            f"MemoryBudget allows {budget:,.0f} bytes per rank, but pipeline stage {worst} needs "
            f"at least {searches[worst].least():,} with the choices tried (parameters, gradients, "
            "optimizer state, inputs, saved activations, and what one block's backward needs at "
            "once). Allow as much, or use more tp or pp ranks, or more micro-batches"
            f"{advice}."
        )
    return [chosen.get(stage) for stage in range(len(stages))]
