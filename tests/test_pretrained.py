"""`msc.load_pretrained`: the weights of Hugging Face's files, with equal logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import msc
from msc.program import Program
from msc.saved_tensors import SavedTensors
from tests import models


def meta(name: str, mesh: str) -> Program:
    with torch.device("meta"):
        model = models.BUILDERS[name]()
    msc.init(model, seed=0)  # for the buffers
    batch = models.batch(name)
    return msc.compile(model.train(), batch, mesh=mesh, precision="float64")


@pytest.mark.parametrize(("name", "size"), [("gpt2", "5GB"), ("llama", "40KB")])
def test_a_hugging_face_model_starts_from_its_files(tmp_path: Path, name: str, size: str) -> None:
    model = models.build(name)
    model.save_pretrained(tmp_path, max_shard_size=size)  # type: ignore[operator]
    assert (tmp_path / "model.safetensors").exists() == (size == "5GB")
    program = msc.load_pretrained(meta(name, "pp=2,tp=2"), tmp_path)
    found = program.run_virtual(models.batch(name))
    whole = msc.compile(model, models.batch(name), precision="float64")
    expected = whole.run_virtual(models.batch(name))
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-12)
    assert found.grads.keys() == expected.grads.keys()
    for parameter, value in whole.state_dict().items():
        assert torch.equal(program.state_dict()[parameter], value)


def test_each_rank_reads_only_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("gpt2")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    program = msc.load_pretrained(meta("gpt2", "pp=2,tp=2"), tmp_path)

    def whole(self: SavedTensors, name: str) -> None:
        raise AssertionError(f"'{name}' was read whole")

    monkeypatch.setattr(SavedTensors, "__getitem__", whole)
    state = program.initial_state(3)
    assert state.parameters
    for name, value in state.parameters.items():
        assert value.shape == program.parameters[name].local_shape(program.mesh, 3)


def small() -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=1)
    return model, msc.compile(model, models.tokens())


def test_a_tied_parameter_may_have_any_of_its_names(tmp_path: Path) -> None:
    model, program = small()
    values = {n: v.detach().clone() + 1 for n, v in model.state_dict().items()}
    for dropped in ("lm_head.weight", "wte.weight"):
        kept = {n: v for n, v in values.items() if n != dropped}
        save_file(kept, tmp_path / "model.safetensors")
        found = msc.load_pretrained(program, tmp_path).state_dict()
        assert all(torch.equal(found[name], values[name]) for name in values)
    assert torch.equal(program.state_dict()["wpe.weight"], model.state_dict()["wpe.weight"])


def test_a_program_that_was_loaded_can_be_saved(tmp_path: Path) -> None:
    model, program = small()
    values = {n: v.detach().clone() + 1 for n, v in model.state_dict().items()}
    save_file(values, tmp_path / "weights.safetensors")
    loaded = msc.load_pretrained(program, tmp_path / "weights.safetensors")
    assert loaded.values_digest != program.values_digest
    loaded.save(tmp_path / "program")
    found = msc.load(tmp_path / "program").state_dict()
    assert all(torch.equal(found[name], values[name]) for name in values)
    assert load_file(tmp_path / "program" / "model.safetensors")


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    model, program = small()
    values = {n: v.detach().clone() for n, v in model.state_dict().items()}
    file = tmp_path / "model.safetensors"
    with pytest.raises(msc.UserError, match=r"has neither model\.safetensors nor"):
        msc.load_pretrained(program, tmp_path)
    save_file({n: v for n, v in values.items() if n != "ln_f.bias"}, file)
    with pytest.raises(msc.UserError, match=r"1 parameters are missing, such as 'ln_f\.bias'"):
        msc.load_pretrained(program, tmp_path)
    save_file({**values, "more": torch.zeros(1)}, file)
    with pytest.raises(msc.UserError, match="1 tensors are none of the model's, such as 'more'"):
        msc.load_pretrained(program, tmp_path)
    save_file({**values, "ln_f.bias": torch.zeros(3)}, file)
    with pytest.raises(msc.UserError, match=r"'ln_f\.bias' has shape \[3\] in the files"):
        msc.load_pretrained(program, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(msc.UserError, match="has no weight_map"):
        msc.load_pretrained(program, tmp_path)
