"""The steps of a training run: each its batch, the program, the guard, and what is noted of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from msc.ir.optimizer import Optimizer
from msc.progress import TrainingProgress
from msc.rank_run import RankRun
from msc.recovery import Recovery
from msc.runtime.recovery.journal import Entry


class Stepper:
    """Takes the steps of one `fit`, which ends with step `last`; collective."""

    def __init__(
        self, run: RankRun, last: int, optimizer: Optimizer, progress: TrainingProgress
    ) -> None:
        self._run = run
        self._last = last
        self._optimizer = optimizer
        self._progress = progress

    def take(self) -> None:
        """Take the next step, or go back to an earlier one if the guard says so."""
        run, progress = self._run, self._progress
        before = int(run.state.skipped)
        with run.in_step(run.state.step + 1):
            run.phase("step", run.state.step + 1)
            inputs = run.batches.while_gathering(self._load)
            outputs = self._guarded(inputs)
            loss = 0.0 if outputs is None else float(outputs["loss"])
        for event in () if run.guard is None else run.guard.news():
            progress.note(event)
        if outputs is None:
            self._go_back()
            return
        step, history = run.state.step, run.history
        history.losses.append(loss)
        norm = float(outputs["grad_norm"]) if "grad_norm" in outputs else None
        if norm is not None:
            history.grad_norms.append(norm)
        rate = float(outputs.get("learning_rate", self._optimizer.lr))
        history.learning_rates.append(rate)
        if run.recovery is not None:
            run.recovery.record(run.job, step, Entry(loss, norm, rate))
        progress.step(step, loss)
        skipped = int(run.state.skipped)
        if skipped > before and history.grad_norms:
            progress.skipped(step, history.grad_norms[-1], skipped)
        if run.recorder is not None:
            run.recorder.step_done()
        if run.checkpoints is not None:
            run.phase("save")
            run.checkpoints.after_step(run.state, history, run.before_save)
            run.show_messages(progress)
            run.phase("idle")
        if run.recovery is not None and run.recovery.gives_way(run.job, step):
            self._give_way(run.recovery)

    def _load(self) -> dict[str, Tensor]:
        """The inputs of the next step."""
        self._run.phase("data")
        inputs = self._run.batches.need(self._run.state.step, self._last)
        self._run.phase("step")
        return inputs

    def _guarded(self, inputs: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Change the state, and do what the guard says; None if the run has gone back."""
        run = self._run
        if run.guard is None:
            return self._change(inputs)

        def again() -> Mapping[str, Any]:
            run.phase("step", run.state.step + 1)
            return self._change(inputs)

        run.guard.before_step(run.state)
        earlier = {"loss": run.history.losses, "grad_norm": run.history.grad_norms}
        return run.guard.after_step(run.state, self._change(inputs), earlier, again)

    def _change(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        run = self._run
        outputs: Mapping[str, Any] = run.executor.run(run.state.arguments(run.graph, inputs))
        run.state.advance(run.graph, outputs)
        return outputs

    def _go_back(self) -> None:
        """The guard has brought back the state of an earlier step: all else goes there too."""
        run = self._run
        assert run.guard is not None
        rewind = run.guard.rewind
        assert rewind is not None
        run.history.cut(rewind.step)
        run.batches.rewind()
        run.batches.seek(rewind.step, rewind.data)
        if run.recovery is not None:
            run.recovery.went_back(run.job, rewind.step)

    def _give_way(self, recovery: Recovery) -> None:
        """More ranks can go on from this step: save it, and leave it to them."""
        run = self._run
        assert run.checkpoints is not None  # else nobody asks
        run.phase("save")
        sound = run.guard is None or run.guard.is_sound(run.state)
        complete = sound and run.checkpoints.save_whole(run.state, run.history)
        run.phase("idle")
        if complete:
            run.phase("lost")
        recovery.give_way(run.job, run.state.step, complete)
