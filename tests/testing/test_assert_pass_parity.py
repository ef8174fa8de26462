"""A user's right pass passes, and each kind of wrong one is caught by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, fx, nn

import msc
from msc.ir.passes import BIT_EXACT
from msc.ir.values import carry

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitScale(msc.GraphPass):
    """silu(x) -> x * sigmoid(x), so that the two can be moved apart."""

    name: ClassVar[str] = "split-silu"
    numerics: ClassVar[str] = "rounds once more"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        changes = 0
        for node in gm.graph.find_nodes(op="call_function", target=aten.silu.default):
            with gm.graph.inserting_before(node):
                gate = carry(node, gm.graph.call_function(aten.sigmoid.default, node.args))
                product = gm.graph.call_function(aten.mul.Tensor, (*node.args, gate))
            gate.meta["val"] = node.meta["val"]
            carry(node, product).meta["val"] = node.meta["val"]
            node.replace_all_uses_with(product)
            gm.graph.erase_node(node)
            changes += 1
        return changes


@dataclass(frozen=True)
class WrongGate(SplitScale):
    """Uses tanh where the sigmoid belongs."""

    name: ClassVar[str] = "wrong-gate"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        changes = super().run(gm, unit)
        for node in gm.graph.find_nodes(op="call_function", target=aten.sigmoid.default):
            node.target = aten.tanh.default
        return changes


@dataclass(frozen=True)
class LostGradient(SplitScale):
    """Keeps every value, and loses a part of the gradient."""

    name: ClassVar[str] = "lost-gradient"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        changes = super().run(gm, unit)
        for node in gm.graph.find_nodes(op="call_function", target=aten.sigmoid.default):
            with gm.graph.inserting_after(node):
                copy = carry(node, gm.graph.call_function(aten.detach.default, (node,)))
            copy.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, own=copy: user is not own)
        return changes


@dataclass(frozen=True)
class Miscounts(SplitScale):
    name: ClassVar[str] = "miscounts"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        super().run(gm, unit)
        return 0


CONFIG = msc.testing.TransformerConfig(
    activation="silu", gated=True, layers=2, heads=4, kv_heads=4, vocabulary=12, inner=8
)


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    batch = msc.testing.transformer_batch(CONFIG, samples=4)
    return msc.testing.forward_graph(msc.testing.Transformer(CONFIG), batch)


def count(gm: fx.GraphModule, target: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [("", 1), ("", 2), ("tp=2", 1), ("pp=2,dp=2", 2), ({"pp": 2, "dp": 2, "tp": 2}, 2)],
)
def test_a_right_pass(graph: fx.GraphModule, mesh: Any, microbatches: int) -> None:
    before = str(graph.graph)
    rewritten = msc.testing.assert_pass_parity(SplitScale(), graph, mesh, microbatches=microbatches)
    assert (count(graph, aten.silu.default), count(rewritten, aten.silu.default)) == (2, 0)
    assert count(rewritten, aten.sigmoid.default) == 2
    assert str(graph.graph) == before


def test_a_wrong_value_is_found(graph: fx.GraphModule) -> None:
    with pytest.raises(AssertionError, match=r"'wrong-gate' changes .*: output 0 has an error"):
        msc.testing.assert_pass_parity(WrongGate(), graph)


def test_a_lost_gradient_is_found(graph: fx.GraphModule) -> None:
    with pytest.raises(AssertionError, match=r"'lost-gradient' changes .*: the gradient of "):
        msc.testing.assert_pass_parity(LostGradient(), graph)


def test_a_wrong_number_of_changes_is_found(graph: fx.GraphModule) -> None:
    with pytest.raises(msc.VerifyError, match="miscounts"):
        msc.testing.assert_pass_parity(Miscounts(), graph)


def test_a_difference_on_the_mesh_alone_is_found(
    graph: fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msc.testing import parity

    original = parity._run_parallel

    def wrong(*args: Any) -> Any:
        result = original(*args)
        result.grads["layers.1.up.weight"] *= 2
        return result

    monkeypatch.setattr(parity, "_run_parallel", wrong)
    message = r"on mesh dp=2 with 1 micro-batches differs .*: the gradient of layers\.1\.up\.weight"
    with pytest.raises(AssertionError, match=message):
        msc.testing.assert_pass_parity(SplitScale(), graph, "dp=2")


def test_a_batch_that_does_not_split(graph: fx.GraphModule) -> None:
    with pytest.raises(msc.UserError, match="has 4 samples, which do not split over 3 parts"):
        msc.testing.assert_pass_parity(SplitScale(), graph, "dp=3")


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.tanh(h - h.mean(0)).square().mean()


def test_a_loss_that_is_no_sum_needs_one_micro_batch() -> None:
    graph = msc.testing.forward_graph(Centred(), (torch.randn(4, 4),))
    msc.testing.assert_pass_parity(SplitScale(), graph, "dp=2")
    with pytest.raises(msc.UserError, match=r"no sum over samples .*Use microbatches=1"):
        msc.testing.assert_pass_parity(SplitScale(), graph, "dp=2", microbatches=2)


@dataclass(frozen=True)
class Nothing(msc.GraphPass):
    name: ClassVar[str] = "nothing"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        return 0


SLOW = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@SLOW
@given(msc.testing.forward_graphs(dropout=True), msc.testing.meshes(max_ranks=4, dp=2, pp=1))
def test_on_drawn_graphs(graph: fx.GraphModule, mesh: msc.Mesh) -> None:
    msc.testing.assert_pass_parity(SplitScale(), graph, mesh, microbatches=2)
    msc.testing.assert_pass_parity(Nothing(), graph)
