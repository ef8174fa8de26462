"""A saved program is the same program: it computes the same bits, and its files are held to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import msc
from msc.ir.layout import ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.pieces import index_runs
from msc.ir.placement import Shard
from msc.program import Program
from msc.saved_tensors import SavedTensors, read_runs
from msc.saving import describe
from tests import models

ADAMW = msc.AdamW(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)


def compiled(name: str, mesh: str, **options: Any) -> Program:
    settings: dict[str, Any] = {"optimizer": ADAMW, "microbatches": 2, "precision": "float64"}
    return msc.compile(models.build(name), models.batch(name), mesh=mesh, **{**settings, **options})


def small(mesh: str = "pp=2", **options: Any) -> Program:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=2)
    return msc.compile(model, models.tokens(), mesh=mesh, **options)


@pytest.mark.parametrize(
    ("name", "mesh"), [("nanogpt", "pp=2,tp=2"), ("llama-like", "pp=2"), ("gpt2", "dp=2,tp=2")]
)
def test_a_loaded_program_computes_the_same_bits(name: str, mesh: str, tmp_path: Path) -> None:
    program = compiled(name, mesh)
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    assert loaded.fingerprint == program.fingerprint
    assert loaded.values_digest == program.values_digest
    assert loaded.report.to_json() == program.report.to_json()
    assert describe(loaded) == describe(program)
    found, expected = (
        loaded.run_virtual(models.batch(name)),
        program.run_virtual(models.batch(name)),
    )
    for _ in range(2):
        assert torch.equal(found.loss, expected.loss)
        assert_equal(found.grads, expected.grads)
        assert_equal(found.params, expected.params)
        found = loaded.run_virtual(models.batch(name, 1), found.state)
        expected = program.run_virtual(models.batch(name, 1), expected.state)
    states = loaded.state_dict(found), program.state_dict(expected)
    assert_equal(*states)
    models.build(name).double().load_state_dict(states[0])


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_saving_a_loaded_program_gives_the_same_files(tmp_path: Path) -> None:
    small(optimizer=ADAMW).save(tmp_path / "first")
    msc.load(tmp_path / "first").save(tmp_path / "second")
    first = {file.name: file.read_bytes() for file in (tmp_path / "first").iterdir()}
    second = {file.name: file.read_bytes() for file in (tmp_path / "second").iterdir()}
    assert sorted(first) == [
        "model.safetensors",
        "program.json",
        "stage0.graphs.json",
        "stage1.graphs.json",
    ]
    assert first == second


def test_a_rank_reads_its_stage_and_its_shards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = small("pp=2,tp=2")
    program.save(tmp_path)
    (tmp_path / "stage0.graphs.json").unlink()

    def whole(self: SavedTensors, name: str) -> Tensor:
        raise AssertionError(f"all of {name} was read")

    monkeypatch.setattr(SavedTensors, "__getitem__", whole)
    loaded = msc.load(tmp_path, rank=3)
    found = loaded.initial_state(3).parameters
    assert_equal(found, program.initial_state(3).parameters)
    assert "wpe.weight" not in found
    with pytest.raises(msc.UserError, match=r"stage0\.graphs\.json is missing"):
        loaded.rank_graph(0)


def test_a_rank_that_the_mesh_lacks_is_refused(tmp_path: Path) -> None:
    small().save(tmp_path)
    with pytest.raises(msc.UserError, match="Rank 2 is not in the mesh pp=2"):
        msc.load(tmp_path, rank=2)


def test_a_program_without_values_is_saved_without_them(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = models.GPT(width=16, heads=2, layers=2)
    program = msc.compile(model, models.tokens(), mesh="pp=2")
    small().save(tmp_path)  # whose values must not stay behind
    program.save(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    loaded = msc.load(tmp_path, rank=0)
    assert loaded.fingerprint == program.fingerprint
    with pytest.raises(msc.UserError, match="has no values"):
        loaded.run_virtual(models.tokens())


def test_fewer_stages_leave_no_file_of_more(tmp_path: Path) -> None:
    small("pp=2").save(tmp_path)
    small("tp=2").save(tmp_path)
    assert [file.name for file in sorted(tmp_path.glob("stage*"))] == ["stage0.graphs.json"]


class Options(nn.Module):
    """A model whose inputs are nested, with constants and a persistent buffer that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: dict[str, Any], scale: float, square: bool = False) -> Tensor:
        y = self.linear(x["a"]) * scale + x["b"][0] + self.shift
        result: Tensor = (y**2).mean() if square else y.mean()
        return result


def test_nested_inputs_constants_and_state(tmp_path: Path) -> None:
    model = Options()
    inputs = {"x": {"a": torch.randn(6, 4), "b": [torch.randn(6, 4)]}, "scale": 0.3, "square": True}
    program = msc.compile(model, inputs, mesh="dp=2", optimizer=ADAMW)
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    assert torch.equal(loaded.run_virtual(inputs).loss, program.run_virtual(inputs).loss)
    with pytest.raises(msc.InputError, match=r"'scale' is 0\.4"):
        loaded.run_virtual({**inputs, "scale": 0.4})
    state = loaded.state_dict(loaded.run_virtual(inputs))
    assert sorted(state) == sorted(model.state_dict())
    assert torch.equal(state["seen"], model.seen)  # type: ignore[arg-type]
    model.load_state_dict(state)


# -- shards


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ParameterLayout, Mesh]:
    """A parameter sharded on up to two axes, along dims that divide."""
    mesh = Mesh.parse("dp=2,tp=3")
    shape = draw(st.lists(st.sampled_from([6, 12, 24]), min_size=1, max_size=3))
    shards: dict[str, Shard] = {}
    for axis in draw(st.sets(st.sampled_from(["dp", "tp"]))):
        dim = draw(st.integers(0, len(shape) - 1))
        even = Shard(dim, draw(st.sampled_from([1, 2])))
        length = shape[dim]
        uneven = Shard(dim, (length // 2, length // 4, length - length // 2 - length // 4))
        placement = draw(st.sampled_from([even, uneven]))
        if any(other.dim == dim for other in shards.values()):
            continue
        if placement.divides(length, mesh.axis_size(axis)):
            shards[axis] = placement
    return ParameterLayout("w", tuple(shape), torch.float32, True, shards=shards), mesh


@given(layouts(), st.integers(0, 5))
def test_runs_are_what_the_layout_says(case: tuple[ParameterLayout, Mesh], rank: int) -> None:
    layout, mesh = case
    whole = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)
    found = read_runs(whole, index_runs(layout, mesh, rank))
    assert torch.equal(found, layout.local(whole, mesh, rank))


def test_a_scalar_has_no_runs() -> None:
    layout = ParameterLayout("w", (), torch.float32, True)
    assert torch.equal(
        read_runs(torch.tensor(3.0), index_runs(layout, Mesh.parse("tp=2"), 1)), torch.tensor(3.0)
    )


# -- refusals


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "program.json").read_text())
        change(data)
        (folder / "program.json").write_text(json.dumps(data))

    return apply


def swap_stages(folder: Path) -> None:
    text = (folder / "stage1.graphs.json").read_text()
    (folder / "stage0.graphs.json").write_text(text)


def cut_short(folder: Path) -> None:
    file = folder / "stage0.graphs.json"
    file.write_text(file.read_text()[:-100])


def another_graph(folder: Path) -> None:
    file = folder / "stage0.graphs.json"
    text = file.read_text()
    assert "aten.gelu_backward.default" in text
    file.write_text(text.replace("aten.gelu_backward.default", "aten.silu_backward.default"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "program.json").unlink(), "holds no program"),
        (lambda folder: (folder / "program.json").write_text("[1"), "cannot be read"),
        (lambda folder: (folder / "program.json").write_text("[1]"), "does not describe a program"),
        (edit(lambda data: data.update(version=99)), "is of version 99; this MSC reads version 4"),
        (edit(lambda data: data.update(format="x")), "does not describe a program"),
        (edit(lambda data: data.update(micro_batches=4)), "was changed"),
        (edit(lambda data: data.update(classes=data["classes"][::-1])), "was changed"),
        (swap_stages, "stage0.graphs.json does not belong to"),
        (cut_short, "stage0.graphs.json cannot be read"),
        (another_graph, "stage0.graphs.json does not belong to"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be"),
        (lambda folder: (folder / "model.safetensors").write_text("x"), "cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    small().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(msc.UserError) as error:
        msc.load(tmp_path, rank=0)
    assert message in str(error.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(msc.UserError, match="holds no program"):
        msc.load(tmp_path / "nothing")


def test_a_constant_without_text_is_refused(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, kind: object) -> Tensor:
            return (x * self.weight).mean()

    program = msc.compile(Model(), {"x": torch.ones(2, 4), "kind": torch.nn.Identity})
    with pytest.raises(msc.UserError, match="its input 'kind' is a constant"):
        program.save(tmp_path)
    assert not (tmp_path / "program.json").exists()
