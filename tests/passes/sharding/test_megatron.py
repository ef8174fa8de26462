"""What the search finds beside Megatron-LM's plan, written down by hand and priced by the tests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import msc
from msc.cost import Cluster, CostModel
from msc.cost.flops import is_gemm
from msc.fallbacks import forward_flops
from msc.ir.placement import PARTIAL, REPLICATED, VARYING, Segments, Shard, State, sharded
from msc.ir.structure import placeholders
from msc.ir.values import operand_nodes
from msc.passes.compilation import Compilation
from msc.passes.sharding.calls import operands_of
from msc.passes.sharding.rule import Strategy
from msc.testing import Transformer, TransformerConfig, transformer_batch, transformer_configs
from tests.passes.graphs import captured, through
from tests.passes.sharding.placing import Chosen, Problem, ops_of, states_of

GPT = TransformerConfig(
    vocabulary=64, heads=8, kv_heads=8, head_width=4, inner=128, length=16, fused=True, tied=True
)
LLAMA = replace(GPT, norm="rms", activation="silu", gated=True, fused=False, tied=False, bias=False)
LLAMA = replace(LLAMA, positions=False)
FAST = CostModel(Cluster("fast", 1e15, 3e12, 8e10, 8, 4e11, 5e10))
LATENT = CostModel(Cluster("launch-bound", 1e15, 3e12, 8e10, 8, 4e11, 5e10, 1e-3, 1e-2, 1e-3))
CLUSTERS = {"no cluster": CostModel(), "cluster": FAST, "launch-bound": LATENT}

COLUMNS = ("qkv", "q", "k", "v", "up", "gate", "head", "embed")
ROWS = ("out", "down")


def compiled(config: TransformerConfig, mesh: str, samples: int = 1, **options: Any) -> Compilation:
    """One sequence on each rank, unless told otherwise: its positions are what is left to split."""
    batch = transformer_batch(config, samples)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(config)

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.model(ids, targets),)

    return captured(Loss(), mesh, batch, **options)


class Megatron:
    """Megatron-LM's tensor and sequence parallelism as one choice for every node.

    Columns of the projections into attention and MLP, rows of those out of them, the vocabulary of
    both embeddings; tokens of a sequence between them. Everything else runs in the state in which
    its operands are.
    """

    def __init__(self, problem: Problem, config: TransformerConfig) -> None:
        self.problem = problem
        self.config = config
        self.chosen: Chosen = {}
        tied: dict[str, State] = {}
        for node, _ in problem.nodes():
            if node.op == "placeholder":
                self.chosen[node] = self._placeholder(node, tied)
            else:
                self.chosen[node] = self._call(node)

    def cost(self) -> float:
        return min(self.problem.cost(self.chosen, end) for end in (REPLICATED, PARTIAL))

    def _placeholder(self, node: fx.Node, tied: dict[str, State]) -> State:
        if node.meta["kind"] == "value":
            return sharded(1)
        if node.meta["kind"] != "parameter":
            return REPLICATED
        *_, module, kind = node.meta["name"].split(".")
        segments: Segments = 3 if module == "qkv" else 1
        if module in COLUMNS:
            return sharded(0, segments)
        return sharded(1) if module in ROWS and kind == "weight" else VARYING

    def _call(self, node: fx.Node) -> Strategy:
        options = self.problem.candidates.strategies[node]
        wanted = [self._have(value) for value in operands_of(node)]
        if is_gemm(node.target) or "embedding" in str(node.target):
            weights = [i for i, o in enumerate(operand_nodes(node)) if self._weight(o)]
            exact = [s for s in options if all(s.operands[i] == wanted[i] for i in weights)]
            options = [s for s in exact if s.factor is not None] or exact
        sequence = [s for s in options if s.results[0] == sharded(1)]
        if self._between(node) and sequence:
            return sequence[0]
        return min(options, key=lambda s: self._price(node, s))

    def _between(self, node: fx.Node) -> bool:
        """Norms, the residual sums, and what comes before the first layer and after the last."""
        last = str(node.meta.get("module_path", "")).split(".")[-1]
        added = str(node.target) == "aten.add.Tensor" and last not in (*COLUMNS, *ROWS)
        shape = node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else ()
        return ("norm" in last or added) and len(shape) == 3 and shape[-1] == self.config.width

    def _weight(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.meta["kind"] == "parameter"

    def _have(self, value: tuple[fx.Node, int]) -> State:
        choice = self.chosen[value[0]]
        return choice if isinstance(choice, State) else choice.results[value[1]]

    def _price(self, node: fx.Node, strategy: Strategy) -> tuple[float, bool]:
        moved = zip(operands_of(node), strategy.operands, strict=True)
        price = sum(self.problem._conversion(v, self._have(v), want) for v, want in moved)
        return price, strategy.factor is None


@pytest.mark.parametrize("model", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("head_width", [4, 32])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_plan_is_never_dearer_than_megatrons(
    config: TransformerConfig, head_width: int, size: int, model: CostModel
) -> None:
    config = replace(config, head_width=head_width, inner=32 * head_width, layers=3)
    unit = through("shard-batch", compiled(config, ""))
    problem = Problem.of(unit, size, model)
    by_hand = Megatron(problem, config).cost()
    assert math.isfinite(by_hand)
    assert 0 < problem.search().cost <= by_hand * (1 + 1e-9)


def split(unit: Compilation) -> tuple[float, float]:
    """The fractions of FLOPs and of the weights' elements that tp splits."""
    assert unit.placed is not None
    counts = unit.structure.counts
    work = {True: 0, False: 0}
    for name, gm in unit.structure.blocks.items():
        for node in gm.graph.nodes:
            if node in unit.placed.strategies:
                whole = unit.placed.strategies[node].factor is None
                work[whole] += counts[name] * forward_flops(node)
    held = {True: 0, False: 0}
    for node, state in unit.placed.placeholders.items():
        if node.meta["kind"] == "parameter" and node.meta["val"].dim() > 1:
            held[not isinstance(state.value, Shard)] += node.meta["val"].numel()
    return work[False] / sum(work.values()), held[False] / sum(held.values())


@given(
    transformer_configs(divisible=True), st.sampled_from(sorted(CLUSTERS)), st.sampled_from([2, 4])
)
@settings(deadline=None, max_examples=12)
def test_tiny_models_are_split_too(config: TransformerConfig, cluster: str, size: int) -> None:
    """However little there is to gain: who asks for tp wants the model split."""
    unit = through("place", compiled(config, f"dp=2,tp={size}", 4, cost=CLUSTERS[cluster]))
    flops, weights = split(unit)
    assert flops >= 0.9
    assert weights == 1.0 if cluster != "no cluster" else weights > 0.5
    for name, gm in unit.structure.blocks.items():
        states = unit.batch[name].states
        for node in placeholders(gm):
            if node.meta["kind"] == "value":
                assert isinstance(states[node, 0].value, Shard), node  # the batch stays split


GROUPED = replace(LLAMA, kv_heads=2, head_width=8, inner=128)


@pytest.mark.parametrize("model", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("size", [4, 8])
def test_fewer_key_heads_than_ranks(size: int, model: CostModel) -> None:
    """No way of running the projections and the attention is cheaper than the one found."""
    given = Problem.of(through("shard-batch", compiled(GROUPED, "")), size, model)
    found = given.search()
    paths = ("layers.1.q", "layers.1.k", "layers.0.q", "layers.0.k")
    calls = [
        node
        for node in given.candidates.strategies
        if "msc.attention" in str(node.target)
        or str(node.meta.get("module_path", "")).endswith(paths)
    ]
    assert len(calls) >= 3
    for node in calls:
        listed = given.candidates.strategies[node]
        forced = []
        for strategy in listed:
            given.candidates.strategies[node] = [strategy]
            forced.append(given.search().cost)
        given.candidates.strategies[node] = listed
        assert min(forced) == pytest.approx(found.cost, rel=1e-9)
        assert len(set(forced)) > 1


def test_query_heads_of_each_group_are_split() -> None:
    """Two key heads for eight of queries on four ranks: each has a query head of either group."""
    unit = through("differentiate", compiled(replace(GROUPED, layers=4), "dp=2,tp=4", 2))
    assert unit.placed is not None
    found = states_of(unit.placed)
    layer = {key: found[f"model.layers.0.{key}.weight"] for key in ("q", "out", "up", "down")}
    assert layer == {"q": "S0/2", "out": "S1/2", "up": "S0", "down": "S1"}
    forward = unit.variants[0].differentiated["block1"].forward
    assert ops_of(forward, "reduce_scatter", "all_reduce") == {"reduce_scatter": 2, "all_reduce": 0}


@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=4"])
def test_fewer_key_heads_than_ranks_keep_the_numbers(mesh: str) -> None:
    config = replace(GROUPED, layers=1, length=5)  # positions that four ranks do not split
    batch = transformer_batch(config, 2)
    found = msc.verify(Transformer(config), batch, mesh=mesh, dtype=torch.float64)
    assert found.ok, found
