"""ZeRO computes what one device does, at every level, with every schedule, in any group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import msc
from msc.passes.forward_only import forward_only
from msc.program import Program
from msc.runtime.state import RankState
from msc.runtime.virtual import VirtualExecutor
from tests import models
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import parameter_errors
from tests.passes.graphs import assert_parity, layers

pytestmark = pytest.mark.usefixtures("capture_once")

DP = st.sampled_from([("dp=2", None), ("dp=3", None), ("dp=4", 2), ("dp=2,tp=2", None)])


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    zero=st.sampled_from([1, 2, 3]),
    dp=DP,
    stages=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(
        [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("auto", None)]
        + [("interleaved", v) for v in (2, 3)]
    ),
    micro_batches=st.integers(1, 9),
    more=st.integers(0, 2),
    tied=st.booleans(),
    recompute=st.sampled_from(["none", "full"]),
    fuse=st.booleans(),
)
def test_any_combination(
    zero: int,
    dp: tuple[str, int | None],
    stages: int,
    schedule: tuple[str, int | None],
    micro_batches: int,
    more: int,
    tied: bool,
    recompute: str,
    fuse: bool,
) -> None:
    """Three ranks do not divide any size, so that shards are padded."""
    mesh, group = dp
    name, virtual = schedule
    samples = micro_batches * int(mesh.split(",")[0].removeprefix("dp="))
    gm = layers(stages * (virtual or 2) + more, tied=tied, samples=samples)
    options: dict[str, Any] = {"schedule": name, "virtual_stages": virtual, "zero": zero}
    options |= {"recompute": recompute, "fuse_collectives": fuse}
    assert_parity(gm, f"pp={stages},{mesh}", micro_batches, shard_group=group, **options)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,tp=2", {"zero": 1}),
        ("pp=2,dp=2", {"zero": 2, "recompute": "full"}),
        ("dp=4", {"zero": 3, "shard_group": 2}),
    ],
)
def test_models(name: str, mesh: str, options: dict[str, Any]) -> None:
    report = msc.verify(
        models.build(name), models.batch(name), dtype=torch.float64, mesh=mesh, **options
    )
    assert report.max_error < 1e-10


def test_every_level_takes_the_same_steps(tmp_path: Path) -> None:
    """Also after a program was saved and loaded, and with evaluations between."""
    data = [models.tokens(seed) for seed in range(3)]
    found = []
    for zero in range(4):
        program = msc.compile(
            models.build("nanogpt"),
            models.tokens(),
            mesh="dp=2",
            microbatches=2,
            zero=zero,
            precision="float64",
            optimizer=msc.AdamW(lr=1e-2, max_norm=1.0),
        )
        program.save(tmp_path / str(zero))
        program = msc.load(tmp_path / str(zero))
        state: list[RankState] | None = None
        for batch in data:
            result = program.run_virtual(batch, state)
            state = result.state
        assert state is not None
        found.append((result.params, evaluated(program, data[0], state)))
    for params, loss in found[1:]:
        assert parameter_errors(params, found[0][0], 1e-9) == {}
        torch.testing.assert_close(loss, found[0][1], rtol=1e-12, atol=0.0)


def evaluated(program: Program, batch: Any, state: list[RankState]) -> Tensor:
    """The loss of a batch, by the graphs that compute nothing else."""
    graphs = [forward_only(program.rank_graph(rank)) for rank in range(program.mesh.size)]
    inputs = [program.local_inputs(batch, rank) for rank in range(program.mesh.size)]
    arguments = [
        each.arguments(graph, given)
        for each, graph, given in zip(state, graphs, inputs, strict=True)
    ]
    results = VirtualExecutor(program.mesh, lambda rank: graphs[rank]).run(arguments)
    loss: Tensor = results[0]["loss"]
    return loss


def test_memory_says_how_many_gradients_are_reduced_together() -> None:
    """The more a rank may hold, the more micro-batches are summed before they are reduced."""
    options: dict[str, Any] = {"mesh": "dp=2", "microbatches": 4, "zero": 2}
    options["optimizer"] = msc.AdamW()
    model = models.GPT(width=64, heads=4, layers=4)
    batch = models.tokens(samples=8)
    least = msc.compile(model, batch, **options)
    whole = msc.compile(model, batch, **{**options, "zero": 1})
    counts, needed = [], least.memory_bytes()[0]
    assert needed < whole.memory_bytes()[0]
    for memory in (needed, 2 * whole.memory_bytes()[0]):
        program = msc.compile(model, batch, memory=memory, **options)
        assert program.memory_bytes()[0] <= memory
        counts.append(program.report.collectives[0]["reduce_scatter_tensor over dp"][1])
        report = msc.verify(model, batch, dtype=torch.float64, memory=2 * memory, **options)
        assert report.max_error < 1e-10
    assert counts[0] == 4 * counts[1]
    assert counts[0] == least.report.collectives[0]["reduce_scatter_tensor over dp"][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "zero is 4; it is 0, 1, 2 or 3"),
        ({"zero": 1.0}, "zero is 1.0; it is 0, 1, 2 or 3"),
        ({"zero": True}, "zero is True"),
        ({"shard_group": 2}, "zero is 0, so nothing is split"),
        ({"zero": 1, "shard_group": 3}, r"does not divide dp=4.*Use one of 1, 2, 4"),
        ({"zero": 1, "shard_group": "2"}, "shard_group is '2'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(msc.PlanError, match=message):
        msc.compile(models.build("nanogpt"), models.tokens(), mesh="dp=4", **options)
