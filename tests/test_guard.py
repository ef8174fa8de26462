"""`msc.Guard`: what a run does about a step whose values cannot be right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import msc
from msc.ir.errors import TrainingError
from msc.run_folder import diagnose
from msc.run_report import run_accounts
from msc.runtime.corruption.fingerprints import Difference, Replicas
from tests.checkpoint.runs import equal, findings, folders, trainer


class Faulty:
    """An executor whose given runs (counted from 1) come out wrong: a parameter is not finite."""

    def __init__(self, run: msc.Trainer, wrong: Sequence[int], loss: float = math.nan) -> None:
        self._executor = run._run.executor
        self._wrong = wrong
        self._loss = loss
        self.runs = 0

    def run(self, arguments: Sequence[Tensor]) -> Any:
        self.runs += 1
        outputs = self._executor.run(arguments)
        if self.runs not in self._wrong:
            return outputs
        outputs["parameters"] = _spoiled(outputs["parameters"])
        return {**outputs, "loss": torch.tensor(self._loss)}


def _spoiled(values: Any) -> Any:
    for value in torch.utils._pytree.tree_leaves(values):
        value.view(-1)[0] = math.nan
    return values


def faulty(
    policy: str, wrong: Sequence[int], loss: float = math.nan, every: int = 1, **options: Any
) -> tuple[msc.Trainer, Faulty]:
    guard = msc.Guard(policy=policy, every=every)  # type: ignore[arg-type]
    run = trainer(None, guard=guard, **options)
    executor = Faulty(run, wrong, loss)
    run._run.executor = executor  # type: ignore[assignment]
    return run, executor


def test_a_run_without_faults_is_what_it_is_without_a_guard() -> None:
    with trainer(None) as plain, trainer(None, guard=msc.Guard(every=1, policy="replay")) as run:
        plain.fit(4)
        run.fit(4)
        assert equal(findings(run), findings(plain))
        assert run.events == []


def test_stop_names_what_and_where() -> None:
    run, _ = faulty("stop", [2])
    with run, pytest.raises(msc.TrainingError, match="the loss is nan in step 2") as caught:
        run.fit(4)
    assert "Rank 0, step 2" in caught.value.__notes__


def test_a_fault_of_the_hardware_is_told_by_a_repeated_step(tmp_path: Path) -> None:
    with trainer(None) as plain:
        plain.fit(4)
        run, executor = faulty("replay", [2], run=tmp_path)
        with run:
            run.fit(4)
            assert equal(findings(run), findings(plain))  # as if nothing had been
        assert executor.runs == 5
        (event,) = run.events
        assert event.startswith("the loss is nan in step 2, which came out otherwise")
        assert "on ranks 0: that was the hardware" in event
    (account,) = run_accounts(tmp_path)
    assert account.seconds["repeated"] > 0
    assert diagnose(tmp_path)[0].causes == ()


def test_a_step_that_is_wrong_again_stops_the_run() -> None:
    run, executor = faulty("replay", [2, 3])
    with run, pytest.raises(msc.TrainingError, match="came out the same, bit for bit") as caught:
        run.fit(4)
    assert "it is the data or the model" in str(caught.value)
    assert executor.runs == 3


def test_a_skipped_step_changes_nothing() -> None:
    run, _ = faulty("skip", [2])
    with run:
        run.fit(1)
        before = findings(run)
        run.fit(1)
        after = findings(run)
        assert equal(after["params"], before["params"])
        assert equal(after["optimizer"], before["optimizer"])
        assert (run.step, run.skipped_steps, math.isnan(run.losses[1])) == (2, 1, True)
        run.fit(2)
        assert all(map(math.isfinite, run.losses[2:]))
        assert run.events == ["step 2 is skipped: the loss is nan"]


def test_a_first_step_is_undone_with_the_moments_that_it_made() -> None:
    run, _ = faulty("skip", [1])
    with run:
        run.fit(1)
        optimizer = run.optimizer_state_dict()
        assert optimizer["step"] == 0
        assert not any(value.any() for value in optimizer["first_moment"].values())


def test_a_run_rewinds_to_the_last_comparison_and_ends_as_undisturbed() -> None:
    with trainer(None) as plain:
        plain.fit(6)
        run, executor = faulty("rewind", [4], every=2)
        with run:
            run.fit(6)
            assert equal(findings(run), findings(plain))
    assert executor.runs == 4 + 4  # steps 3 and 4 twice
    first, second = run.events
    assert (
        first == "the loss is nan in step 4; all ranks go back to step 2 and repeat what came since"
    )
    assert second.startswith("step 4 came out otherwise when it was repeated from step 2 on")


def test_a_value_that_comes_again_makes_the_run_skip_the_batches_before_it() -> None:
    run, executor = faulty("rewind", [4, 6], every=2)
    with run:
        run.fit(2)
        before = findings(run)
        run.fit(2)
        after = findings(run)
        assert equal(after["params"], before["params"])
        assert equal(after["optimizer"], before["optimizer"])
        assert (run.step, run.skipped_steps, executor.runs) == (4, 2, 8)
        run.fit(2)
        assert len(run.losses) == len(run.grad_norms) == len(run.learning_rates) == 6
        assert "it is the data or the model; all ranks go back once more" in run.events[1]
        assert run.events[2:] == ["step 3 is skipped", "step 4 is skipped"]


def test_a_run_that_rewinds_in_vain_stops() -> None:
    run, _ = faulty("rewind", range(3, 100), every=8)
    with run, pytest.raises(msc.TrainingError, match="gone back to step 0 3 times"):
        run.fit(8)


def test_a_run_must_be_able_to_rewind(tmp_path: Path) -> None:
    guard = msc.Guard(every=4, policy="rewind")
    with pytest.raises(msc.InputError, match="the data is an iterator"):
        trainer(None, guard=guard, data=iter(()))
    with pytest.raises(msc.InputError, match=r"compares every 4 steps, and checkpoints .* every 2"):
        trainer(tmp_path, guard=guard, settings={"every": 2})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": True}, "every is True"),
        ({"policy": "retry"}, "policy is 'retry'; it is one of stop, skip, replay, rewind"),
        ({"leap": 0}, "leap is 0"),
    ],
)
def test_bad_options_are_told(options: dict[str, Any], text: str) -> None:
    with pytest.raises(msc.InputError, match=text):
        msc.Guard(**options)
    with pytest.raises(msc.InputError, match="guard is 5; it is an"):
        trainer(None, guard=5)


def test_copies_are_compared_before_a_save_and_the_rank_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def differences(self: Any, state: Any, all_reduce: Any) -> list[Difference]:
        compared.append(state.step)
        return [Difference("h.0.weight", (0, 1, 2), (0,))] if state.step == 4 else []

    monkeypatch.setattr(Replicas, "differences", differences)
    text = (
        r"After step 4 copies of the state differ: h\.0\.weight: rank 0 of ranks 0, 1, 2\. They "
        r"should be equal to the last bit, and were at step 2\."
    )
    with trainer(tmp_path, guard=msc.Guard(every=100), settings={"every": 2}) as run:
        with pytest.raises(TrainingError, match=text):
            run.fit(6)
    assert compared == [2, 4]
    assert [name[:13] for name in folders(tmp_path)] == ["step-00000002"]
