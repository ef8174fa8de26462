"""A Trainer's side of an agent that brings runs back (`msc run`)."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msc.checkpoint.run import History
from msc.ir.errors import UserError
from msc.ranks import Job, has_group_alone, is_lost_peer
from msc.runtime.recovery.journal import Entry
from msc.runtime.recovery.link import Link, current

_trainers = itertools.count(1)


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
        self._keeps_journal = os.environ["LOCAL_RANK"] == "0"  # for all ranks of its host

    @staticmethod
    def of_process() -> Recovery | None:
        """That of a new Trainer; None without an agent that brings runs back."""
        link = current()
        return None if link is None else Recovery(link)

    def begin(self, job: Job, wake: Callable[[], None]) -> None:
        """This rank has its groups; `wake` ends every wait for another rank."""
        self.link.on_leave(wake)
        if self._keeps_journal:
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
        source = "the beginning" if not history.losses else "storage"
        if generation.source is not None:
            source = generation.source.text
            generation.source.close()
        elif self._keeps_journal:
            for step, loss in enumerate(history.losses, 1):
                norm = history.grad_norms[step - 1] if history.grad_norms else None
                self.link.journal.write(step, Entry(loss, norm, history.learning_rates[step - 1]))
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
        """Note what a step came to, and say so if it came to something else before."""
        self.tell_step(job, step)
        if not self._keeps_journal:
            return  # the loss is the same on all
        before = self.link.journal.write(step, entry)
        if before is not None and not _same(before.loss, entry.loss):
            self.link.tell("mismatch", step=step, recorded=before.loss, found=entry.loss)

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


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)
