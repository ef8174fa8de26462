"""`msc.Trainer`: run a program's steps on real ranks."""

from __future__ import annotations

import errno
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, fx

from msc.batches import Batches, Data, samples_and_tokens
from msc.checkpoint.options import Checkpoint
from msc.checkpoint.run import History, RunCheckpoints
from msc.gathering import gather_buffers, gather_whole
from msc.guard import Guard, RunGuard
from msc.ir.errors import CommunicationError, InputError, PlanError
from msc.ir.optimizer import Optimizer
from msc.passes.forward_only import forward_only
from msc.program import Program
from msc.progress import Log, TrainingProgress, show
from msc.ranks import is_lost_peer, join
from msc.recovery import Recovery
from msc.rewind import check_rewind
from msc.run_folder import open_recorder, ring_files
from msc.runtime.diagnosis.recorder import Recorder
from msc.runtime.diagnosis.recording import RecordingRank
from msc.runtime.process import Backend, ProcessExecutor
from msc.runtime.recovery.journal import Entry
from msc.runtime.state import RankState


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
        self._history = History()
        self._log = log
        self._checkpoints: RunCheckpoints | None = None
        self._recorder: Recorder | None = None
        self._evaluation: tuple[fx.GraphModule, ProcessExecutor] | None = None
        self._seed = seed
        self._recovery = Recovery.of_process()
        if self._recovery is not None and run is None:
            run = self._recovery.link.folder
        timeout = timedelta(seconds=timeout_s)
        number = 1
        if self._recovery is not None:
            number = self._recovery.trainer
            self._recovery.introduce(program, checkpoint is not None)
        self._join = functools.partial(join, program.mesh, device, timeout, number)
        try:
            with self._outside():
                self._job = self._join()
                self._start(data, seed, checkpoint, run, guard)
                self._begin()
        except BaseException as error:
            if self._recovery is not None:
                self._recovery.failed(None, error)
            if hasattr(self, "_job"):
                self._leave(finish=False)
            raise

    def _start(
        self,
        data: Data,
        seed: int,
        checkpoint: Checkpoint | None,
        run: str | Path | None,
        guard: Guard | None,
    ) -> None:
        job, program = self._job, self.program
        self._facts = {
            "program": program.fingerprint,
            "seed": str(seed),
            "set of initial parameters": program.values_digest,
            "checkpoint": str(checkpoint),
            "guard": str(guard),
        }
        job.agree(self._facts)
        link = None if self._recovery is None else self._recovery.link
        self._graph = program.rank_graph(job.rank)
        self._batches = Batches(program, job.rank, data, job.device)
        self._guard = None
        if guard is not None:
            if guard.policy == "rewind":
                check_rewind(guard.every, checkpoint, self._batches)
            self._guard = RunGuard(guard, program, job, self._batches.position)
        if checkpoint is not None:
            self._checkpoints = RunCheckpoints(checkpoint, program, job, seed, self._batches, link)
        before_update = self._checkpoints.before_update if self._checkpoints is not None else None
        rank_of = None
        if run is not None:
            self._recorder = self._open_recorder(Path(run))
        if self._recorder is not None:
            rank_of = functools.partial(RecordingRank, recorder=self._recorder)
            if before_update is not None:
                before_update = self._recorder.saving(before_update)
            if link is not None:
                assert run is not None
                ring, schedule = ring_files(Path(run), job.rank)
                link.tell("ring", ring=str(ring), schedule=str(schedule))
        self._executor = self._new_executor(self._graph, before_update, rank_of)
        self._state = self._initial_state()
        if self._recovery is not None:
            self._recovery.begin(job, self._executor.abort)

    def _open_recorder(self, run: Path) -> Recorder | None:
        """What this rank notes of itself; None, which is told, if the disk has no room for it."""
        try:
            return open_recorder(run, self.program, self.rank)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            line = f"{self._job}: nothing is noted for msc blame and msc report: {error}"
            print(line, file=sys.stderr, flush=True)
            return None

    def _begin(self) -> None:
        """Go to the state that the run goes on from; this rank has its groups."""
        grouped = time.monotonic()
        self._phase("load")
        source = None if self._job.generation is None else self._job.generation.source
        if source is not None and self._checkpoints is not None and self._recovery is not None:
            self._checkpoints.restore(self._state, source)
            self._history.become(self._recovery.history(source.step))
        else:
            found = None
            if self._checkpoints is not None:
                with self._in_step(0, "resuming from a checkpoint"):
                    found = self._checkpoints.resume(self._state)
            self._history.become(found or History())
        if self._checkpoints is not None:
            self._checkpoints.start()
            self._show_messages()
        self._phase("idle")
        if self._recovery is not None:
            self._recovery.began(self._job, self._history, grouped)

    def _initial_state(self) -> RankState:
        state = self.program.initial_state(self.rank, self._seed)
        for values in (state.parameters, state.buffers):
            values.update({name: value.to(self._job.device) for name, value in values.items()})
        return state

    def _new_executor(
        self,
        graph: fx.GraphModule,
        before_update: Callable[[], None] | None = None,
        rank_of: Callable[..., RecordingRank] | None = None,
    ) -> ProcessExecutor:
        backend = cast(Backend, self.program.backend)
        timeout = self._job.timeout
        mesh = self.program.mesh
        return ProcessExecutor(mesh, graph, backend, timeout, before_update, rank_of)

    def _phase(self, name: str, step: int | None = None) -> None:
        if self._recorder is not None:
            self._recorder.phase(name, step)

    @property
    def rank(self) -> int:
        """This process's rank in the mesh."""
        return self._job.rank

    @property
    def step(self) -> int:
        """The number of steps taken, skipped ones too."""
        return self._state.step

    @property
    def skipped_steps(self) -> int:
        """How many of them changed no parameter, since their gradients were not finite."""
        return int(self._state.skipped)

    @property
    def losses(self) -> list[float]:
        """The loss of every step so far."""
        return self._history.losses

    @property
    def grad_norms(self) -> list[float]:
        """The norm of every step's gradients; see the class."""
        return self._history.grad_norms

    @property
    def learning_rates(self) -> list[float]:
        """The rate of every step so far."""
        return self._history.learning_rates

    @property
    def events(self) -> list[str]:
        """What the guard has found, and what was done about it."""
        return [] if self._guard is None else self._guard.events

    # -- running

    def fit(self, steps: int) -> None:
        """Take `steps` more steps, and add their losses to `losses` (and norms to `grad_norms`).

        Raises `InputError` if the data ends before, or a batch is not what was compiled for;
        `CommunicationError`, which names this rank, the step and the ranks that are silent, if
        another rank does not answer.
        """
        self._check_open()
        _check_steps(steps)
        optimizer = self.program.optimizer
        if optimizer is None:
            raise PlanError(
                "This program has no optimizer, so training would change nothing. Compile with "
                "optimizer=msc.AdamW(...)."
            )
        samples, tokens = samples_and_tokens(self.program)
        work, unit = (samples, "samples") if tokens is None else (tokens, "tokens")
        log = self._log if self.rank == 0 else False
        last = self.step + steps
        recovery = self._recovery
        if recovery is not None:
            last = recovery.enter(self._job, last, self._batches.can_rewind)
        with TrainingProgress(log, self.step, last - self.step, work, unit) as progress:
            while self.step < last:
                if recovery is None:
                    self._take_step(last, optimizer, progress)
                elif not recovery.attempt(
                    self.step + 1, lambda: self._take_step(last, optimizer, progress)
                ):
                    while not recovery.attempt(None, self._meet_again):
                        pass
        if recovery is not None:
            recovery.leave(self._job, self.step)

    def _take_step(self, last: int, optimizer: Optimizer, progress: TrainingProgress) -> None:
        with self._in_step(self.step + 1):
            self._phase("step", self.step + 1)
            inputs = self._batches.while_gathering(lambda: self._load(last))
            before = self.skipped_steps
            outputs = self._guarded(inputs)
            loss = 0.0 if outputs is None else float(outputs["loss"])
        for event in () if self._guard is None else self._guard.news():
            progress.note(event)
        if outputs is None:
            self._go_back()
            return
        self.losses.append(loss)
        norm = float(outputs["grad_norm"]) if "grad_norm" in outputs else None
        if norm is not None:
            self.grad_norms.append(norm)
        rate = float(outputs.get("learning_rate", optimizer.lr))
        self.learning_rates.append(rate)
        if self._recovery is not None:
            self._recovery.record(self._job, self.step, Entry(loss, norm, rate))
        progress.step(self.step, loss)
        if self.skipped_steps > before and self.grad_norms:
            progress.skipped(self.step, self.grad_norms[-1], self.skipped_steps)
        if self._recorder is not None:
            self._recorder.step_done()
        if self._checkpoints is not None:
            self._phase("save")
            self._checkpoints.after_step(self._state, self._history, self._before_save)
            self._show_messages(progress)
            self._phase("idle")
        if self._recovery is not None and self._recovery.gives_way(self._job, self.step):
            self._give_way(self._recovery)

    def _give_way(self, recovery: Recovery) -> None:
        """More ranks can go on from this step: save it, and leave it to them."""
        assert self._checkpoints is not None  # else nobody asks
        self._phase("save")
        sound = self._guard is None or self._guard.is_sound(self._state)
        complete = sound and self._checkpoints.save_whole(self._state, self._history)
        self._phase("idle")
        if complete:
            self._phase("lost")
        recovery.give_way(self._job, self.step, complete)

    def _meet_again(self) -> None:
        """After another rank was lost: meet who is there now, and go back to what all have."""
        if self._checkpoints is not None:
            self._checkpoints.settle()
        self._phase("lost")
        self._job.close()
        self._job = self._join()
        self._job.agree(self._facts)
        if self._guard is not None:
            self._guard.meet(self._job)
        if self._recorder is not None:
            self._recorder.ring.begin()
        self._executor.join()
        self._evaluation = None
        self._batches.rewind()
        if self._checkpoints is not None:
            self._checkpoints.meet(self._job)
        if self._job.generation is None or self._job.generation.source is None:
            self._state = self._initial_state()
        self._begin()

    def _go_back(self) -> None:
        """The guard has brought back the state of an earlier step: all else goes there too."""
        assert self._guard is not None
        rewind = self._guard.rewind
        assert rewind is not None
        self._history.cut(rewind.step)
        self._batches.rewind()
        self._batches.seek(rewind.step, rewind.data)
        if self._recovery is not None:
            self._recovery.went_back(self._job, rewind.step)

    def _guarded(self, inputs: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Take one step, and do what the guard says; None if the run has gone back."""
        if self._guard is None:
            return self._run(inputs)

        def again() -> Mapping[str, Any]:
            self._phase("step", self.step + 1)
            return self._run(inputs)

        self._guard.before_step(self._state)
        earlier = {"loss": self.losses, "grad_norm": self.grad_norms}
        return self._guard.after_step(self._state, self._run(inputs), earlier, again)

    def _before_save(self, state: RankState) -> None:
        if self._guard is not None:
            self._guard.before_save(state)

    def _run(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs: Mapping[str, Any] = self._executor.run(self._state.arguments(self._graph, inputs))
        self._state.advance(self._graph, outputs)
        return outputs

    def _load(self, last: int) -> dict[str, Tensor]:
        """The inputs of the next step."""
        self._phase("data")
        inputs = self._batches.need(self.step, last)
        self._phase("step")
        return inputs

    def evaluate(self, data: Data, steps: int | None = None) -> float:
        """The mean loss of the batches in `data`, at most `steps` of them.

        Runs forward passes only, without dropout: parameters, moments and the step count stay as
        they are. An object with `rows` has no end, so it needs `steps`.
        """
        self._check_open()
        if steps is not None:
            _check_steps(steps)
        batches = Batches(self.program, self.rank, data, self._job.device)
        if steps is None and batches.endless:
            raise InputError("Data with rows(step, indices) has no end: say how many steps.")
        losses: list[float] = []
        with self._outside("evaluate"):
            while steps is None or len(losses) < steps:
                with self._in_step(self.step, "evaluation batch " + str(len(losses) + 1)):
                    inputs = batches.next(len(losses))
                    if inputs is None:
                        break
                    graph, executor = self._evaluator()
                    found = executor.run(self._state.arguments(graph, inputs))
                    losses.append(float(found["loss"]))
        if not losses:
            raise InputError("The data to evaluate on has no batch.")
        return sum(losses) / len(losses)

    def _evaluator(self) -> tuple[fx.GraphModule, ProcessExecutor]:
        if self._evaluation is None:
            graph = forward_only(self._graph)
            self._evaluation = graph, self._new_executor(graph)
        return self._evaluation

    @contextmanager
    def _in_step(self, step: int, what: str = "") -> Iterator[None]:
        """Errors inside are told to the other ranks, and name the step."""
        try:
            yield
        except Exception as error:
            if self._recovery is not None and is_lost_peer(error):
                raise  # whoever hears of it meets the others again, or waits to be replaced
            self._phase("lost" if is_lost_peer(error) else "failed")
            self._job.report(step, error)
            if is_lost_peer(error):
                raise self._job.explain(step, error) from error
            place = f"{self._job}, step {step}" + (f", {what}" if what else "")
            if isinstance(error, InputError):
                raise InputError(f"{place}: {error}") from error
            error.add_note(place)
            raise

    def _outside(self, method: str = "") -> AbstractContextManager[None]:
        """Around what is collective and outside of `fit`."""
        if self._recovery is None:
            return nullcontext()
        if method:
            self._recovery.check_first(self._job, method)
        return self._recovery.outside()

    # -- state

    def state_dict(self) -> dict[str, Tensor]:
        """The trained parameters, whole, and the written buffers under the plain module's names.

        For its `load_state_dict`. Gathered to every rank, on the CPU.
        """
        self._check_open()
        with self._outside("state_dict"):
            found = gather_whole(self.program, self._state.parameters, self.rank, self._job.device)
            found |= gather_buffers(self.program, self._state.buffers, self.rank, self._job.device)
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
        self._check_open()
        result: dict[str, Any] = {"step": self.step - self.skipped_steps}
        for state, names in self.program.optimizer_states().items():
            shards = {
                name: self._state.moments.get(f"{state}.{name}", torch.zeros_like(value))
                for name, value in self._state.parameters.items()
            }
            with self._outside("optimizer_state_dict"):
                result[state] = gather_whole(
                    self.program, shards, self.rank, self._job.device, names
                )
        return result

    def save(self) -> None:
        """Save the state of this step now, and wait until it is durable; on rank 0, complete.

        Collective. Raises `InputError` without a `checkpoint` to say where. A save that fails is
        told on stderr, or to `log`.
        """
        self._check_open()
        if self._checkpoints is None:
            raise InputError("This Trainer was made without checkpoint=msc.Checkpoint(folder).")
        with self._outside("save"):
            self._before_save(self._state)
            self._checkpoints.save(self._state, self._history, wait=True)
            self._checkpoints.flush()
        self._show_messages()

    def _show_messages(self, progress: TrainingProgress | None = None) -> None:
        """Show what happened to this rank's saves: on rank 0, beside `progress` if there is any."""
        assert self._checkpoints is not None
        while not self._checkpoints.messages.empty():
            line = f"{self._job}: {self._checkpoints.messages.get()}"
            if progress is not None and self.rank == 0:
                progress.note(line)
            else:
                show(self._log, line)  # a rank that shows no progress tells what is wrong with it

    # -- leaving

    def close(self) -> None:
        """Leave the job. The last Trainer of a process destroys the process group it has made.

        Waits for the saves that are being written.
        """
        self._leave(finish=True)

    def _leave(self, finish: bool) -> None:
        if self._checkpoints is not None and self._job.open:
            self._checkpoints.close(finish)
            self._show_messages()
        if finish:
            self._phase("ended")
        self._job.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(finish=error is None)

    def _check_open(self) -> None:
        if not self._job.open:
            raise CommunicationError("This Trainer was closed: its process has left the job.")


def _check_steps(steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise InputError(f"steps is {steps!r}; it is a whole number of at least 0.")
