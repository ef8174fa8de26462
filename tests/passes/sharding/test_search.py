"""The search finds the least cost there is, and in a transformer what Megatron-LM does by hand."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.cost import Cluster, CostModel
from msc.ir.errors import PlanError
from msc.ir.placement import PARTIAL, REPLICATED, VARYING, Partial, Replicate, State, sharded
from msc.passes.compilation import Compilation
from msc.passes.sharding.prices import Payload, conversion_cost, send_cost
from msc.passes.sharding.search import Step
from tests.passes.graphs import (
    ATEN,
    GPT,
    Forward,
    Llama,
    captured,
    compilation,
    layers,
    through,
    token_batch,
)
from tests.passes.sharding.placing import Chosen, Problem, ops_of, states_of

CLUSTER = CostModel(Cluster("small", 1e9, 1e9, 1e9, 8, 1e8, 1e7))
SLOW_LINKS = CostModel(Cluster("slow links", 1e12, 1e9, 1e9, 8, 1e3, 1e3))
PAYLOAD = Payload(1024, (1, 4))
MODELS = {"no cluster": CostModel(), "cluster": CLUSTER, "slow links": SLOW_LINKS}


def chain(ops: tuple[str, ...], width: int) -> fx.GraphModule:
    """Up to three calls on a parameter and an input, and their sum."""
    build = Forward()
    weights = [build.parameter(f"w{i}", width, 4) for i in range(ops.count("linear"))]
    bias = build.parameter("b", width) if "bias" in ops else None
    y = build.input("x", 4, 4)
    for op in ops:
        if op == "linear":
            y = build.linear(y, weights.pop())
        elif op == "bias":
            y = build.call(ATEN.add.Tensor, y, bias)
        elif op == "square":
            y = build.call(ATEN.mul.Tensor, y, y)
        else:
            y = build.call(ATEN.softmax.int, y, -1)
    return build.done(build.call(ATEN.sum.default, y))


def problem(
    gm: fx.GraphModule, size: int, model: CostModel | None = None, step: Step | None = None
) -> Problem:
    return Problem.of(through("shard-batch", compilation(gm)), size, model, step)


def assert_optimal(given: Problem) -> None:
    """The search's cost is the least of all, and its choice has that cost."""
    placed = given.search()
    chosen: Chosen = {**placed.placeholders, **placed.strategies}
    assert given.memory(chosen) <= given.step.memory
    assert given.cost(chosen, placed.loss) == pytest.approx(placed.cost, rel=1e-6)
    assert placed.cost == pytest.approx(given.cheapest(), rel=1e-6)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize(
    "ops",
    [
        ("linear", "softmax"),
        ("linear", "square"),
        ("linear", "bias"),
        ("linear", "bias", "softmax"),
        ("linear", "square", "bias"),
    ],
    ids=" ".join,
)
def test_no_combination_is_cheaper(ops: tuple[str, ...], width: int, model: CostModel) -> None:
    assert_optimal(problem(chain(ops, width), 2, model))


@given(
    st.lists(st.sampled_from(["linear", "square", "softmax"]), min_size=2, max_size=3),
    st.sampled_from(sorted(MODELS)),
)
@settings(max_examples=15, deadline=None)
def test_no_combination_of_a_longer_chain_is_cheaper(ops: list[str], model: str) -> None:
    assert_optimal(problem(chain(("linear", *ops), 4), 2, MODELS[model]))


def two_blocks() -> fx.GraphModule:
    """A linear, and a layer of its own that reads its result."""
    build = Forward()
    first, second = build.parameter("layers.0.w", 4, 4), build.parameter("layers.1.w", 4, 4)
    y = build.linear(build.input("x", 4, 4), first, "layers.0")
    y = build.linear(y, second, "layers.1")
    return build.done(build.call(ATEN.sum.default, y, path="layers.1"))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_combination_of_two_blocks_is_cheaper(model: CostModel) -> None:
    assert_optimal(problem(two_blocks(), 2, model))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_sends_between_stages_are_part_of_the_cost(model: CostModel, stages: int) -> None:
    given = problem(two_blocks(), 2, model, Step(stages=stages))
    assert given.search().cost > 0
    assert_optimal(given)


def test_a_sharded_border_is_cheaper_to_send() -> None:
    for state, parts in ((sharded(0), 4), (REPLICATED, 1), (VARYING, 1)):
        assert send_cost(state, PAYLOAD, 4, True, CostModel()) == 2 * 1024 / parts
        assert send_cost(state, PAYLOAD, 4, False, CostModel()) == 1024 / parts


@pytest.mark.parametrize(
    ("ops", "model", "least", "used"),
    [
        (("linear", "softmax"), "slow links", 128, 256),
        (("linear", "bias", "softmax"), "slow links", 160, 320),
    ],
)
def test_the_least_cost_within_the_memory(
    ops: tuple[str, ...], model: str, least: int, used: int
) -> None:
    """Bytes of a weight of 4 by 4 in float64 and its gradient, split over two ranks or not."""

    def under(memory: float) -> Problem:
        return problem(chain(ops, 4), 2, MODELS[model], Step(memory=memory))

    free = under(math.inf).search()
    assert under(used).search().cost == free.cost
    for memory in (least, (least + used) / 2, used - 1):
        assert_optimal(under(memory))
        assert under(memory).search().cost > free.cost
    message = rf"need at least {least} bytes per rank, .* but memory is {least - 1}. Use more tp"
    with pytest.raises(PlanError, match=message):
        under(least - 1).search()


def test_memory_counts_what_a_stage_holds_on_average() -> None:
    bytes_held = 4 * 8 * 4 * 4
    step = Step(stages=2, held=lambda node, name: bytes_held, memory=2 * bytes_held / 2 / 2)
    given = problem(two_blocks(), 2, None, step)
    assert_optimal(given)
    short = problem(two_blocks(), 2, None, replace(step, memory=step.memory - 1))
    with pytest.raises(PlanError, match="at least 256 bytes per rank, on average over 2 pipeline"):
        short.search()


def test_tied_parameters_have_one_state() -> None:
    build = Forward()
    w = build.parameter("w", 4, 4)
    y = build.linear(build.input("x", 4, 4), w, "layers.0")
    y = build.linear(build.call(ATEN.relu.default, y, path="layers.0"), w, "layers.1")
    gm = build.done(build.call(ATEN.sum.default, y, path="layers.1"))
    given = problem(gm, 2)
    placed = given.search()
    states = {str(s) for n, s in placed.placeholders.items() if n.meta["name"] == "w"}
    assert len(states) == 1
    assert_optimal(given)


@functools.cache
def placed(name: str, size: int = 2) -> Compilation:
    """One sample per rank, so that the sequence is the only dim of the tokens to be split.

    Enough layers that norms on whole sequences would cost more than they save at the embedding.
    """
    torch.manual_seed(0)
    model = GPT(vocab=64, layers=4) if name == "gpt" else Llama(vocab=64, layers=8)
    batch = token_batch(vocab=64, batch=2)
    return through("differentiate", captured(model, f"dp=2,tp={size}", batch))


def states(name: str) -> dict[str, str]:
    found = placed(name).placed
    assert found is not None
    return states_of(found)


def test_a_gpt_layer_is_split_as_by_megatron() -> None:
    found = states("gpt")
    assert {key: found[f"h.0.{key}.weight"] for key in ("attn", "proj", "up", "down")} == {
        "attn": "S0/3",  # columns of each of q, k and v
        "proj": "S1",
        "up": "S0",
        "down": "S1",
    }
    assert {key: found[f"h.0.{key}.bias"] for key in ("attn", "proj", "up", "down")} == {
        "attn": "S0/3",
        "proj": "R~",  # added to the sequence's shards
        "up": "S0",
        "down": "R~",
    }
    assert (found["h.0.ln_1.weight"], found["h.0.ln_2.bias"]) == ("R~", "R~")


def test_a_layer_gathers_and_scatters_twice() -> None:
    programs = placed("gpt").variants[0].differentiated["block1"]
    assert programs.backward is not None
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    twice = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 0}
    assert ops_of(programs.forward, *kinds) == twice
    assert ops_of(programs.backward, *kinds) == twice


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_norms_run_on_the_sequence(name: str) -> None:
    found = placed(name).placed
    assert found is not None
    norms = [
        str(strategy.results[0])
        for node, strategy in found.strategies.items()
        if "norm" in str(node.target)
    ]
    assert len(norms) == 3  # two of the layer, and the last one
    assert set(norms) == {"S1"}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_logits_are_never_gathered(name: str) -> None:
    unit = placed(name)
    found = states(name)
    table = "wte.weight" if name == "gpt" else "embed.weight"
    assert found[table] == "S0"
    if name == "llama":
        assert found["head.weight"] == "S0"
    whole_logits = 8 * 64  # of a rank's sample
    for programs in unit.variants[0].differentiated.values():
        for gm in (programs.forward, programs.backward):
            assert gm is not None
            for node in gm.graph.nodes:
                if "_c10d_functional" in str(node.target):
                    assert node.meta["val"].numel() < whole_logits // 2, node
    local = unit.variants[0].local[unit.structure.instances[-1].block].gm
    assert ops_of(local, "msc.nll_terms", "all_gather", "all_reduce") == {
        "msc.nll_terms": 1,
        "all_gather": 1,  # of the last norm's result
        "all_reduce": 2,  # of the terms of the loss: two numbers per token
    }


def test_a_llama_layer_is_split_as_by_megatron() -> None:
    found = states("llama")
    assert {key: found[f"layers.0.{key}.weight"] for key in "q k v o gate up down".split()} == {
        "q": "S0",
        "k": "S0",
        "v": "S0",
        "o": "S1",
        "gate": "S0",
        "up": "S0",
        "down": "S1",
    }
    programs = placed("llama").variants[0].differentiated["block1"]
    assert ops_of(programs.forward, "all_gather", "reduce_scatter", "all_reduce") == {
        "all_gather": 2,
        "reduce_scatter": 2,
        "all_reduce": 0,
    }


def test_an_axis_is_used_where_only_some_dims_divide() -> None:
    """Two key heads do not split over four ranks; all other dims do."""
    unit = placed("llama", 4)
    assert unit.placed is not None
    found = states_of(unit.placed)
    assert [found[f"layers.0.{key}.weight"] for key in ("gate", "up", "down")] == ["S0", "S0", "S1"]
    assert found["head.weight"] == "S0"


@given(
    st.sampled_from([sharded(0), sharded(1), REPLICATED, VARYING, PARTIAL]),
    st.sampled_from([sharded(0), sharded(1), REPLICATED, VARYING, PARTIAL]),
    st.booleans(),
)
@settings(deadline=None)
def test_conversions_cost_what_they_send(have: State, want: State, gradient: bool) -> None:
    cost = conversion_cost(have, want, PAYLOAD, 4, gradient, CostModel())
    if have == want or (not gradient and have.value == want.value):
        assert cost == 0
    elif cost is not None:
        assert cost > 0
        without = conversion_cost(have, want, PAYLOAD, 4, False, CostModel())
        assert without is not None
        assert without <= cost


def test_conversions_that_do_not_exist() -> None:
    maximum = State(Partial("max"), Replicate())

    def cost(have: State, want: State, gradient: bool) -> float | None:
        return conversion_cost(have, want, PAYLOAD, 4, gradient, CostModel())

    assert cost(maximum, REPLICATED, True) is None  # its reduction has no gradient
    assert cost(maximum, REPLICATED, False) is not None
    assert cost(maximum, sharded(0), False) is None
    assert cost(VARYING, REPLICATED, True) is None  # a partial gradient cannot become whole
    assert cost(sharded(0), PARTIAL, True) is None


def test_what_has_no_placement_is_refused() -> None:
    given = problem(chain(("linear", "softmax"), 4), 2)
    for node in given.candidates.strategies:
        if "softmax" in str(node.target):
            given.candidates.strategies[node] = []
    with pytest.raises(PlanError, match=r"^No placement over 'tp' \(size 2\) was found: .* Use a"):
        given.search()


def test_strategies_that_contradict_each_other_are_refused() -> None:
    given = problem(chain(("linear", "softmax"), 4), 2)
    for node, listed in given.candidates.strategies.items():
        if "softmax" in str(node.target):
            given.candidates.strategies[node] = [replace(listed[0], operands=(PARTIAL,))]
        if "linear" in str(node.target):
            given.candidates.strategies[node] = [s for s in listed if s.factor == "n"]
    with pytest.raises(PlanError, match=r"was found: .* contradict each other. Use a smaller axis"):
        given.search()


def test_nothing_depends_on_the_number_of_layers() -> None:
    costs = {}
    for count in (3, 9):
        given = problem(layers(count), 2)
        chosen = given.search()
        costs[count] = len(chosen.strategies), states_of(chosen)["layers.1.up.weight"]
    assert costs[3] == costs[9]
