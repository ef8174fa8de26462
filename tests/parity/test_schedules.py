"""Every schedule computes what one device does: any stages, virtual stages and micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import msc
from msc.verification import Reference
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import parameter_errors, step_errors
from tests.passes.graphs import assert_parity, layers

pytestmark = pytest.mark.usefixtures("capture_once")


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    stages=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(
        [("gpipe", 1), ("gpipe", 2), ("gpipe", 3), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)]
        + [("interleaved", v) for v in (1, 2, 3)]
        + [("auto", v) for v in (None, 1, 2, 3)]
    ),
    micro_batches=st.integers(1, 9),
    others=st.sampled_from(["", ",tp=2", ",dp=2"]),
    more=st.integers(0, 2),
    tied=st.booleans(),
)
def test_any_combination(
    stages: int,
    schedule: tuple[str, int | None],
    micro_batches: int,
    others: str,
    more: int,
    tied: bool,
) -> None:
    """Chunks are of equal or of unequal numbers of layers; the head may be the input's weight."""
    name, virtual = schedule
    gm = layers(
        stages * (virtual or 2) + more,
        tied=tied,
        samples=micro_batches * (2 if others == ",dp=2" else 1),
    )
    mesh = f"pp={stages}{others}"
    assert_parity(gm, mesh, micro_batches, schedule=name, virtual_stages=virtual)


class Counting(nn.Module):
    """Layers that all read a buffer which the forward writes once, and drop out."""

    count: Tensor

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(num_layers))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            dropped = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
            x = x + dropped / self.count
        return x.square().mean()


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2", {"schedule": "interleaved", "virtual_stages": 3, "microbatches": 3}),
        ("pp=2,tp=2", {"schedule": "zb-h1", "microbatches": 4}),
        ("pp=3,dp=2", {"schedule": "zb-v", "microbatches": 3}),
    ],
)
def test_training_with_buffers_and_dropout(mesh: str, options: dict[str, Any]) -> None:
    """Chunks of one rank are at different micro-batches: each sees the buffer of its own."""
    torch.manual_seed(0)
    model = Counting(6).double()
    batches = [(torch.randn(12, 12, dtype=torch.float64),) for _ in range(2)]
    results = []
    for program in (
        msc.compile(model, batches[0], microbatches=options["microbatches"], optimizer=ADAMW),
        msc.compile(model, batches[0], mesh=mesh, optimizer=ADAMW, **options),
    ):
        state = None
        for batch in batches:
            result = program.run_virtual(batch, state, seed=3)
            state = result.state
        results.append(result)
    expected, found = results
    assert float(found.buffers["count"]) == 2 * options["microbatches"]
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.grad_norm, expected.grad_norm, rtol=1e-10, atol=0)
    assert parameter_errors(found.params, expected.params) == {}


ADAMW = msc.AdamW(lr=1e-2, max_norm=0.1)


def test_verify_and_a_saved_program(tmp_path: Path) -> None:
    config = msc.testing.TransformerConfig(layers=4)
    model = msc.testing.Transformer(config)
    batch = msc.testing.transformer_batch(config, 6)
    options: dict[str, Any] = {"mesh": "pp=2,tp=2", "schedule": "zb-v", "microbatches": 3}
    report = msc.verify(model, batch, dtype=torch.float64, **options)
    assert report.ok, report.first_difference
    assert report.max_error <= 1e-10
    program = msc.compile(model, batch, precision="float64", **options)
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    assert loaded.report.schedule == program.report.schedule
    assert loaded.report.chunk_stages == (0, 1, 1, 0)
    loss, grads = Reference(program, model, batch, {}).run(batch)
    assert step_errors(loaded, loaded.run_virtual(batch), loss, grads) == {}
    kinds = ("forward", "backward", "weight_backward")
    chunks = {f"chunk{chunk}.{kind}" for chunk in (0, 3) for kind in kinds}
    assert set(loaded.graphs(0)) == {*chunks, "prologue"}
