"""Serial blocks become parallel ones, exactly where the residual structure is theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import msc
from msc.capture.captured import Captured
from msc.capture.entry import capture
from msc.ir.ops.attention import ATTENTION
from msc.ir.rewrites import Finding
from msc.passes.normalize import normalize
from tests import models, zoo
from tests.passes.rewrites.block_models import (
    CAST_NORMS,
    NEAR_MISSES,
    NORMS,
    BlockConfig,
    Model,
    batch,
)

ONCE = "attention and MLP both read the stream; it is normalized once"
NO_NORM = (
    "reads the residual stream itself, not a norm of it: post-norm, or a norm of a form that is "
    "not known"
)
READ_BY = "the sum of stream and attention is read by"


def rewritten(
    model: nn.Module,
    inputs: Any,
    rewrite: msc.ParallelBlock | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Captured, list[Finding]]:
    found = capture(model, inputs, dtype=dtype)
    normalize(found.graph)
    findings = (rewrite or msc.ParallelBlock()).apply(found.graph)
    found.graph.graph.lint()
    found.graph.recompile()
    return found, findings


def changed(config: BlockConfig) -> list[bool]:
    return [each.changed for each in rewritten(Model(config), batch())[1]]


def gradients(
    graph: fx.GraphModule, model: nn.Module, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Loss and gradients of a captured graph at the model's values; absent ones are left out."""
    parameters = {n: p.detach().to(dtype).requires_grad_() for n, p in model.named_parameters()}
    inputs = dict(zip(("ids", "targets"), batch(), strict=True))
    values = {**parameters, **inputs, "rng": torch.tensor([3, 0])}
    arguments = [values[n.meta["name"]] for n in graph.graph.find_nodes(op="placeholder")]
    loss, *_ = fx.Interpreter(graph).run(*arguments)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    named = {n: g for n, g in zip(parameters, found, strict=True) if g is not None}
    return {"loss": loss.detach(), **named}


def assert_is_parallel(config: BlockConfig, rewrite: msc.ParallelBlock) -> None:
    """The rewritten model is the one that is written down as parallel blocks."""
    model = Model(config)
    found, findings = rewritten(model, batch(), rewrite)
    assert [each.changed for each in findings] == [True] * config.layers
    written = Model(replace(config, parallel=True, shared=rewrite.share_norm))
    expected = capture(written, batch(), dtype=torch.float64)
    normalize(expected.graph)
    got, wanted = gradients(found.graph, model), gradients(expected.graph, written)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


CONFIGS = st.builds(
    BlockConfig,
    norm=st.sampled_from(NORMS),
    second_eps=st.sampled_from([1e-5, 1e-3]),
    fused=st.booleans(),
    gated=st.booleans(),
    bias=st.booleans(),
    causal=st.booleans(),
    math=st.booleans(),
    twice=st.booleans(),
    dropout=st.sampled_from([0.0, 0.2]),
    scale=st.sampled_from(["", "vector", "gate"]),
    flatten=st.booleans(),
    swapped=st.booleans(),
    layers=st.just(1),
)


# Each example captures two models: what shrinking would gain takes minutes.
FEW = settings(deadline=None, max_examples=5, phases=[Phase.explicit, Phase.generate])


@given(CONFIGS, st.booleans())
@FEW
def test_a_rewritten_block_is_the_one_written_as_parallel(config: BlockConfig, share: bool) -> None:
    assert_is_parallel(config, msc.ParallelBlock(share_norm=share))


def test_a_layer_norm_that_is_written_out_is_a_norm() -> None:
    assert_is_parallel(BlockConfig(norm="layer-written-out"), msc.ParallelBlock())


@pytest.mark.parametrize("norm", CAST_NORMS)
def test_a_fused_norm_between_casts_is_a_norm(norm: str) -> None:
    """In float32, with norms in float64."""
    config = BlockConfig(norm=norm, layers=1)
    model = Model(config)
    found, (finding,) = rewritten(model, batch(), dtype=torch.float32)
    assert finding.what == ONCE
    written = Model(replace(config, parallel=True))
    expected = capture(written, batch(), dtype=torch.float32)
    normalize(expected.graph)
    got = gradients(found.graph, model, torch.float32)
    for name, value in gradients(expected.graph, written, torch.float32).items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)


def test_a_block_that_is_rewritten_is_parallel_already() -> None:
    found, _ = rewritten(Model(BlockConfig(layers=1)), batch())
    (finding,) = msc.ParallelBlock().apply(found.graph)
    assert finding.what == "attention and MLP read one stream already"


def test_what_picks_a_result_is_named_by_the_op_that_gives_it() -> None:
    model = Model(BlockConfig(layers=1))
    found = capture(model, batch(), dtype=torch.float64)
    normalize(found.graph)
    (attention,) = (n for n in found.graph.graph.nodes if n.target is ATTENTION)
    (picked,) = attention.users
    with found.graph.graph.inserting_after(picked):
        found.graph.graph.call_function(torch.ops.aten.sum.default, (picked,)).meta = dict(
            picked.meta
        )
    (finding,) = msc.ParallelBlock().apply(found.graph)
    assert finding.what.endswith(
        "outside of the attention reads msc.attention.default (layers.0.attention) of it"
    )


def test_two_attentions_of_one_branch_are_one_place() -> None:
    assert_is_parallel(BlockConfig(twice=True), msc.ParallelBlock())


@given(CONFIGS, st.sampled_from(NEAR_MISSES))
@FEW
def test_a_block_of_nearly_that_structure_is_left_alone(config: BlockConfig, near: str) -> None:
    config = replace(config, near_miss=near, flatten=False, fused=False)
    assert not any(changed(config))


REASONS = {
    "cross-attention": "the branch that follows the attention holds another attention",
    "no-gemm": "the branch that follows the attention holds no GEMM: it is no MLP",
    "sum-read": f"{READ_BY} aten.sum.default (layers.0) as well",
    "branch-read": "aten.sum.default (layers.0) outside of the attention reads aten.add.Tensor "
    "(layers.0.attention.out) of it",
    "sum-read-by-mlp": "the MLP reads the residual stream itself beside a norm of it",
    "mlp-without-norm": f"the MLP {NO_NORM}",
    "mlp-reads-embedding": "the MLP reads aten.sin.default, an activation beside the norm of its "
    "stream",
    "sum-dropped": f"{READ_BY} msc.dropout.default (layers.0), not by a norm and by the sum with "
    "an MLP",
    "post-norm": f"the attention {NO_NORM}",
    "sandwich": "post-norm: the attention ends in a norm",
    "parallel-already": "attention and MLP read one stream already",
    "parallel-in-two-sums": "attention and MLP read one stream already",
}


@pytest.mark.parametrize("near", REASONS)
def test_the_reason_stands_in_the_finding(near: str) -> None:
    """The last layer's: the first one's stream is the embedding that near misses read."""
    config = BlockConfig(near_miss=near, layers=2 if near == "mlp-reads-embedding" else 1)
    _, findings = rewritten(Model(config), batch())
    last = config.layers - 1
    reason = REASONS[near].replace("layers.0", f"layers.{last}")
    assert reason in {each.what for each in findings if each.where == f"layers.{last}"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "post-norm: the attention ends in a norm"),
        ("bert", f"the attention {NO_NORM}"),
        ("gpt-j", "attention and MLP read one stream already"),
    ],
)
def test_models_of_other_structure_are_left_alone(name: str, reason: str) -> None:
    with pytest.raises(msc.UserError) as error:
        msc.compile(zoo.build(name), zoo.batch(name, 2), rewrites=[msc.ParallelBlock()])
    assert str(error.value).count(f"left alone: {reason}") == zoo.LAYERS


@pytest.mark.parametrize("name", ["vit", "gemma"])
def test_models_of_transformers_are_rewritten(name: str) -> None:
    _, findings = rewritten(zoo.build(name), zoo.batch(name, 2))
    assert [each.what for each in findings] == [ONCE] * zoo.LAYERS


def test_different_norms_are_both_kept() -> None:
    _, (finding,) = rewritten(Model(BlockConfig(second_eps=1e-3, layers=1)), batch())
    assert finding.what == (
        "attention and MLP both read the stream; each normalizes it, as their norms differ "
        "(layer_norm eps=1e-05 and layer_norm eps=0.001)"
    )


def test_a_shared_norm_names_what_it_drops() -> None:
    model = Model(BlockConfig(layers=1))
    _, (finding,) = rewritten(model, batch(), msc.ParallelBlock(share_norm=True))
    assert finding.what == (
        "attention and MLP both read the stream; both read the attention's norm; "
        "layers.0.norm2.weight and layers.0.norm2.bias no longer read"
    )


def test_a_dropped_norm_stays_in_the_model_and_in_what_is_saved(tmp_path: Path) -> None:
    """It keeps its value, also under weight decay: nothing has a gradient for it."""
    model, inputs = Model(BlockConfig(layers=1)), batch()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    program = msc.compile(
        model,
        inputs,
        optimizer=msc.AdamW(lr=0.1, weight_decay=0.5),
        rewrites=[msc.ParallelBlock(share_norm=True)],
    )
    program.save(tmp_path)
    for each in (program, msc.load(tmp_path)):
        with msc.Trainer(each, [inputs]) as trainer:
            trainer.fit(1)
            after = trainer.state_dict()
        assert after.keys() == before.keys()
        kept = {name for name, value in after.items() if torch.equal(value, before[name])}
        assert {"layers.0.norm2.weight", "layers.0.norm2.bias"} <= kept
        assert "layers.0.norm1.weight" not in kept


def test_layers_choose() -> None:
    model = Model(BlockConfig(layers=3))
    _, findings = rewritten(model, batch(), msc.ParallelBlock(layers=range(1, 3)))
    assert [(each.where, each.what) for each in findings] == [
        ("layers.0", "not among the layers asked for"),
        ("layers.1", ONCE),
        ("layers.2", ONCE),
    ]
    assert msc.ParallelBlock(layers=[2, 0]) == msc.ParallelBlock(layers=(2, 0))


def test_a_layer_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(msc.UserError, match=r"names \[5\], but .* are 0, 1\."):
        rewritten(Model(BlockConfig()), batch(), msc.ParallelBlock(layers=[0, 5]))


@pytest.mark.parametrize("options", [{"share_norm": "yes"}, {"fuse_gemm": None}])
def test_switches_are_booleans(options: dict[str, Any]) -> None:
    with pytest.raises(msc.UserError, match="must be True or False"):
        msc.ParallelBlock(**options)


@pytest.mark.parametrize("layers", [[], range(0)])
def test_no_layers_are_refused(layers: Any) -> None:
    with pytest.raises(msc.UserError, match="names no layer"):
        msc.ParallelBlock(layers=layers)


@pytest.mark.parametrize("layers", [3, "all", [0.5], [-1], [True]])
def test_layers_that_are_no_numbers_are_refused(layers: Any) -> None:
    with pytest.raises(msc.UserError, match="must be numbers of layers"):
        msc.ParallelBlock(layers=layers)


def _zoo(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (zoo.build(name), zoo.batch(name, 4))


def _gpt() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return models.GPT(width=16, layers=2, dropout=0.1), models.tokens(samples=4)


def _blocks(**changes: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (Model(BlockConfig(**changes)), batch())


@pytest.mark.parametrize(
    ("build", "mesh", "microbatches", "share"),
    [
        (_zoo("gpt2"), "tp=2", 2, False),
        (_zoo("llama"), "pp=3,tp=2", 2, True),
        (_zoo("mistral"), "dp=2,tp=2", 2, False),
        (_zoo("opt"), "tp=2", 1, False),
        (_zoo("vit"), "pp=3,dp=2", 2, False),
        (_gpt, "pp=2,dp=2,tp=2", 2, False),
        (_blocks(dropout=0.2, scale="vector"), "dp=2,tp=2", 1, False),
    ],
    ids=["gpt2", "llama", "mistral", "opt", "vit", "gpt", "scaled"],
)
def test_every_mesh_computes_the_rewritten_model(
    build: Callable[[], tuple[nn.Module, Any]], mesh: str, microbatches: int, share: bool
) -> None:
    model, inputs = build()
    found = msc.verify(
        model,
        inputs,
        mesh=mesh,
        microbatches=microbatches,
        dtype=torch.float64,
        rewrites=[msc.ParallelBlock(share_norm=share)],
    )
    assert found.ok, found.first_difference
    assert found.max_error < 1e-10
