"""Going back inside of a run: to the last state whose copies agreed, and on from there.

After a finding all steps since that state are repeated once. Comes the finding not again, it was
the hardware, and the run is what it would have been without. Comes a value that is not finite, or
leaps, again at the same step, it is the data or the model: then the run goes back once more, and
skips those steps, as Chowdhery et al. (PaLM, 2022, section 5.1) restarted from before a spike and
left out the batches seen before and during it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msc.batches import Batches
from msc.checkpoint.options import Checkpoint
from msc.ir.errors import InputError, TrainingError
from msc.runtime.corruption.state_copy import StateCopy
from msc.runtime.state import RankState

_TIMES = 3
"""How often a run goes back to one state before the hardware is given up."""


def check_rewind(every: int, checkpoint: Checkpoint | None, batches: Batches) -> None:
    """Raise `InputError` for data that has no way back, and for saves that nothing has checked."""
    if not batches.can_rewind:
        raise InputError(
            "The guard's policy is 'rewind', and the data is an iterator, which cannot be gone "
            "through again. Pass an iterable, or an object with rows(step, indices)."
        )
    if checkpoint is None:
        return
    if isinstance(checkpoint.every, int) and checkpoint.every % every == 0:
        return
    raise InputError(
        f"The guard compares every {every} steps, and checkpoints are saved every "
        f"{checkpoint.every}. With policy 'rewind' let that be a number of steps that {every} "
        "divides, so that no checkpoint holds what is found only later."
    )


class Rewind:
    """Where this rank's run goes back to; comes out alike on all ranks.

    position: says where the data is. step: of the state that the run goes back to.
    """

    def __init__(self, position: Callable[[], Any]) -> None:
        self.step = 0
        self.data: Any = None
        self._position = position
        self._copy = StateCopy()
        self._kept = False
        self._before = StateCopy()  # of a step that is skipped
        self._suspect = 0  # the step whose finding is put to the test
        self._times = 0
        self._last_skipped = 0

    def before_step(self, state: RankState) -> None:
        """A step is about to change the state."""
        if not self._kept:
            self.keep(state)
        if self.skips(state.step + 1):
            self._before.keep(state)

    def keep(self, state: RankState) -> None:
        """This state is sound: go back to none before."""
        self._copy.keep(state)
        self._kept = True
        self.step, self.data = state.step, self._position()
        self._suspect = self._times = 0
        if self._last_skipped <= state.step:
            self._before = StateCopy()

    def skips(self, step: int) -> bool:
        """Whether a step is to change nothing."""
        return self.step < step <= self._last_skipped

    def undo(self, state: RankState) -> str:
        """The step that was just taken changes nothing; what to tell of it."""
        step = state.step
        self._before.restore(state)
        state.step = step
        state.skipped = state.skipped + 1
        return f"step {step} is skipped"

    def passed(self, step: int) -> str:
        """Nothing is wrong with `step`; what to tell, if something was."""
        if step != self._suspect:
            return ""
        self._suspect = 0
        return (
            f"step {step} came out otherwise when it was repeated from step {self.step} on: what "
            "was found was the hardware, or an op that is not deterministic"
        )

    def go_back(self, state: RankState, finding: str, data_may_do: bool) -> str:
        """Go back after a finding in the step that was just taken; what to tell of it.

        data_may_do: whether the data or the model may be the cause. Raises `TrainingError` where
        going back has not helped.
        """
        step = state.step
        again = step == self._suspect
        if self._times >= _TIMES or (again and not data_may_do):
            raise TrainingError(
                f"{finding}. The run has gone back to step {self.step} {self._times} times, and "
                "that has not helped: check the machines with `msc doctor`, and leave out the one "
                "that is not sound."
            )
        self._times += 1
        self._copy.restore(state)
        if not again:
            self._suspect = step
            return f"{finding}; all ranks go back to step {self.step} and repeat what came since"
        self._suspect = 0
        self._last_skipped = step
        return (
            f"{finding}, again after all from step {self.step + 1} on was repeated: it is the data "
            "or the model; all ranks go back once more, and skip these steps"
        )
