"""Sizes that tp does not divide are split in unequal parts, and nothing changes but the shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import msc
from tests import models


def batch(vocabulary: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (samples, length), generator=generator)
    labels = torch.randint(vocabulary, (samples, length), generator=generator)
    labels[0, :3] = -100
    return tokens, labels


def subgraph(graph: fx.GraphModule, name: str) -> fx.GraphModule:
    found = graph.get_submodule(name)
    assert isinstance(found, fx.GraphModule)
    return found


CASES = [
    ("vocabulary", models.GPT(vocabulary=97, layers=2), batch(97, 4, 8), "tp=2", 1),
    ("vocabulary", models.GPT(vocabulary=97, layers=2), batch(97, 4, 8), "pp=2,dp=2,tp=2", 2),
    ("vocabulary", models.Llama(vocabulary=99, layers=2), batch(99, 4, 8), "tp=4", 1),
    ("everything", models.GPT(vocabulary=97, layers=2), batch(97, 2, 7), "dp=2,tp=3", 1),
    ("dropout", models.GPT(vocabulary=97, layers=2, dropout=0.2), batch(97, 1, 7), "tp=3", 1),
]


@pytest.mark.parametrize(("what", "model", "inputs", "mesh", "micro_batches"), CASES)
def test_parity(
    what: str, model: nn.Module, inputs: tuple[Tensor, Tensor], mesh: str, micro_batches: int
) -> None:
    report = msc.verify(model, inputs, mesh=mesh, microbatches=micro_batches, dtype=torch.float64)
    assert report.ok, report.first_difference
    assert report.sharded["tp"]["flops"] > 0.95
    assert report.sharded["tp"]["parameters"] > 0.95


def test_a_table_of_a_prime_number_of_rows_is_split() -> None:
    program = msc.compile(models.GPT(vocabulary=97), batch(97, 4, 8), mesh="pp=2,tp=4")
    layout = program.parameters["wte.weight"]
    assert str(layout.shards["tp"]) == "S0@1"
    shapes = [layout.local_shape(program.mesh, rank)[0] for rank in range(4)]
    assert shapes == [25, 24, 24, 24]
    assert program.class_names == ["stage0.tp0", "stage0.tp1", "stage1.tp0", "stage1.tp1"]
    assert [program.class_of(rank) for rank in range(8)] == [0, 1, 1, 1, 2, 3, 3, 3]
    # the layers split evenly, so their graphs are shared
    first, second = (subgraph(program.rank_graphs[i], "chunk0_forward") for i in (0, 1))
    shared = {str(n.target) for n in first.graph.find_nodes(op="call_module")}
    alike = [
        target for target in shared if first.get_submodule(target) is second.get_submodule(target)
    ]
    assert any(t.startswith("block1") for t in alike)


def test_training_and_saving(tmp_path: Path) -> None:
    model, inputs = models.GPT(vocabulary=97, layers=2).double(), batch(97, 4, 8)
    optimizer = msc.AdamW(lr=1e-2)
    program = msc.compile(model, inputs, mesh="tp=3", optimizer=optimizer)
    program.save(tmp_path)
    loaded = [msc.load(tmp_path, rank) for rank in range(3)]
    assert {one.fingerprint for one in loaded} == {program.fingerprint}
    for rank, one in enumerate(loaded):
        own = program.initial_state(rank).parameters
        for name, value in one.initial_state(rank).parameters.items():
            assert torch.equal(value, own[name])
    alone = msc.compile(model, inputs, optimizer=optimizer)
    state, state_alone = None, None
    for _ in range(5):
        result = loaded[0].run_virtual(inputs, state)
        expected = alone.run_virtual(inputs, state_alone)
        state, state_alone = result.state, expected.state
    for name, value in expected.params.items():
        torch.testing.assert_close(result.params[name], value, rtol=0, atol=1e-10)


class Odd(nn.Module):
    """No size that two or three ranks split evenly, and a mean over a sharded dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 17)
        self.norm = nn.LayerNorm(17)
        self.down = nn.Linear(17, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.cat([functional.gelu(self.up(x)), self.norm(self.up(x))], dim=-1)
        out = self.down(hidden[..., :17] * hidden[..., 17:]).cumsum(1)
        loss: Tensor = ((out - out.mean(-1, keepdim=True) - y) ** 2).mean() + out.amax(-1).mean()
        return loss


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4", "dp=5,tp=2"])
def test_odd_sizes(mesh: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 7, 5, generator=generator) for _ in range(2))
    torch.manual_seed(0)
    report = msc.verify(Odd(), (x, y), mesh=mesh, dtype=torch.float64)
    assert report.ok, report.first_difference


def test_heads_that_a_pin_splits_unevenly() -> None:
    """Three heads of eight over two ranks: rows of q, k and v in units of a head."""
    pins = {"h.*.attn.weight": {"tp": msc.Shard(0, 3, unit=8)}}
    model, inputs = models.GPT(width=24, heads=3, layers=2), models.tokens()
    report = msc.verify(model, inputs, mesh="dp=2,tp=2", pins=pins, dtype=torch.float64)
    assert report.ok, report.first_difference
    program = msc.compile(model, inputs, mesh="dp=2,tp=2", pins=pins)
    layout = program.parameters["h.1.attn.weight"]
    assert [layout.local_shape(program.mesh, rank) for rank in (0, 1)] == [(48, 24), (24, 24)]
    assert "S0/3@8" in str(program.explain("h.1.attn"))
    again = msc.compile(model, inputs, mesh="dp=2,tp=2", plan=program.plan)
    assert again.fingerprint == program.fingerprint


def test_clipping_and_drawn_values_know_unequal_parts() -> None:
    with torch.device("meta"):
        model = models.GPT(vocabulary=97, layers=2)
    msc.init(model, seed=3)
    inputs = batch(97, 4, 8)
    results = []
    for mesh in ("", "tp=2", "pp=2,tp=3"):
        optimizer = msc.AdamW(lr=1e-2, max_norm=0.1)
        program = msc.compile(model, inputs, mesh=mesh, optimizer=optimizer, precision="float64")
        results.append(program.run_virtual(inputs))
    for other in results[1:]:
        torch.testing.assert_close(other.grad_norm, results[0].grad_norm, rtol=1e-10, atol=0)
        for name, value in results[0].params.items():
            torch.testing.assert_close(other.params[name], value, rtol=0, atol=1e-10)
