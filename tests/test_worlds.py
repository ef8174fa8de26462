"""A job on fewer ranks than it was started for trains as the whole of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.ir.errors import PlanError
from msc.program import Program
from msc.worlds import worlds_of
from tests import models
from tests.checkpoint.job import tokens

STEPS = 2
OPTIMIZER = msc.AdamW(lr=1e-2, weight_decay=0.1, max_norm=1.0, eps=1e-4)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MSC_FULL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def start(monkeypatch: pytest.MonkeyPatch, ranks: int, full: int | None = None) -> None:
    """Be a rank of a job, as its launcher says."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if full is not None:
        monkeypatch.setenv("MSC_FULL_WORLD_SIZE", str(full))


def build(mesh: str, **options: Any) -> Program:
    torch.manual_seed(0)
    layers = 2 if "pp" in mesh else 1
    model = models.GPT(width=16, heads=2, layers=layers, dropout=0.1)
    return msc.compile(
        model, tokens(), mesh=mesh, optimizer=OPTIMIZER, precision="float64", **options
    )


def train(program: Program) -> dict[str, Tensor]:
    """Losses and parameters after some steps."""
    state = None
    losses = []
    for step in range(STEPS):
        result = program.run_virtual(tokens(step), state)
        state = result.state
        losses.append(result.loss)
    return {"losses": torch.stack(losses), **result.params}


def error(found: dict[str, Tensor], whole: dict[str, Tensor]) -> float:
    """The largest difference, as a part of the largest value of each tensor."""
    assert found.keys() == whole.keys()
    return max(
        float((found[name] - value).abs().max() / value.abs().max())
        for name, value in whole.items()
    )


CASES: list[tuple[str, dict[str, Any], int, tuple[int, ...]]] = [
    ("dp=*", {"zero": 2}, 4, (2, 1)),
    ("pp=2,dp=*", {"zero": 3}, 4, (2,)),
    ("dp=*,tp=2", {"zero": 1}, 4, (2,)),
]


@pytest.mark.parametrize(("mesh", "options", "full", "fewer"), CASES)
def test_fewer_ranks_train_as_all(
    mesh: str,
    options: dict[str, Any],
    full: int,
    fewer: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(monkeypatch, full)
    program = build(mesh, **options)
    assert [world.mesh.size for world in program.worlds] == [full, *fewer]
    whole = train(program)
    for ranks in fewer:
        start(monkeypatch, ranks, full)
        plan = program.plan if "tp" in mesh else None
        shrunk = build(mesh, plan=plan, **options)
        assert shrunk.mesh.size == ranks
        assert shrunk.worlds == program.worlds
        assert f"goes on as {shrunk.mesh} with microbatches=" in "\n".join(shrunk.report.notes)
        assert shrunk.micro_batches == options.get("microbatches", 1) * full // ranks
        assert error(train(shrunk), whole) < 1e-12


def test_any_number_of_dp_ranks_that_divides_the_parts_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(monkeypatch, 6, 8)
    worlds = worlds_of("dp=*,tp=2", 3, None)
    assert str(worlds.here) == "dp=3,tp=2 with microbatches=4"
    assert [(w.mesh.axis_size("dp"), w.micro_batches) for w in worlds.possible] == [
        (4, 3),
        (3, 4),
        (2, 6),
        (1, 12),
    ]


def test_a_mesh_with_numbers_has_one_world(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, 2, 8)
    worlds = worlds_of({"dp": 4}, 1, None)
    assert worlds.possible == (worlds.here,)


def test_without_a_launcher_there_is_one_process() -> None:
    assert str(worlds_of("dp=*", 2, None).here) == "dp=1 with microbatches=2"
    assert worlds_of({"dp": "*", "tp": 1}, 2, None).here.mesh.size == 1
    with pytest.raises(PlanError, match="a multiple of 2 ranks, and 1 process was started"):
        worlds_of("dp=*,tp=2", 1, None)


@pytest.mark.parametrize(
    ("ranks", "full", "mesh", "group", "message"),
    [
        (6, None, "pp=2,dp=*,tp=2", None, "a multiple of 4 ranks, and 6 processes were started"),
        (4, 6, "dp=*,tp=4", None, "and 6 is the full size of the job"),
        (3, 4, "dp=*", None, r"3 were started now: dp=3 would have 1 \* 4 / 3 micro-batches"),
        (3, 4, "dp=*", None, "It can run on 4, 2, 1 ranks"),
        (8, 4, "dp=*", None, "dp=8 is more than that"),
        (1, 4, "dp=*", 2, "shard_group=2 does not divide dp=1. It can run on 4, 2 ranks"),
        (4, None, "dp=4,tp=*", None, "leaves the size of tp open"),
        (4, None, {"pp": "*", "dp": "*"}, None, "leaves the size of pp and dp open"),
        (4, None, "dp=*,tp", None, "has the part 'tp'"),
    ],
)
def test_numbers_that_do_not_fit_are_named(
    ranks: int,
    full: int | None,
    mesh: Any,
    group: int | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(monkeypatch, ranks, full)
    with pytest.raises(PlanError, match=message):
        worlds_of(mesh, 1, group)


def test_a_full_size_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, 2)
    monkeypatch.setenv("MSC_FULL_WORLD_SIZE", "all")
    with pytest.raises(PlanError, match="MSC_FULL_WORLD_SIZE is 'all'"):
        worlds_of("dp=*", 1, None)


class Normed(nn.Module):
    """A loss that is no sum over samples, and with `tracks` buffers that the batch changes."""

    def __init__(self, tracks: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, track_running_stats=tracks)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.last(self.norm(self.first(x))), y)


def normed_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randint(3, (8,))


@pytest.mark.parametrize(("tracks", "parts"), [(False, 1), (False, 2), (True, 1)])
def test_a_model_that_more_micro_batches_would_train_otherwise_is_refused(
    tracks: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, 4)
    program = msc.compile(Normed(tracks), normed_batch(), mesh="dp=*", microbatches=parts)
    assert [world.mesh.size for world in program.worlds] == [4]
    start(monkeypatch, 2, 4)
    with pytest.raises(PlanError, match=r"runs on 4 ranks only .* would train it otherwise"):
        msc.compile(Normed(tracks), normed_batch(), mesh="dp=*")


def test_a_program_that_was_saved_has_the_mesh_that_it_has(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, 2)
    msc.compile(Normed(tracks=False), normed_batch(), mesh="dp=*").save(tmp_path)
    loaded = msc.load(tmp_path)
    assert [world.mesh.size for world in loaded.worlds] == [2]
    start(monkeypatch, 1, 2)
    with pytest.raises(PlanError, match=r"mesh='dp=\*'\) in the script compiles"):
        msc.Trainer(loaded, iter(()))
