"""A Trainer's side of an agent that brings runs back (`msc run`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from msc.checkpoint.run import History
from msc.ir.errors import UserError
from msc.program import Program
from msc.ranks import Job, has_group_alone, is_lost_peer
from msc.runtime.recovery.journal import Entry
from msc.runtime.recovery.link import Link, current

_trainers = itertools.count(1)
_STOP_AFTER = "stop after"
"""Where in the store of a generation it stands after which step all ranks stop."""
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_ROUNDING = 5e-2
"""How far, as a part of itself, a loss may move when steps are repeated on other ranks: sums in
another order, and what the steps from there on make of it."""


class Recovery:
    """What one Trainer tells the agent, and asks of it.

    trainer: its number in this process. Only ranks inside of the first `fit` of their first Trainer
    can keep their processes: a process that takes a rank cannot know where else in the script they
    are.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.trainer = next(_trainers)
        self.inside = False
        self._calls = 0
        self._caught_up = 0  # the last generation of which it was told
        self._asked = False
        self._same_ranks = True  # all steps that were repeated so far, as the first time

    @staticmethod
    def of_process() -> Recovery | None:
        """That of a new Trainer; None without an agent that brings runs back."""
        link = current()
        return None if link is None else Recovery(link)

    def introduce(self, program: Program, saves: bool) -> None:
        """Say on how many ranks the program can run, and whether its state is saved."""
        dtypes = {program.dtype_of(layout) for layout in program.parameters.values()}
        roundings = [_ROUNDING.get(dtype, _HALF_ROUNDING) for dtype in dtypes]
        self._rounding = max(roundings, default=0.0)
        worlds = [[w.mesh.size, w.mesh.axis_size("dp"), w.micro_batches] for w in program.worlds]
        self.link.tell("program", worlds=worlds, saves=saves)

    def begin(self, job: Job, wake: Callable[[], None]) -> None:
        """This rank has its groups; `wake` ends every wait for another rank."""
        self.link.on_leave(wake)
        if _keeps_journal(job):
            self.link.journal.begin(self.trainer)

    def history(self, step: int) -> History:
        """What the run tells of its first steps."""
        found = History()
        for entry in self.link.journal.first(step):
            found.losses.append(entry.loss)
            found.learning_rates.append(entry.rate)
            if entry.norm is not None:
                found.grad_norms.append(entry.norm)
        return found

    def began(self, job: Job, history: History, grouped: float) -> None:
        """This rank has its state, of all steps in `history`, and has had its groups since."""
        generation = job.generation
        if generation is None:
            return
        self._asked = False
        self._same_ranks = True
        if job.rank == 0 and generation.may_grow:
            job.store.set(_STOP_AFTER, "-1")
        source = "the beginning" if not history.losses else "storage"
        if generation.source is not None:
            source = generation.source.text
            generation.source.close()
        elif generation.keeps_journal:
            for step, loss in enumerate(history.losses, 1):
                norm = history.grad_norms[step - 1] if history.grad_norms else None
                self.link.journal.fill(step, Entry(loss, norm, history.learning_rates[step - 1]))
        self.link.tell(
            "restored",
            load_s=time.monotonic() - grouped,
            source=source,
            step=len(history.losses),
        )

    def attempt(self, step: int | None, action: Callable[[], None]) -> bool:
        """Do `action`, of `step`; False if another rank was lost meanwhile: all must meet again."""
        try:
            action()
        except Exception as error:
            if is_lost_peer(error):
                return False
            self.failed(step, error)
            raise
        return True

    def enter(self, job: Job, last: int, can_rewind: bool) -> int:
        """`fit` begins, which is to end with step `last`; with which it does end.

        Of a process that has taken a rank, that is up to where the others' `fit` goes.
        """
        self._calls += 1
        self.inside = True
        if self._calls == 1 and job.generation is not None and job.generation.last is not None:
            last = job.generation.last
        stays = can_rewind and job.generation is not None and has_group_alone()
        self.link.tell("fit", calls=self._calls, last=last, stays=stays)
        return last

    def leave(self, job: Job, step: int) -> None:
        """`fit` has come to its end."""
        self.inside = False
        self.tell_step(job, step, end=True)
        self.link.tell("fit over")

    def tell_step(self, job: Job, step: int, end: bool = False) -> None:
        """Say so once when the run is where it was before the fault."""
        generation = job.generation
        if job.rank or generation is None or generation.number == self._caught_up:
            return
        if end or step > generation.reached:
            self._caught_up = generation.number
            self.link.tell("caught up", step=step)

    def record(self, job: Job, step: int, entry: Entry) -> None:
        """Note what a step came to, and say so if it came to something else before.

        On as many ranks as before it must be the same to the last bit, else within rounding.
        """
        self.tell_step(job, step)
        if not _keeps_journal(job):
            return  # the loss is the same on all
        before = self.link.journal.write(step, replace(entry, ranks=job.mesh.size))
        if before is None:
            return
        self._same_ranks = self._same_ranks and before.ranks == job.mesh.size
        rounding = 0.0 if self._same_ranks else self._rounding
        if not _same(before.loss, entry.loss, rounding):
            self.link.tell("mismatch", step=step, recorded=before.loss, found=entry.loss)

    def went_back(self, job: Job, step: int) -> None:
        """What was taken after `step` was not sound: nothing must be as it was then."""
        if _keeps_journal(job):
            self.link.journal.cut(step)

    # -- growing back

    def gives_way(self, job: Job, step: int) -> bool:
        """Whether all ranks stop after this step, as the agent has asked; on all ranks alike."""
        if job.generation is None or not job.generation.may_grow:
            return False
        # Rank 0 says so one step ahead. The loss of a step comes from all ranks, so no rank ends
        # that step before rank 0 has begun it.
        due = int(job.store.get(_STOP_AFTER)) == step
        if job.rank == 0 and self.link.grows.is_set() and not self._asked:
            self._asked = True
            job.store.set(_STOP_AFTER, str(step + 1))
        return due

    def give_way(self, job: Job, step: int, complete: bool) -> None:
        """Wait to be ended, since more ranks go on from `step`, if that is saved and complete."""
        if complete:
            self.link.surrender("gave way", step=step)
        self._asked = False
        self.link.grows.clear()
        if job.rank == 0:
            self.link.tell("goes on", step=step)

    def failed(self, step: int | None, error: BaseException) -> None:
        """This rank ends with an error of its own."""
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:500]}"
        self.link.tell("failed", error=text, step=step, final=isinstance(error, UserError))

    def check_first(self, job: Job, method: str) -> None:
        """A collective method other than `fit` begins: the others must not be inside of `fit`."""
        generation = job.generation
        if not self._calls and generation is not None and generation.last is not None:
            self.link.surrender(
                "restart",
                why=f"calls {method}() before fit(), while the ranks that went on are inside of "
                "fit()",
            )

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Outside of `fit` a rank cannot go on after another is lost: it waits to be replaced."""
        try:
            yield
        except Exception as error:
            if is_lost_peer(error):
                self.link.surrender("lost")
            raise


def _keeps_journal(job: Job) -> bool:
    """Whether this rank writes the journal of its host."""
    return job.generation is not None and job.generation.keeps_journal


def _same(one: float, other: float, rounding: float) -> bool:
    if one == other or (one != one and other != other):
        return True
    return abs(one - other) <= rounding * max(abs(one), abs(other))
