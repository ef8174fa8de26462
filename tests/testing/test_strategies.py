"""What the strategies draw is legal, varied, and shrinks to something small."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch import fx

import msc
from msc.ir.structure import placeholders
from msc.testing import TransformerConfig

QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
FIND = settings(
    max_examples=2000, deadline=None, database=None, phases=[Phase.generate, Phase.shrink]
)


@QUICK
@given(st.data(), st.integers(1, 8))
def test_meshes_stay_within_their_limits(data: st.DataObject, largest: int) -> None:
    mesh = data.draw(msc.testing.meshes(largest, pp=2, tp=3))
    assert 1 <= mesh.size <= largest
    assert mesh.axis_size("pp") <= 2
    assert mesh.axis_size("tp") <= 3


@pytest.mark.parametrize(
    "wanted", [{"pp": 2, "dp": 2, "tp": 2}, {"tp": 8}, {"dp": 8}, {"pp": 8}, {"dp": 3, "tp": 2}]
)
def test_meshes_reach(wanted: dict[str, int]) -> None:
    def is_wanted(mesh: msc.Mesh) -> bool:
        return {name: size for name, size in mesh if size > 1} == wanted

    assert is_wanted(find(msc.testing.meshes(), is_wanted, settings=FIND))


def test_meshes_shrink_to_one_rank() -> None:
    assert find(msc.testing.meshes(), lambda mesh: True, settings=FIND).size == 1


@QUICK
@given(msc.testing.transformer_configs(divisible=True))
def test_divisible_configs(config: TransformerConfig) -> None:
    sizes = (config.vocabulary, config.heads, config.kv_heads, config.inner, config.length)
    assert all(size % 4 == 0 for size in sizes)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.vocabulary % 2 and c.tied,
        lambda c: c.heads % 2 and c.fused,
        lambda c: c.inner == 1 and c.gated,
        lambda c: c.kv_heads < c.heads and c.norm == "rms",
        lambda c: c.dropout and not c.bias,
        lambda c: c.length == 1,
    ],
)
def test_configs_reach(wanted: Any) -> None:
    assert wanted(find(msc.testing.transformer_configs(dropout=True), wanted, settings=FIND))


@QUICK
@given(msc.testing.transformer_configs(dropout=True), st.integers(1, 3))
def test_models_run(config: TransformerConfig, samples: int) -> None:
    model = msc.testing.Transformer(config)
    loss = model(*msc.testing.transformer_batch(config, samples))
    loss.backward()
    assert bool(loss.detach().isfinite())
    assert all(p.grad is not None for p in model.parameters())
    assert (model.head.weight is model.embed.weight) == config.tied


def test_models_are_the_same_each_time_and_leave_the_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second = (msc.testing.Transformer(TransformerConfig()) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    config = TransformerConfig(vocabulary=7)
    model = msc.testing.Transformer(config)
    model.embed.weight.requires_grad_(False)
    batch = msc.testing.transformer_batch(config, samples=2)
    return msc.testing.forward_graph(model, batch)


def test_forward_graphs_are_normalized_and_exact(graph: fx.GraphModule) -> None:
    (term,) = graph.graph.find_nodes(op="call_function", target=torch.ops.msc.nll_terms.default)
    assert term.args[0].meta["val"].dtype == torch.float64
    by_name = {node.meta["name"]: node.meta for node in placeholders(graph)}
    assert by_name["ids"]["batch_dim"] == 0
    assert not by_name["embed.weight"]["requires_grad"]
    assert by_name["head.weight"]["requires_grad"]


def test_random_values_are_in_range(graph: fx.GraphModule) -> None:
    values = {node.meta["name"]: v for node, v in msc.testing.random_values(graph).items()}
    assert set(values["ids"].flatten().tolist()) <= set(range(7))
    for node, value in msc.testing.random_values(graph).items():
        assert (value.shape, value.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)
    (loss,) = fx.Interpreter(graph).run(*values.values())
    assert bool(loss.isfinite())


def test_a_copy_is_independent(graph: fx.GraphModule) -> None:
    copied = msc.testing.copy_graph(graph)
    assert str(copied.graph) == str(graph.graph)
    next(iter(copied.graph.nodes)).meta["name"] = "changed"
    assert next(iter(graph.graph.nodes)).meta["name"] != "changed"


@pytest.mark.parametrize("name", msc.testing.PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(msc.testing, name).__name__ == name
    assert name in dir(msc.testing)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'msc\.testing' has no attribute 'nothing'"):
        _ = msc.testing.nothing


def test_parity_needs_no_hypothesis() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None; import msc\n"
        "print(msc.testing.assert_pass_parity.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("assert_pass_parity\n", "")
