"""`msc.Trainer`: run a program's steps on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msc.batches import Batches, Data, samples_and_tokens
from msc.checkpoint.options import Checkpoint
from msc.gathering import gather_buffers, gather_whole
from msc.guard import Guard
from msc.ir.errors import InputError, PlanError
from msc.program import Program
from msc.progress import Log, TrainingProgress
from msc.rank_run import RankRun
from msc.stepper import Stepper


class Trainer:
    """One rank of a training run: every process of the job makes one, with equal arguments.

    With `checkpoint` the run is saved as it goes, and a Trainer that finds saved steps goes on from
    the newest that is complete and intact: `fit` then ends at the same weights, bit for bit, as a
    run that was never interrupted (same mesh and backend), or on any other mesh within rounding.

    Under torchrun it initializes torch.distributed if nobody has; a program for one rank runs in
    this process without a launcher. Making a Trainer and all of its methods except `close` are
    collective. `with Trainer(...) as trainer` leaves the job at the end; otherwise the end of the
    process does.

    Under `msc run`, `fit` goes on after another rank was lost: when a new process has taken that
    rank, all go back to the newest step that they all have.

    losses: the loss of every step so far, of the whole global batch, equal on all ranks.
    grad_norms: the global norm of each step's gradients before clipping; empty unless the optimizer
        clips (`max_norm`) or skips steps (`skip_nonfinite`).
    learning_rates: of every step so far, of parameters that are in no group with one of its own.
    """

    def __init__(
        self,
        program: Program,
        data: Data,
        *,
        seed: int = 0,
        log: Log = True,
        device: str | None = None,
        timeout_s: float = 600.0,
        checkpoint: Checkpoint | None = None,
        run: str | Path | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Join the job and make this rank's state.

        Args:
            program: what `msc.compile` or `msc.load` gave; the same on every rank.
            data: an iterable of global batches, or an object with `rows(step, indices)` and
                `state_dict()`, of which each rank asks its own rows only.
            seed: keys all random numbers of training.
            log: what rank 0 shows (see `TrainingProgress`); every rank tells it of its saves.
            device: "cpu" or "cuda"; None takes CUDA where there is one.
            timeout_s: how long a rank waits for another before it gives up.
            checkpoint: where to save, and to resume from; `step` says where the run stands.
            guard: what to do about values that cannot be right, and copies that differ.
            run: a folder in which ranks note what they do, for `msc blame` and `msc report`.

        Raises:
            UserError: there are checkpoints, but none is intact, or they are of another model,
                seed or data.
            PlanError: the number of processes is not the size of the mesh.
            CommunicationError: ranks have different programs, seeds or initial parameters.
        """
        if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise InputError(f"timeout_s is {timeout_s!r}; it is a positive number of seconds.")
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise InputError(
                f"checkpoint is {checkpoint!r}; it is an msc.Checkpoint(folder, every=..)."
            )
        if guard is not None and not isinstance(guard, Guard):
            raise InputError(f"guard is {guard!r}; it is an msc.Guard(every=.., policy=..).")
        self.program = program
        self._run = RankRun(program, data, seed, log, device, timeout_s, checkpoint, run, guard)

    @property
    def rank(self) -> int:
        """This process's rank in the mesh."""
        return self._run.job.rank

    @property
    def step(self) -> int:
        """The number of steps taken, skipped ones too."""
        return self._run.state.step

    @property
    def skipped_steps(self) -> int:
        """How many of them changed no parameter, since their gradients were not finite."""
        return int(self._run.state.skipped)

    @property
    def losses(self) -> list[float]:
        """The loss of every step so far."""
        return self._run.history.losses

    @property
    def grad_norms(self) -> list[float]:
        """The norm of every step's gradients; see the class."""
        return self._run.history.grad_norms

    @property
    def learning_rates(self) -> list[float]:
        """The rate of every step so far."""
        return self._run.history.learning_rates

    @property
    def events(self) -> list[str]:
        """What the guard has found, and what was done about it."""
        return [] if self._run.guard is None else self._run.guard.events

    # -- running

    def fit(self, steps: int) -> None:
        """Take `steps` more steps, and add their losses to `losses` (and norms to `grad_norms`).

        Raises `InputError` if the data ends before, or a batch is not what was compiled for;
        `CommunicationError`, which names this rank, the step and the ranks that are silent, if
        another rank does not answer.
        """
        self._run.check_open()
        _check_steps(steps)
        optimizer = self.program.optimizer
        if optimizer is None:
            raise PlanError(
                "This program has no optimizer, so training would change nothing. Compile with "
                "optimizer=msc.AdamW(...)."
            )
        run, recovery = self._run, self._run.recovery
        samples, tokens = samples_and_tokens(self.program)
        work, unit = (samples, "samples") if tokens is None else (tokens, "tokens")
        log = run.log if self.rank == 0 else False
        last = self.step + steps
        if recovery is not None:
            last = recovery.enter(run.job, last, run.batches.can_rewind)
        with TrainingProgress(log, self.step, last - self.step, work, unit) as progress:
            stepper = Stepper(run, last, optimizer, progress)
            while self.step < last:
                if recovery is None:
                    stepper.take()
                elif not recovery.attempt(self.step + 1, stepper.take):
                    while not recovery.attempt(None, run.meet_again):
                        pass
        if recovery is not None:
            recovery.leave(run.job, self.step)

    def evaluate(self, data: Data, steps: int | None = None) -> float:
        """The mean loss of the batches in `data`, at most `steps` of them.

        Runs forward passes only, without dropout: parameters, moments and the step count stay as
        they are. An object with `rows` has no end, so it needs `steps`.
        """
        self._run.check_open()
        if steps is not None:
            _check_steps(steps)
        batches = Batches(self.program, self.rank, data, self._run.job.device)
        if steps is None and batches.endless:
            raise InputError("Data with rows(step, indices) has no end: say how many steps.")
        losses: list[float] = []
        with self._run.outside("evaluate"):
            while steps is None or len(losses) < steps:
                with self._run.in_step(self.step, "evaluation batch " + str(len(losses) + 1)):
                    inputs = batches.next(len(losses))
                    if inputs is None:
                        break
                    graph, executor = self._run.evaluator()
                    found = executor.run(self._run.state.arguments(graph, inputs))
                    losses.append(float(found["loss"]))
        if not losses:
            raise InputError("The data to evaluate on has no batch.")
        return sum(losses) / len(losses)

    # -- state

    def state_dict(self) -> dict[str, Tensor]:
        """The trained parameters, whole, and the written buffers under the plain module's names.

        For its `load_state_dict`. Gathered to every rank, on the CPU.
        """
        self._run.check_open()
        with self._run.outside("state_dict"):
            found = gather_whole(
                self.program, self._run.state.parameters, self.rank, self._run.job.device
            )
            found |= gather_buffers(
                self.program, self._run.state.buffers, self.rank, self._run.job.device
            )
        for name, layout in self.program.parameters.items():
            if not layout.stages:  # no stage reads it
                found[name] = self.program.read_parameter(name).clone()
        return self.program.state_dict(found)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """`{"step": .., "first_moment": {"h.0.weight": ..}, ..}`: the optimizer's states, whole.

        Which there are depends on the optimizer (`state_names`), and on a parameter's group; "step"
        counts steps that were not skipped. Gathered to every rank, on the CPU. A state that no step
        has changed yet is zero.
        """
        self._run.check_open()
        result: dict[str, Any] = {"step": self.step - self.skipped_steps}
        for state, names in self.program.optimizer_states().items():
            shards = {
                name: self._run.state.moments.get(f"{state}.{name}", torch.zeros_like(value))
                for name, value in self._run.state.parameters.items()
            }
            with self._run.outside("optimizer_state_dict"):
                result[state] = gather_whole(
                    self.program, shards, self.rank, self._run.job.device, names
                )
        return result

    def save(self) -> None:
        """Save the state of this step now, and wait until it is durable; on rank 0, complete.

        Collective. Raises `InputError` without a `checkpoint` to say where. A save that fails is
        told on stderr, or to `log`.
        """
        self._run.check_open()
        if self._run.checkpoints is None:
            raise InputError("This Trainer was made without checkpoint=msc.Checkpoint(folder).")
        with self._run.outside("save"):
            self._run.before_save(self._run.state)
            self._run.checkpoints.save(self._run.state, self._run.history, wait=True)
            self._run.checkpoints.flush()
        self._run.show_messages()

    # -- leaving

    def close(self) -> None:
        """Leave the job. The last Trainer of a process destroys the process group it has made.

        Waits for the saves that are being written.
        """
        self._run.leave(finish=True)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._run.leave(finish=kind is None)


def _check_steps(steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise InputError(f"steps is {steps!r}; it is a whole number of at least 0.")
