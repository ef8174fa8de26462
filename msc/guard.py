"""`msc.Guard`: what a training run does about values that cannot be right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from msc.checkpoint.program_state import state_tensors
from msc.ir.errors import InputError, LostRankError, TrainingError
from msc.program import Program
from msc.ranks import Job
from msc.rewind import Rewind
from msc.runtime.corruption.fingerprints import Difference, Replicas, word_sum
from msc.runtime.corruption.leaps import leap
from msc.runtime.corruption.state_copy import StateCopy
from msc.runtime.state import RankState

POLICIES = ("stop", "skip", "replay", "rewind")
_OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


@dataclass(frozen=True)
class Guard:
    """Look for silent corruption as a run goes on.

    Args:
        every: compare the copies of parameters and optimizer state on all ranks after every so many
            steps, and before each save. Copies that differ stop the run (unless it rewinds), and
            the error names the rank: its state cannot be trusted, nor what was reduced with it
            since the comparison before. Under `msc run` its process is replaced, and all go back to
            what was saved.
        policy: what to do about a loss, or a norm of gradients, that is not finite or leaps:
            "stop" with a `TrainingError`; "skip" the step, so that its batch changes nothing;
            "replay" it, bit for bit; or "rewind". If a replayed step comes out otherwise, that was
            the hardware, and the second result counts; if it does not, it is the data or the model,
            and the run stops unless the value is finite. With "rewind", which is for copies that
            differ too, all ranks go back, inside of their processes, to the state of the last
            comparison, and repeat the steps since; if the value comes again, they go back once more
            and skip those steps. All but "stop" hold a copy of the rank's state; "rewind" makes it
            at each comparison, and the others in every step.
        leap: how many times the spread of the values before one may be above them.

    Raises `InputError` for values out of range.
    """

    every: int = 100
    policy: Literal["stop", "skip", "replay", "rewind"] = "stop"
    leap: float = 20.0

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise InputError(f"every is {self.every!r}; it is a number of steps, at least 1.")
        if self.policy not in POLICIES:
            raise InputError(f"policy is {self.policy!r}; it is one of {', '.join(POLICIES)}.")
        if not isinstance(self.leap, (int, float)) or not self.leap > 0:
            raise InputError(f"leap is {self.leap!r}; it is a number above 0, such as 20.")


Outputs = Mapping[str, Any]


class RunGuard:
    """The guard of one rank's run; all methods are collective, and come out alike on all ranks.

    events: what was found, and what was done about it, a line each; rewind: where it goes back to,
    if that is the policy. position: says where the data is.
    """

    def __init__(
        self, options: Guard, program: Program, job: Job, position: Callable[[], Any]
    ) -> None:
        self.events: list[str] = []
        self._position = position
        self.rewind = Rewind(position) if options.policy == "rewind" else None
        self._options = options
        self._job = job
        self._replicas = Replicas(state_tensors(program), job.rank)
        self._copy = StateCopy()
        self._skipped = 0
        self._told = 0
        self._equal_at: int | None = None

    def meet(self, job: Job) -> None:
        """Go on in another group of the same ranks, from a state that was saved."""
        self._job = job
        self._equal_at = None
        if self.rewind is not None:
            self.rewind = Rewind(self._position)

    def news(self) -> list[str]:
        """The events since the call before."""
        new = self.events[self._told :]
        self._told = len(self.events)
        return new

    def before_step(self, state: RankState) -> None:
        """A step is about to change the state."""
        self._skipped = int(state.skipped)
        if self.rewind is not None:
            self.rewind.before_step(state)
        elif self._options.policy != "stop":
            self._copy.keep(state)

    def after_step(
        self,
        state: RankState,
        outputs: Outputs,
        earlier: Mapping[str, list[float]],
        repeat: Callable[[], Outputs],
    ) -> Outputs | None:
        """A step has changed the state and given `outputs`; what it counts as having given.

        None: the state is that of an earlier step, which `rewind` names, and the run goes on there.
        earlier: the values of the steps before, by the name of the output. repeat: takes the step
        again from the state as it is. Raises `TrainingError` where the policy stops the run.
        """
        skipped = int(state.skipped) > self._skipped  # by the optimizer, since it is not finite
        if self.rewind is not None and self.rewind.skips(state.step):
            self.events.append(self.rewind.undo(state))
            skipped = True
        problem = "" if skipped else self._problem(outputs, earlier)
        if problem and self.rewind is not None:
            finding = f"{problem} in step {state.step}"
            self.events.append(self.rewind.go_back(state, finding, data_may_do=True))
            return None
        if problem:
            outputs = self._treat(problem, state, outputs, earlier, repeat)
        different: Sequence[Difference] = ()
        if state.step % self._options.every == 0:
            different = self._compare(state)
        if self.rewind is not None:
            if different:
                finding = _told(state, different)
                self.events.append(self.rewind.go_back(state, finding, data_may_do=False))
                return None
            passed = self.rewind.passed(state.step)
            self.events += [passed] if passed else []
            if state.step % self._options.every == 0:
                self.rewind.keep(state)
        elif different:
            raise self._stop(state, different)
        return outputs

    def _problem(self, outputs: Outputs, earlier: Mapping[str, list[float]]) -> str:
        names = {"loss": "loss", "grad_norm": "norm of the gradients"}
        found = [
            leap(names[key], [*values, float(outputs[key])], self._options.leap)
            for key, values in earlier.items()
            if key in outputs
        ]
        return "; ".join(text for text in found if text)

    def _treat(
        self,
        problem: str,
        state: RankState,
        outputs: Outputs,
        earlier: Mapping[str, list[float]],
        repeat: Callable[[], Outputs],
    ) -> Outputs:
        step, policy = state.step, self._options.policy
        if policy == "stop":
            raise TrainingError(
                f"{problem} in step {step}. Go on from the last checkpoint, or pass "
                'msc.Guard(policy="replay") to see whether the step comes out the same again.'
            )
        first = self._marks(state, outputs)
        self._copy.restore(state)
        if policy == "skip":
            state.step = step
            state.skipped = state.skipped + 1
            self.events.append(f"step {step} is skipped: {problem}")
            return outputs
        outputs = repeat()
        ranks = self._ranks_where(self._marks(state, outputs) != first)
        again = self._problem(outputs, earlier)
        if ranks:
            shown = ", ".join(map(str, ranks[:8])) + (", .." if len(ranks) > 8 else "")
            result = (
                f"{problem} in step {step}, which came out otherwise when it was repeated, on "
                f"ranks {shown}: that was the hardware, or an op that is not deterministic"
            )
        else:
            result = (
                f"{problem} in step {step}, which came out the same, bit for bit, when it was "
                "repeated: it is the data or the model, and not the hardware"
            )
        finite = all(torch.isfinite(torch.as_tensor(outputs[k])) for k in earlier if k in outputs)
        if again and not (finite and not ranks):
            raise TrainingError(f"{result}. It is still so: {again}.")
        self.events.append(result)
        return outputs

    def _marks(self, state: RankState, outputs: Outputs) -> list[int]:
        """Sums of words of all that a step leaves on this rank."""
        values = [*state.parameters.values(), *state.moments.values(), *state.buffers.values()]
        values += [torch.as_tensor(outputs[k]) for k in ("loss", "grad_norm") if k in outputs]
        return [int(word_sum(value)) for value in values]

    def _ranks_where(self, here: bool) -> list[int]:
        flags = torch.zeros(self._job.mesh.size, dtype=torch.int64)
        flags[self._job.rank] = int(here)
        found: list[int] = self._all_reduce(flags, "sum").nonzero().flatten().tolist()
        return found

    def before_save(self, state: RankState) -> None:
        """The state is about to be saved: what is saved is what all copies say."""
        if state.step != self._equal_at:
            different = self._compare(state)
            if different:
                raise self._stop(state, different)

    def is_sound(self, state: RankState) -> bool:
        """Whether all copies of the state agree now."""
        return state.step == self._equal_at or not self._compare(state)

    def _compare(self, state: RankState) -> list[Difference]:
        """Where copies of the state differ."""
        different = self._replicas.differences(state, self._all_reduce)
        if not different:
            self._equal_at = state.step
        return different

    def _stop(self, state: RankState, different: Sequence[Difference]) -> Exception:
        """The error of this rank, where copies differ and the run cannot go on with them."""
        guilty = {rank for each in different for rank in each.ranks}
        finding = _told(state, different)
        if self._job.generation is not None and self._job.rank not in guilty:
            # its process is sound: under an agent it goes on when the others were replaced
            return LostRankError(finding)
        before = self._equal_at
        since = "when the run began, or went on" if before is None else f"at step {before}"
        return TrainingError(
            f"{finding}. They should be equal to the last bit, and were {since}.\nCheck the "
            "machine with `msc doctor`, leave it out, and go on from an older checkpoint."
        )

    def _all_reduce(self, value: Tensor, op: str) -> Tensor:
        if self._job.mesh.size == 1:
            return value
        moved = value.to(self._job.device)
        dist.all_reduce(moved, _OPS[op])
        return moved.cpu()


def _told(state: RankState, different: Sequence[Difference]) -> str:
    return f"After step {state.step} copies of the state differ: {'; '.join(map(str, different))}"
