"""The trainer: on gloo processes it computes what one device does, and its errors name ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import msc
from msc.batches import Batches
from msc.program import Program
from msc.verification import largest, relative_error
from tests import models
from tests.single import train_single
from tests.training_job import ADAMW, STEPS, batches

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("training_job.py")
CPU = torch.device("cpu")


def run_job(folder: Path, nproc: int, cases: Sequence[str]) -> None:
    """Start the ranks as a user's script does, through `msc.launch`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(JOB), str(folder), str(nproc), *cases]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


def texts(folder: Path, cases: Sequence[str]) -> dict[tuple[str, int], str]:
    """What each rank's error said."""
    return {
        (case, rank): (folder / f"{case}.{rank}.txt").read_text()
        for case in cases
        for rank in (0, 1)
    }


def compile_model(name: str, mesh: str, **options: Any) -> Program:
    return msc.compile(
        models.build(name),
        models.batch(name),
        mesh=mesh,
        microbatches=2,
        optimizer=ADAMW,
        precision="float64",
        **options,
    )


def small(mesh: str = "", **options: Any) -> Program:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=2)
    return msc.compile(model, models.tokens(), mesh=mesh, **{"optimizer": ADAMW, **options})


# -- parity


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("nproc", "meshes"),
    [
        (2, {"tp=2": 0, "pp=2": 0, "dp=2": 1, " dp=2": 3}),
        (4, {"pp=2,tp=2": 0, "pp=2,dp=2": 2}),
    ],
)
def test_processes_compute_what_one_device_does(
    tmp_path: Path, nproc: int, meshes: dict[str, int]
) -> None:
    """The meshes with a level of ZeRO each."""
    names = ("nanogpt", "llama", "gpt2")
    cases = []
    for name in names:
        for mesh, zero in meshes.items():
            cases.append(f"{name}.{mesh.strip().replace(',', '-')}-zero{zero}")
            fuse = name != "gpt2"  # so that collectives run both ways
            program = compile_model(name, mesh, zero=zero, fuse_collectives=fuse)
            program.save(tmp_path / cases[-1])
    run_job(tmp_path, nproc, cases)
    for name in names:
        expected = train_single(models.build(name), batches(name), ADAMW)
        scale = largest(expected.grads.values())
        for case in cases:
            if not case.startswith(f"{name}."):
                continue
            found = torch.load(tmp_path / f"{case}.pt")
            assert found["losses"] == pytest.approx(expected.losses, rel=1e-10), case
            for parameter, moment in found["first_moment"].items():
                gradient = moment / (1 - ADAMW.betas[0])
                error = relative_error(gradient, expected.grads.get(parameter), scale)
                assert error <= 1e-10, (case, parameter)
            for parameter, value in expected.params.items():
                error = relative_error(found["params"][parameter], value, scale)
                assert error <= 1e-8, (case, parameter)
            assert found["evaluation"] == pytest.approx(expected.evaluation, rel=1e-8), case
            assert found["evaluated_again"] == found["evaluation"]
            models.build(name).double().load_state_dict(found["params"])


def test_one_rank_trains_without_a_launcher() -> None:
    data = [models.tokens(seed) for seed in range(STEPS)]
    program = small(precision="float64", backend="aten")
    lines: list[str] = []
    with msc.Trainer(program, iter(data), log=lines.append) as trainer:
        trainer.fit(2)
        trainer.fit(1)
        found = trainer.state_dict()
        assert trainer.step == 3
        with pytest.raises(msc.InputError, match="no batch"):
            trainer.evaluate([])
    assert not torch.distributed.is_initialized()
    assert [line.partition("  loss")[0] for line in lines] == ["step 1/2", "step 2/2", "step 3/3"]
    torch.manual_seed(0)
    expected = train_single(models.GPT(width=16, heads=2, layers=2), data, ADAMW)
    assert trainer.losses == pytest.approx(expected.losses, rel=1e-10)
    for name, value in expected.params.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


def test_evaluation_changes_nothing_and_drops_nothing_out() -> None:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=1, dropout=0.5)
    data = [models.tokens(seed) for seed in range(2)]
    program = msc.compile(model, data[0], optimizer=ADAMW, precision="float64")
    with msc.Trainer(program, data, log=False) as trainer:
        before = trainer.state_dict()
        found = trainer.evaluate(data)
        assert trainer.evaluate(data, steps=1) != found
        after = trainer.state_dict()
        assert trainer.optimizer_state_dict()["step"] == 0
        trainer.fit(1)
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.double().eval()
    with torch.no_grad():
        losses = [float(model(*batch)) for batch in data]
    assert found == pytest.approx(sum(losses) / 2, rel=1e-10)
    assert trainer.losses[0] != pytest.approx(losses[0], rel=1e-3)  # training drops out


# -- data


class Rows:
    """Data that remembers what it was asked."""

    def __init__(self, whole: tuple[Tensor, ...]) -> None:
        self.whole = whole
        self.asked: list[tuple[int, list[int]]] = []

    def rows(self, step: int, indices: Sequence[int]) -> tuple[Tensor, ...]:
        self.asked.append((step, list(indices)))
        return tuple(tensor[list(indices)] for tensor in self.whole)

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_rank_asks_its_own_rows_only() -> None:
    program = small("dp=2", microbatches=2)
    for rank, own in ((0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])):
        data = Rows(models.tokens())
        found = Batches(program, rank, data, CPU).next(7)
        assert data.asked == [(7, list(own))]
        expected = program.local_inputs(models.tokens(), rank)
        assert found is not None
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_stage_that_reads_no_input_asks_for_no_row() -> None:
    program = small("pp=2", microbatches=1)
    wanted = [
        {
            n.meta["name"]
            for n in graph.graph.find_nodes(op="placeholder")
            if n.meta["kind"] == "input"
        }
        for graph in program.rank_graphs
    ]
    for rank, names in enumerate(wanted):
        data = Rows(models.tokens())
        found = Batches(program, rank, data, CPU).next(0)
        assert found is not None
        assert set(found) == names
        assert bool(data.asked) == bool(names)


def test_rows_of_another_shape_are_refused() -> None:
    program = small("dp=2")
    data = Rows(tuple(tensor[:, :5] for tensor in models.tokens()))
    with pytest.raises(msc.InputError, match=r"'ids' has shape \[4, 5\]") as error:
        Batches(program, 1, data, CPU).next(3)
    assert "rows(3, 4 indices) gave to rank 1" in error.value.__notes__[0]


def test_data_that_ends_early_names_the_step() -> None:
    with msc.Trainer(small(), [models.tokens()] * 2, log=False) as trainer:
        with pytest.raises(msc.InputError, match=r"ended at step 2: it had 2 batches.*to step 5"):
            trainer.fit(5)
        assert len(trainer.losses) == 2


def test_data_of_another_kind_is_refused() -> None:
    with pytest.raises(msc.InputError, match="data has type int"):
        msc.Trainer(small(), 3, log=False)  # type: ignore[arg-type]
    with msc.Trainer(small(), Rows(models.tokens()), log=False) as trainer:
        with pytest.raises(msc.InputError, match="how many steps"):
            trainer.evaluate(Rows(models.tokens()))
        assert trainer.evaluate(Rows(models.tokens()), steps=1) > 0


# -- refusals


def test_a_checkpoint_is_no_bare_folder() -> None:
    with pytest.raises(msc.InputError, match=r"checkpoint is 'saves'; it is an msc\.Checkpoint"):
        msc.Trainer(small(), [], log=False, checkpoint="saves")  # type: ignore[arg-type]


def test_training_needs_an_optimizer() -> None:
    with msc.Trainer(small(optimizer=None), [models.tokens()], log=False) as trainer:
        with pytest.raises(msc.PlanError, match=r"msc\.AdamW"):
            trainer.fit(1)
        assert trainer.evaluate([models.tokens()]) > 0
    with pytest.raises(msc.CommunicationError, match="closed"):
        trainer.fit(1)


def test_a_mesh_without_a_launcher_says_how_to_start() -> None:
    with pytest.raises(msc.PlanError, match="torchrun --nproc-per-node 2"):
        msc.Trainer(small("tp=2"), [], log=False)


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(msc.PlanError, match="Mesh tp=2 has 2 ranks, but 3 processes were started"):
        msc.Trainer(small("tp=2"), [], log=False)


@pytest.mark.gloo
def test_ranks_that_do_not_fit_together(tmp_path: Path) -> None:
    cases = ["other_program", "other_values", "other_world", "short_data", "silent"]
    run_job(tmp_path, 2, cases)
    text = texts(tmp_path, cases)
    for rank in (0, 1):
        found = text["other_program", rank]
        assert found.startswith("CommunicationError: The program of rank 1 differs from that of")
        found = text["other_values", rank]
        assert found.startswith("CommunicationError: The set of initial parameters of rank 1")
        assert "torch.manual_seed" in found
        assert "Mesh pp=2,tp=2 has 4 ranks, but 2 processes" in text["other_world", rank]
    assert "ended at step 1: it had 1 batches" in text["short_data", 1]
    assert "Rank 1 (pp=1), step 2" in text["short_data", 1]
    assert "Rank 0 (pp=0) got no answer from another rank in step 2" in text["short_data", 0]
    assert "rank 1 failed in step 2: InputError: The data ended" in text["short_data", 0]
    assert "Rank 0 (pp=0) got no answer from another rank in step 2" in text["silent", 0]
    assert "rank 1 reports nothing: hanging" in text["silent", 0]


@pytest.mark.gloo
def test_faults_inside_of_a_step(tmp_path: Path) -> None:
    """A bit that flips, and data that ends or fails while a step of ZeRO gathers parameters."""
    cases = ["flipped_bit", "rewinds", "data_ends_in_step", "data_fails_in_step"]
    run_job(tmp_path, 2, cases)
    text = texts(tmp_path, cases)
    for rank in (0, 1):  # of two copies neither can be blamed alone
        found = text["flipped_bit", rank]
        assert found.startswith("TrainingError: After step 3 copies of the state differ")
        assert ": one of ranks 0, 1, which hold copies" in found
        found = text["rewinds", rank]
        assert found.startswith("MSCError: equal: True; After step 4 copies of the state differ")
        assert found.endswith("all ranks go back to step 2 and repeat what came since")
    for rank in (0, 1):
        found = text["data_ends_in_step", rank]
        assert f"Rank {rank} (dp={rank}), step 3: The data ended at step 2" in found
    ended = torch.load(tmp_path / "ended.pt")
    program = small("dp=2", zero=1, optimizer=msc.AdamW(lr=1e-2))
    expected = program.run_virtual(models.tokens())
    expected = program.run_virtual(models.tokens(), expected.state)
    assert len(ended["losses"]) == 2
    for name, value in expected.params.items():
        torch.testing.assert_close(ended["values"][name], value)
    found = text["data_fails_in_step", 1]
    assert found.startswith("OSError: the disk is gone")
    assert "Rank 1 (dp=1), step 2" in found
    found = text["data_fails_in_step", 0]
    assert "Rank 0 (dp=0) got no answer from another rank in step 2" in found
    assert "rank 1 failed in step 2: OSError: the disk is gone" in found


@pytest.mark.gloo
def test_launch_gives_back_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from msc.launch import launch, under_torchrun\n"
        "if not under_torchrun():\n"
        "    sys.exit(launch(sys.argv, 2))\n"
        "print('threads', os.environ['OMP_NUM_THREADS'], 'argument', sys.argv[1])\n"
        "sys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, str(script), "x"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "threads 1 argument x" in done.stdout
    assert "Rank 1 failed with exit code 3" in done.stderr
    assert "Traceback" not in done.stderr
