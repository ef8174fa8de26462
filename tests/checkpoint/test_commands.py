"""`msc ckpt`, on the checkpoint of a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import msc
from msc import cli
from msc.checkpoint.program_state import state_tensors
from msc.program import Program
from msc.runtime.checkpoint.catalog import checkpoints, read_commit
from msc.runtime.checkpoint.storage import LocalStorage
from msc.runtime.diagnosis.ring import Ring
from msc.runtime.diagnosis.schedule import WAIT, Act, to_text
from tests import models
from tests.runtime.checkpoint import worlds

FACTS = {"seed": 0, "skipped": 0, "data": None, "mesh": [["tp", 2]], "micro_batches": 1}


@pytest.fixture(scope="module")
def model() -> models.GPT:
    torch.manual_seed(0)
    return models.GPT(width=16, heads=2, layers=2)


@pytest.fixture(scope="module")
def program(model: models.GPT) -> Program:
    return msc.compile(model, models.tokens(), mesh="tp=2", optimizer=msc.AdamW())


@pytest.fixture
def saved(tmp_path: Path, program: Program) -> Path:
    """The checkpoints of steps 1 and 2, which are equal but for a bias, and an incomplete one."""
    folder = tmp_path / "saves"
    storage = LocalStorage(folder)
    states = state_tensors(program)
    aliases = {"wte.weight": ["wte.weight", "lm_head.weight"]}
    name = next(n for n in program.parameters if n in ("wte.weight", "lm_head.weight"))
    ranks = [program.initial_state(rank) for rank in range(2)]
    for step in (1, 2):
        if step == 2:
            for rank in ranks:
                rank.parameters["ln_f.bias"] = rank.parameters["ln_f.bias"] + 0.5
        facts = {**FACTS, "aliases": {name: aliases["wte.weight"]}}
        worlds.write(storage, states, ranks, step, facts)
    (folder / "step-00000003-aa").mkdir()
    return folder


def ckpt(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["ckpt", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.stderr if code == 2 else result.stdout


def test_blame(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"mesh": [["tp", 2]]}')
    for rank in range(2):
        ring = Ring(tmp_path / f"rank-0000{rank}.ring", rank, ["tp:0,1"])
        ring.phase("step", 3)
        start = Act("all_reduce", "tp:0,1", 8, "%sum (head)")
        schedule = [start, Act(WAIT, "tp:0,1", 8, "%sum (head)", 0)]
        (tmp_path / f"rank-0000{rank}.schedule.json").write_text(to_text(schedule))
    ring.enter(ring.start("all_reduce", "tp:0,1", 8))
    result = CliRunner().invoke(cli.app, ["blame", str(tmp_path)])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "rank 0 (tp=0) computes, or hangs outside of communication (step 3)"
    assert lines[1] == "  next in its program: all_reduce on tp:0,1 at %sum (head)"
    assert lines[2].endswith("rank 1 (tp=1) waits for it: all_reduce on tp:0,1 at %sum (head)")
    assert lines[-1] == "pp=0 dp=0   X w   ranks 0 to 1"
    assert CliRunner().invoke(cli.app, ["blame", str(tmp_path / "x")]).exit_code == 2


def test_ls(saved: Path) -> None:
    assert ckpt("ls", saved).split() == [
        *("3", "incomplete", "step-00000003-aa"),
        *("2", "complete", "step-00000002-aa"),
        *("1", "complete", "step-00000001-aa"),
    ]
    found = json.loads(ckpt("ls", saved, "--json"))
    assert found[0] == {"folder": "step-00000003-aa", "step": 3, "complete": False}
    words = f"{saved}/nothing has no checkpoint: there is no such folder\n"
    assert ckpt("ls", saved / "nothing") == words


def test_verify(saved: Path) -> None:
    assert ckpt("verify", saved).startswith(f"ok: {saved}/step-00000002-aa, ")
    data = saved / "step-00000001-aa" / "__1_0.distcp"
    data.write_bytes(b"x" + data.read_bytes()[1:])
    assert "DAMAGED" in ckpt("verify", saved, "--step", 1, code=1)
    assert "__1_0.distcp: bytes 0 to" in ckpt("verify", saved / "step-00000001-aa", code=1)
    assert "no complete checkpoint of step 3; it has those of [1, 2]" in ckpt(
        "verify", saved, "--step", 3, code=2
    )
    assert "has no complete checkpoint" in ckpt("verify", saved.parent / "x", code=2)


def test_show(saved: Path) -> None:
    text = ckpt("show", saved)
    assert 'mesh           [["tp", 2]]' in text
    assert "float32    [48, 16]         model.h.0.attn.weight" in text
    found = json.loads(ckpt("show", saved, "--json"))
    assert (found["step"], found["ranks"]) == (2, 2)
    assert found["tensors"]["optimizer.first_moment.ln_f.bias"]["shape"] == [16]
    (saved / "step-00000002-aa" / "part-00001.json").unlink()
    assert "is damaged: part-00001.json cannot be read" in ckpt("show", saved, code=2)


def test_diff(saved: Path) -> None:
    text = ckpt("diff", saved, saved, "--step", 1, code=1)
    assert text.splitlines()[0] == "model.ln_f.bias: 16 of 16 elements, by 0.5 at most"
    assert text.endswith("1 differ\n")
    assert ckpt("diff", saved, saved).endswith(" are equal, 0 differ\n")


def test_prune(saved: Path) -> None:
    assert ckpt("prune", saved, "--keep", 1) == "removed step-00000001-aa\n"
    (saved / "step-00000002-aa" / "plan.json").touch()
    assert ckpt("prune", saved, "--keep", 1) == ""


def test_reshard(saved: Path, tmp_path: Path, model: models.GPT) -> None:
    other = msc.compile(model, models.tokens(), mesh="pp=2,dp=2", optimizer=msc.AdamW())
    other.save(tmp_path / "program")
    target = tmp_path / "resharded"
    command = ("reshard", saved, target, "--program", tmp_path / "program")
    ckpt(*command)
    assert ckpt("diff", saved, target).endswith(" are equal, 0 differ\n")
    storage = LocalStorage(target)
    (found,) = checkpoints(storage)
    commit = read_commit(storage, found.folder)
    assert len(commit.parts) == 4
    assert commit.state["mesh"] == [["pp", 2], ["dp", 2]]
    assert "has a complete checkpoint of step 2 already" in ckpt(*command, code=2)


def test_export_and_load(saved: Path, tmp_path: Path, model: models.GPT) -> None:
    assert "--hf is the one" in ckpt("export", saved, tmp_path / "hf", code=2)
    assert "'float' is no dtype" not in ckpt("export", saved, tmp_path / "one", "--hf")
    assert "no dtype of torch" in ckpt("export", saved, tmp_path, "--hf", "--dtype", "x", code=2)
    text = ckpt("export", saved, tmp_path / "hf", "--hf", "--shard-gb", 1e-5)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert len(text.splitlines()) == len(files) + 1
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    assert index["weight_map"].keys() == tensors.keys()
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(one[name], tensors[name]) for name in one)
    torch.manual_seed(1)
    again = models.GPT(width=16, heads=2, layers=2)
    again.load_state_dict(tensors)
    assert torch.equal(again.ln_f.bias, model.ln_f.bias + 0.5)
    assert torch.equal(again.state_dict()["h.1.up.weight"], model.state_dict()["h.1.up.weight"])
    ckpt("export", saved, tmp_path / "half", "--hf", "--dtype", "bfloat16")
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert half["wpe.weight"].dtype == torch.bfloat16
