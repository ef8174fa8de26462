"""Buckets of gradients leave when they are complete, at a step's end in the midst of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import msc
from benchmarks.models import GPTConfig, GPTWithLoss
from msc.ir import actions
from msc.ir.communication import COLLECTIVES, group_of
from msc.ir.optimizer import AdamW
from msc.passes.compilation import Compilation
from msc.runtime.memory.predict import MemoryPredictor
from tests import models
from tests.passes.graphs import compilation, layers, through

SETTINGS: dict[str, Any] = {"optimizer": AdamW(lr=0.1), "bucket_bytes": 1024}
WGRAD = torch.ops.msc.linear_wgrad.default
BGRAD = torch.ops.msc.linear_bgrad.default
SLOW = (WGRAD, torch.ops.msc.linear_dgrad.default, torch.ops.msc.attention_backward.default)


def rank_graph(last: str, num_layers: int = 4, mesh: str = "dp=2", **settings: Any) -> Any:
    unit: Compilation = compilation(layers(num_layers), mesh, 2, **(SETTINGS | settings))
    return through(last, unit).rank_graphs[0]


def starts(gm: fx.GraphModule) -> list[fx.Node]:
    """Reductions of gradients over dp, in order."""
    kinds = ("all_reduce", "reduce_scatter")
    found = [n for n in gm.graph.nodes if COLLECTIVES.get(n.target) in kinds]
    return [n for n in found if group_of(n) == "dp" and n.meta["val"].ndim]


def opened(gm: fx.GraphModule) -> list[str]:
    """The modules whose weight's gradient is made in the step's graph itself."""
    return [n.meta["module_path"] for n in gm.graph.nodes if n.target is WGRAD]


def test_the_first_and_the_last_layer_of_the_last_backward_are_opened() -> None:
    """The first of the model is shorter, since nothing needs the gradient of its input."""
    numbers = [path.removesuffix(".up") for path in opened(rank_graph("reduce-early", 5))[2::2]]
    assert numbers == ["layers.4", "layers.1", "layers.0"]
    assert opened(rank_graph("gather-late")) == []


def test_the_last_bucket_leaves_before_the_last_gradient_is_made() -> None:
    gm = rank_graph("reduce-early", bucket_bytes=1)  # a bucket for each weight
    *_, last_but_one, last = starts(gm)
    gradients = [n for n in gm.graph.nodes if n.target is WGRAD]
    assert last_but_one < gradients[-1] < last


def test_one_layer() -> None:
    found = opened(rank_graph("check-communication", num_layers=1))
    assert found == ["head", "layers.0.down", "layers.0.up"]


def test_biases_do_not_keep_their_bucket() -> None:
    """Elsewhere the gradient of a bias stands where it hides a collective of tp."""
    config = GPTConfig(layers=2, hidden=8192, heads=64, sequence=1024, vocabulary=1024)
    with torch.device("meta"):
        model, ids = GPTWithLoss(config).bfloat16(), torch.zeros((64, 1024), dtype=torch.int64)
    program = msc.compile(
        model, (ids, ids), mesh="dp=32,tp=8", optimizer=msc.AdamW(lr=0.1), cluster="a100"
    )
    order = list(program.rank_graphs[0].graph.nodes)
    with_bias = 0
    for bucket in (n for n in order if n.target is actions.flatten):
        made = [n for n in bucket.all_input_nodes if n.target in (WGRAD, BGRAD)]
        biases = [n for n in made if n.target is BGRAD]
        if len(made) > len(biases) > 0:
            with_bias += 1
            needed = [n for n in made if n.target is WGRAD] + [n.args[0] for n in biases]
            between = order[max(map(order.index, needed)) + 1 : order.index(bucket)]
            assert not any(n.target in SLOW for n in between)
    assert with_bias


def test_the_prediction_of_memory_holds_for_opened_blocks() -> None:
    opened, called = (
        MemoryPredictor().bytes(rank_graph(last)) for last in ("reduce-early", "gather-late")
    )
    assert opened <= called


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("nanogpt", "dp=2", {}),
        ("nanogpt", "dp=2,tp=2", {"zero": 1}),
        ("nanogpt", "pp=2,dp=2", {"schedule": "interleaved", "virtual_stages": 2, "zero": 2}),
        ("nanogpt", "dp=4", {"zero": 3}),
        ("qwen2", "pp=2,tp=2", {"schedule": "zb-h1"}),
        ("qwen2", "pp=2,tp=2", {"schedule": "auto", "cluster": "a100"}),
        ("qwen2", "pp=2,tp=2", {"schedule": "zb-v", "zero": 1}),
    ],
)
def test_the_step_is_the_same(name: str, mesh: str, options: dict[str, Any]) -> None:
    report = msc.verify(
        models.build(name),
        models.batch(name),
        mesh=mesh,
        dtype=torch.float64,
        microbatches=4 if "schedule" in options else 2,
        **options,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_where_only_norms_train(mesh: str, schedule: str) -> None:
    """All gradients of a bucket are made early in a backward, whose other half comes later."""
    model = models.build("nanogpt")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".ln_" in name)
    report = msc.verify(
        model,
        models.tokens(),
        mesh=mesh,
        dtype=torch.float64,
        microbatches=4,
        schedule=schedule,
    )
    assert report.ok, str(report)
