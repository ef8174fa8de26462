"""A run that is saved: it resumes bit for bit, on any mesh, and from nothing that is damaged."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.batches import Batches
from msc.checkpointing import state_tensors
from msc.program import Program
from msc.run_folder import diagnose
from msc.runtime.checkpoint.loading import Loader
from msc.runtime.checkpoint.storage import LocalStorage
from msc.runtime.diagnosis.ring import read_ring
from msc.runtime.diagnosis.schedule import WAIT, from_text
from msc.runtime.state import RankState
from tests import models
from tests.checkpoint_job import Rows, tokens
from tests.runtime.checkpoint import worlds

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("checkpoint_job.py")
ADAMW = msc.AdamW(lr=1e-2, weight_decay=0.1, max_norm=1.0)
CPU = torch.device("cpu")


@functools.cache
def program(mesh: str = "", optimizer: msc.AdamW | msc.SGD = ADAMW, **options: Any) -> Program:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=2, dropout=0.1)
    return msc.compile(model, tokens(), mesh=mesh, optimizer=optimizer, **options)


def trainer(folder: Path | None, **options: Any) -> msc.Trainer:
    settings = {"every": 1, "keep": 3, "when_busy": "wait"} | options.pop("settings", {})
    checkpoint = None if folder is None else msc.Checkpoint(folder, **settings)
    chosen: dict[str, Any] = {"program": program(), "data": Rows(), "log": False} | options
    return msc.Trainer(checkpoint=checkpoint, **chosen)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    with trainer(None) as run:
        run.fit(5)
        return findings(run)


def findings(run: msc.Trainer) -> dict[str, Any]:
    return {
        "params": run.state_dict(),
        "optimizer": run.optimizer_state_dict(),
        "losses": run.losses,
        "norms": run.grad_norms,
        "rates": run.learning_rates,
    }


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path: Path, of_three_steps: Path) -> Path:
    """A folder with the checkpoints of steps 1 to 3."""
    shutil.copytree(of_three_steps, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture(scope="module")
def of_three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    with trainer(folder) as run:
        run.fit(3)
    assert len(folders(folder)) == 3
    return folder


# -- resuming


def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_interrupted(
    saved: Path, undisturbed: dict[str, Any]
) -> None:
    lines: list[str] = []
    with trainer(saved, log=lines.append) as run:
        assert run.step == 3
        assert run.losses == undisturbed["losses"][:3]
        run.fit(2)
        assert equal(findings(run), undisturbed)
    assert any("resumed from step 3" in line for line in lines)
    assert [name.split("-")[1] for name in folders(saved)] == ["00000003", "00000004", "00000005"]


def test_saving_changes_nothing(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    with trainer(tmp_path, settings={"every": 2}) as run:
        run.fit(5)
        assert equal(findings(run), undisturbed)
        run.save()
        assert [name.split("-")[1] for name in folders(tmp_path)] == [
            "00000002",
            "00000004",
            "00000005",
        ]
        run.save()
        assert len(folders(tmp_path)) == 3


def test_a_writer_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    with trainer(tmp_path, log=lines.append) as run:
        run.fit(1)
        assert run._checkpoints is not None
        os.kill(run._checkpoints.writer.pid, signal.SIGKILL)
        run.fit(2)
        run.save()
    assert [name.split("-")[1] for name in folders(tmp_path)] == [
        "00000001",
        "00000002",
        "00000003",
    ]
    assert any("died (exit code -9); started again" in line for line in lines)


def test_a_save_is_skipped_when_both_copies_are_being_written(tmp_path: Path) -> None:
    lines: list[str] = []
    with trainer(tmp_path, log=lines.append, settings={"when_busy": "skip"}) as run:
        assert run._checkpoints is not None
        writer = run._checkpoints.writer
        os.kill(writer.pid, signal.SIGSTOP)
        run.fit(4)
        os.kill(writer.pid, signal.SIGCONT)
    assert [name.split("-")[1] for name in folders(tmp_path)] == ["00000001", "00000002"]
    busy = [line.partition(": ")[2] for line in lines if "skipped" in line]
    assert busy == [
        f"checkpoint of step {step} is skipped: both copies are being written" for step in (3, 4)
    ]


def test_saves_by_the_clock(tmp_path: Path) -> None:
    with trainer(tmp_path, settings={"every": timedelta(microseconds=1)}) as run:
        run.fit(4)
    assert [name.split("-")[1] for name in folders(tmp_path)] == [
        "00000002",
        "00000003",
        "00000004",
    ]


def test_any_file_system_of_fsspec(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    url: Any = f"local://{tmp_path}/saves"  # the same disk, but through fsspec
    with trainer(url) as run:
        run.fit(3)
    with trainer(url) as run:
        assert run.step == 3
        run.fit(2)
        assert equal(findings(run), undisturbed)


def test_a_rank_that_dies_while_loading_is_named(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Loader, target: Any) -> None:
        raise RuntimeError("[transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(Loader, "load", lost)
    with pytest.raises(msc.CommunicationError, match="Rank 0 got no answer from another rank"):
        trainer(saved)


# -- what is damaged is named and not used


def newest(folder: Path, back: int = 0) -> Path:
    return folder / folders(folder)[-1 - back]


def test_the_newest_intact_one_is_taken(saved: Path, undisturbed: dict[str, Any]) -> None:
    data = newest(saved) / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    lines: list[str] = []
    with trainer(saved, log=lines.append) as run:
        assert run.step == 2
        run.fit(3)
        assert equal(findings(run), undisturbed)
    (line,) = [line for line in lines if "damaged" in line]
    assert f"checkpoint {data.parent.name} is damaged and not used: __0_0.distcp: bytes" in line


def test_incomplete_and_mixed_ones_are_named(saved: Path) -> None:
    (newest(saved) / "commit.json").unlink()
    mixed = newest(saved, 1) / "part-00000.json"
    mixed.write_bytes((newest(saved, 2) / "part-00000.json").read_bytes())
    lines: list[str] = []
    with trainer(saved, log=lines.append) as run:
        assert run.step == 1
    assert f"checkpoint {newest(saved).name} is incomplete and not used" in lines[0]
    assert "part-00000.json is not what was committed" in lines[1]


def test_no_run_starts_over_beside_damaged_checkpoints(saved: Path) -> None:
    for folder in saved.iterdir():
        (folder / "history.json").write_text("{}")
    with pytest.raises(msc.UserError, match=r"No checkpoint in .* is intact") as error:
        trainer(saved)
    assert str(error.value).count("history.json is not what was committed") == 3
    assert not torch.distributed.is_initialized()


def test_incomplete_ones_alone_are_no_run(saved: Path) -> None:
    for folder in saved.iterdir():
        (folder / "commit.json").unlink()
    with trainer(saved) as run:
        assert run.step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "The seed is 1, and .* has a run with seed 0"),
        ({"data": Rows(2)}, "The data differs from that of the checkpoint"),
        ({"data": [tokens()] * 2}, "The data differs from that of the checkpoint"),
    ],
)
def test_another_run_is_refused(saved: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(msc.UserError, match=message):
        trainer(saved, **options)


def test_another_optimizer_is_refused(saved: Path) -> None:
    with pytest.raises(msc.UserError, match="another model, optimizer or precision"):
        trainer(saved, program=program(optimizer=msc.SGD(lr=0.1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "url is empty"),
        ({"every": 0}, "every is 0"),
        ({"every": True}, "every is True"),
        ({"every": 1.5}, "every is 1.5"),
        ({"every": timedelta(0)}, "every is datetime"),
        ({"keep": 0}, "keep is 0"),
        ({"when_busy": "stop"}, "when_busy is 'stop'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(msc.InputError, match=message):
        msc.Checkpoint(**{"url": "x", **options})


def test_saving_needs_a_place() -> None:
    with trainer(None) as run, pytest.raises(msc.InputError, match="checkpoint=msc"):
        run.save()


# -- the position of the data


class Stateful:
    """An iterable that keeps its own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            yield tokens(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_the_data_goes_on_where_it_was() -> None:
    for data in (Rows(), [tokens(step) for step in range(5)], Stateful()):
        before = Batches(program(), 0, data, CPU)
        for step in range(3):
            before.next(step)
        position = json.loads(json.dumps(before.position()))
        again = Stateful() if isinstance(data, Stateful) else data
        after = Batches(program(), 0, again, CPU)
        after.seek(3, position)
        found = after.next(3)
        assert found is not None
        assert torch.equal(found["ids"], tokens(3)[0])


def test_data_that_ends_before_its_position() -> None:
    with pytest.raises(msc.InputError, match="ended at step 2, and the checkpoint is of step 3"):
        Batches(program(), 0, [tokens()] * 2, CPU).seek(3, None)


def test_a_position_without_json_is_refused_at_the_start(tmp_path: Path) -> None:
    class Odd(Rows):
        def state_dict(self) -> dict[str, Any]:
            return {"version": {1}}

    with pytest.raises(msc.InputError, match=r"state_dict\(\) of the data has no JSON"):
        trainer(tmp_path, data=Odd())


# -- any mesh to any mesh


class Normed(nn.Module):
    """Batch norm: a state that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.first(x)))
        return functional.cross_entropy(self.last(hidden), y)


def normed_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def gpt() -> nn.Module:
    return models.GPT(vocabulary=97, width=16, heads=2, layers=4, dropout=0.1)


# Adam would make steps of what rounding leaves of the gradient of a bias before a norm.
SGD = msc.SGD(lr=0.1, momentum=0.9)

CASES: dict[str, tuple[Any, Any, Any, list[dict[str, Any]]]] = {
    "tied and fused, of an odd size": (
        gpt,
        tokens,
        ADAMW,
        [
            {"mesh": "pp=2,tp=2", "microbatches": 2},
            {"mesh": "dp=2", "microbatches": 1},
            {
                "mesh": "pp=2",
                "microbatches": 2,
                "schedule": "interleaved",
                "virtual_stages": 2,
            },
            {"mesh": "dp=2,tp=2", "microbatches": 1},
            {"mesh": "dp=4", "microbatches": 2, "zero": 1},
            {"mesh": "dp=4,tp=2", "microbatches": 1, "zero": 3, "shard_group": 2},
        ],
    ),
    "buffers": (Normed, normed_batch, SGD, [{"mesh": "tp=2"}, {"mesh": "dp=4"}, {"mesh": ""}]),
}


@pytest.mark.parametrize("case", CASES)
def test_any_mesh_to_any_mesh(tmp_path: Path, case: str) -> None:
    build, batch, optimizer, options = CASES[case]
    torch.manual_seed(0)
    model = build()
    storage = LocalStorage(tmp_path)
    programs = [
        msc.compile(model, batch(0), optimizer=optimizer, precision="float64", **each)
        for each in options
    ]
    reference: list[RankState] | None = None
    state: list[RankState] | None = None
    step = 0
    # each program goes on from the one before it, beside the first, which is not interrupted
    for number, current in enumerate([*programs, programs[0]]):
        if number:
            states = state_tensors(current)
            state = [current.initial_state(rank) for rank in range(current.mesh.size)]
            reports = worlds.load_states(storage, f"step-{step:08d}-aa", states, state)
            assert not any(report.damage for report in reports)
            for each in state:
                each.step = step
        for _ in range(2):
            expected = programs[0].run_virtual(batch(step), reference)
            found = current.run_virtual(batch(step), state)
            reference, state = expected.state, found.state
            step += 1
            assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-12)
        for name, value in expected.params.items():
            torch.testing.assert_close(found.params[name], value, rtol=1e-10, atol=1e-12)
        for name, value in expected.buffers.items():
            torch.testing.assert_close(found.buffers[name], value, rtol=1e-10, atol=1e-12)
        assert state is not None
        worlds.write(storage, state_tensors(current), state, step)


# -- a run's folder


def test_a_run_notes_what_it_does(tmp_path: Path) -> None:
    with trainer(None, run=tmp_path / "run") as run:
        run.fit(1)
        (tmp_path / "run" / "rank-00000.ring").read_bytes()
        verdict, text = diagnose(tmp_path / "run")
        assert (verdict.causes, text.splitlines()[0]) == ((), "No rank waits for another.")
        with pytest.raises(msc.InputError, match="ended at step"):
            with trainer(None, run=tmp_path / "short", data=[]) as short:
                short.fit(1)
    assert read_ring(tmp_path / "run" / "rank-00000.ring").phase == "ended"
    assert read_ring(tmp_path / "short" / "rank-00000.ring").phase == "failed"
    with pytest.raises(msc.UserError, match="is no folder of a run"):
        diagnose(tmp_path)


# -- real processes


def start_rank(folder: Path, rank: int, port: int, case: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, str(JOB), str(folder), "2", case]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


@pytest.mark.gloo
@pytest.mark.skipif("MSC_TEST_LONG" not in os.environ, reason="takes minutes")
def test_a_job_that_is_killed_again_and_again_ends_bit_for_bit(tmp_path: Path) -> None:
    program("dp=2", precision="float64", microbatches=2).save(tmp_path / "dp=2")
    run_job(tmp_path, 2, ["plain:60:dp=2"])
    chance = random.Random(0)
    lives = []
    for life in range(40):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        ranks = [start_rank(tmp_path, rank, port, "killed:60:dp=2") for rank in range(2)]
        known = set(folders(tmp_path / "killed")) if life else set()
        while ranks[0].poll() is None:
            new = (tmp_path / "killed").exists() and set(folders(tmp_path / "killed")) - known
            if new:  # it runs
                time.sleep(chance.random() * 0.8)
                break
            time.sleep(0.01)
        for rank in chance.sample(ranks, 2):
            if life < 39:
                rank.kill()
                time.sleep(chance.random() * 0.05)
        codes = [rank.wait() for rank in ranks]
        lives.append(codes)
        if codes == [0, 0]:
            break
    assert codes == [0, 0], lives
    assert len(lives) > 2
    whole, found = (torch.load(tmp_path / f"{name}.dp=2.pt") for name in ("plain", "killed"))
    assert equal(found["params"], whole["params"])
    assert equal(found["optimizer"], whole["optimizer"])
    assert found["losses"] == whole["losses"]


def run_job(folder: Path, nproc: int, cases: Sequence[str], code: int = 0) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(JOB), str(folder), str(nproc), *cases]
    done = subprocess.run(
        command,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, done.stdout


def assert_as_scheduled(run: Path) -> None:
    """Each rank's last step is what its program says, act for act, byte for byte."""
    for rank in range(2):
        view = read_ring(run / f"rank-{rank:05d}.ring")
        schedule = from_text((run / f"rank-{rank:05d}.schedule.json").read_text())
        assert (view.phase, view.in_step) == ("ended", len(schedule))
        for record, act in zip(view.records[-view.in_step :], schedule, strict=True):
            assert (record.kind, record.channel) == (act.kind, act.channel)
            assert record.kind == WAIT or record.nbytes == act.nbytes
            assert record.leave_ns >= record.enter_ns > 0


@pytest.mark.gloo
def test_a_killed_job_resumes_bit_for_bit_and_on_another_mesh(tmp_path: Path) -> None:
    for mesh in ("dp=2", "pp=2"):
        program(mesh, precision="float64", microbatches=2).save(tmp_path / mesh)
    run_job(tmp_path, 2, ["plain:5:dp=2", "same:3:dp=2:kill=1"], code=1)
    killed, words = diagnose(tmp_path / "same.dp=2.run")
    assert [(cause.rank, cause.what) for cause in killed.causes] == [(1, "is dead")], words
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    run_job(tmp_path, 2, ["same:5:dp=2", "other:5:pp=2"])
    whole, same, other = (
        torch.load(tmp_path / f"{name}.pt") for name in ("plain.dp=2", "same.dp=2", "other.pp=2")
    )
    assert same["first"] == other["first"] == 2
    assert equal(same["params"], whole["params"])
    assert equal(same["optimizer"], whole["optimizer"])
    assert same["losses"] == whole["losses"]
    assert other["losses"] == pytest.approx(whole["losses"], rel=1e-12)
    for name, value in whole["params"].items():
        torch.testing.assert_close(other["params"][name], value, rtol=1e-9, atol=1e-12)
    for name in ("plain.dp=2", "other.pp=2"):
        assert diagnose(tmp_path / f"{name}.run")[0].causes == ()
        assert_as_scheduled(tmp_path / f"{name}.run")
    # both dp ranks need all of it: one reads, the other is sent it
    (folder,) = (
        path for path in (tmp_path / "same").iterdir() if path.name.startswith("step-00000002")
    )
    size = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    assert same["read"] == [size, size]
