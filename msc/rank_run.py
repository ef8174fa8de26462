"""One rank's part in a training run: it joins the job, and meets the others again after a loss."""

from __future__ import annotations

import errno
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import cast

from torch import fx

from msc.batches import Batches, Data
from msc.checkpoint.options import Checkpoint
from msc.checkpoint.run import History, RunCheckpoints
from msc.guard import Guard, RunGuard
from msc.ir.errors import CommunicationError, InputError
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
from msc.runtime.state import RankState


class RankRun:
    """What a `msc.Trainer` has: the arguments are its own.

    job: this rank among the others; graph, executor: its program; state: its parameters and
    moments; batches: its rows; history: what is told of all steps so far. recovery, guard,
    checkpoints, recorder: None where the run has none.
    """

    def __init__(
        self,
        program: Program,
        data: Data,
        seed: int,
        log: Log,
        device: str | None,
        timeout_s: float,
        checkpoint: Checkpoint | None,
        run: str | Path | None,
        guard: Guard | None,
    ) -> None:
        self.program = program
        self.history = History()
        self.log = log
        self.guard: RunGuard | None = None
        self.checkpoints: RunCheckpoints | None = None
        self.recorder: Recorder | None = None
        self._evaluation: tuple[fx.GraphModule, ProcessExecutor] | None = None
        self._seed = seed
        self.recovery = Recovery.of_process()
        if self.recovery is not None and run is None:
            run = self.recovery.link.folder
        number = 1
        if self.recovery is not None:
            number = self.recovery.trainer
            self.recovery.introduce(program, checkpoint is not None)
        timeout = timedelta(seconds=timeout_s)
        self._join = functools.partial(join, program.mesh, device, timeout, number)
        try:
            with self.outside():
                self.job = self._join()
                self._start(data, checkpoint, run, guard)
                self._begin()
        except BaseException as error:
            if self.recovery is not None:
                self.recovery.failed(None, error)
            if hasattr(self, "job"):
                self.leave(finish=False)
            raise

    # -- joining

    def _start(
        self,
        data: Data,
        checkpoint: Checkpoint | None,
        run: str | Path | None,
        guard: Guard | None,
    ) -> None:
        job, program = self.job, self.program
        self._facts = {
            "program": program.fingerprint,
            "seed": str(self._seed),
            "set of initial parameters": program.values_digest,
            "checkpoint": str(checkpoint),
            "guard": str(guard),
        }
        job.agree(self._facts)
        link = None if self.recovery is None else self.recovery.link
        self.graph = program.rank_graph(job.rank)
        self.batches = Batches(program, job.rank, data, job.device)
        if guard is not None:
            if guard.policy == "rewind":
                check_rewind(guard.every, checkpoint, self.batches)
            self.guard = RunGuard(guard, program, job, self.batches.position)
        before_update = None
        if checkpoint is not None:
            self.checkpoints = RunCheckpoints(
                checkpoint, program, job, self._seed, self.batches, link
            )
            before_update = self.checkpoints.before_update
        rank_of = None
        if run is not None:
            self.recorder = self._open_recorder(Path(run))
        if self.recorder is not None:
            weakref.finalize(self, self.recorder.end_unless_cut_off)  # scripts need not close
            rank_of = functools.partial(RecordingRank, recorder=self.recorder)
            if before_update is not None:
                before_update = self.recorder.saving(before_update)
            if link is not None:
                assert run is not None
                ring, schedule = ring_files(Path(run), job.rank)
                link.tell("ring", ring=str(ring), schedule=str(schedule))
        self.executor = self._new_executor(self.graph, before_update, rank_of)
        self.state = self._initial_state()
        if self.recovery is not None:
            self.recovery.begin(job, self.executor.abort)

    def _open_recorder(self, run: Path) -> Recorder | None:
        """What this rank notes of itself; None, which is told, if the disk has no room for it."""
        try:
            return open_recorder(run, self.program, self.job.rank)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            line = f"{self.job}: nothing is noted for msc blame and msc report: {error}"
            print(line, file=sys.stderr, flush=True)
            return None

    def _begin(self) -> None:
        """Go to the state that the run goes on from; this rank has its groups."""
        grouped = time.monotonic()
        self.phase("load")
        source = None if self.job.generation is None else self.job.generation.source
        if source is not None and self.checkpoints is not None and self.recovery is not None:
            self.checkpoints.restore(self.state, source)
            self.history.become(self.recovery.history(source.step))
        else:
            found = None
            if self.checkpoints is not None:
                with self.in_step(0, "resuming from a checkpoint"):
                    found = self.checkpoints.resume(self.state)
            self.history.become(found or History())
        if self.checkpoints is not None:
            self.checkpoints.start()
            self.show_messages()
        self.phase("idle")
        if self.recovery is not None:
            self.recovery.began(self.job, self.history, grouped)

    def meet_again(self) -> None:
        """After another rank was lost: meet who is there now, and go back to what all have."""
        if self.checkpoints is not None:
            self.checkpoints.settle()
        self.phase("lost")
        self.job.close()
        self.job = self._join()
        self.job.agree(self._facts)
        if self.guard is not None:
            self.guard.meet(self.job)
        if self.recorder is not None:
            self.recorder.ring.begin()
        self.executor.join()
        self._evaluation = None
        self.batches.rewind()
        if self.checkpoints is not None:
            self.checkpoints.meet(self.job)
        if self.job.generation is None or self.job.generation.source is None:
            self.state = self._initial_state()
        self._begin()

    def _initial_state(self) -> RankState:
        state = self.program.initial_state(self.job.rank, self._seed)
        for values in (state.parameters, state.buffers):
            values.update({name: value.to(self.job.device) for name, value in values.items()})
        return state

    # -- running

    def _new_executor(
        self,
        graph: fx.GraphModule,
        before_update: Callable[[], None] | None = None,
        rank_of: Callable[..., RecordingRank] | None = None,
    ) -> ProcessExecutor:
        backend = cast(Backend, self.program.backend)
        timeout = self.job.timeout
        mesh = self.program.mesh
        return ProcessExecutor(
            mesh, graph, backend, timeout, before_update, rank_of, self.program.measured
        )

    def evaluator(self) -> tuple[fx.GraphModule, ProcessExecutor]:
        """The forward part of this rank's graph, and what runs it; collective the first time."""
        if self._evaluation is None:
            graph = forward_only(self.graph)
            self._evaluation = graph, self._new_executor(graph)
        return self._evaluation

    def phase(self, name: str, step: int | None = None) -> None:
        """Note what this rank does from here on."""
        if self.recorder is not None:
            self.recorder.phase(name, step)

    def before_save(self, state: RankState) -> None:
        """The state is about to be saved: the guard has its say, where there is one."""
        if self.guard is not None:
            self.guard.before_save(state)

    @contextmanager
    def in_step(self, step: int, what: str = "") -> Iterator[None]:
        """Errors inside are told to the other ranks, and name the step."""
        try:
            yield
        except Exception as error:
            if self.recovery is not None and is_lost_peer(error):
                raise  # whoever hears of it meets the others again, or waits to be replaced
            self.phase("lost" if is_lost_peer(error) else "failed")
            self.job.report(step, error)
            if is_lost_peer(error):
                raise self.job.explain(step, error) from error
            place = f"{self.job}, step {step}" + (f", {what}" if what else "")
            if isinstance(error, InputError):
                raise InputError(f"{place}: {error}") from error
            error.add_note(place)
            raise

    def outside(self, method: str = "") -> AbstractContextManager[None]:
        """Around what is collective and outside of `fit`."""
        if self.recovery is None:
            return nullcontext()
        if method:
            self.recovery.check_first(self.job, method)
        return self.recovery.outside()

    def show_messages(self, progress: TrainingProgress | None = None) -> None:
        """Show what happened to this rank's saves: on rank 0, beside `progress` if there is any."""
        assert self.checkpoints is not None
        while not self.checkpoints.messages.empty():
            line = f"{self.job}: {self.checkpoints.messages.get()}"
            if progress is not None and self.job.rank == 0:
                progress.note(line)
            else:
                show(self.log, line)  # a rank that shows no progress tells what is wrong with it

    # -- leaving

    def leave(self, finish: bool) -> None:
        """Leave the job; wait for the saves that are being written if `finish`."""
        if self.checkpoints is not None and self.job.open:
            self.checkpoints.close(finish)
            self.show_messages()
        if finish:
            self.phase("ended")
        self.job.close()

    def check_open(self) -> None:
        """Raise `CommunicationError` after `leave`."""
        if not self.job.open:
            raise CommunicationError("This Trainer was closed: its process has left the job.")
