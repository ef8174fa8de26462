"""The bound on saved bytes is searched until the finished program fits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from msc.ir.errors import PlanError
from msc.ir.mesh import Mesh
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Settings
from msc.passes.differentiate import Differentiated
from msc.passes.recompute.budget import within_budget
from msc.passes.recompute.choice import Candidates, Choice, StageProgram
from msc.passes.recompute.rewrite import saved_nodes
from tests.passes.recompute.blocks import mlp, normed

SETTINGS = Settings(Mesh.parse(""))
REST = 10_000
"""Bytes that are alive at every peak."""


def program(found: Differentiated) -> StageProgram:
    block = Candidates("block", found.forward, tuple(saved_nodes(found)), 1)
    return StageProgram([block], lambda node: call_cost(node, SETTINGS))


def everything(stage: StageProgram) -> int:
    found = stage.cheapest(float("inf"))
    assert found is not None
    return found.saved_bytes


def peaks_of(stages: Sequence[StageProgram], choices: Sequence[Choice | None]) -> list[int]:
    """What recomputes more needs a little more besides what it saves."""
    return [
        REST + everything(stage)
        if choice is None
        else REST + choice.saved_bytes + 8 * len(choice.again["block"])
        for stage, choice in zip(stages, choices, strict=True)
    ]


def test_the_cheapest_program_that_fits() -> None:
    stages = [program(mlp())]
    limits = range(REST + stages[0].leanest().saved_bytes + 100, REST + everything(stages[0]), 512)
    assert len(limits) > 2
    for budget in limits:
        (found,) = within_budget(stages, budget, lambda choices: peaks_of(stages, choices))
        assert found is not None
        assert peaks_of(stages, [found])[0] <= budget
        for limit in range(0, budget, 128):
            other = stages[0].cheapest(limit)
            if other is not None and peaks_of(stages, [other])[0] <= budget:
                assert found.cost <= other.cost


def test_stages_are_chosen_for_alone() -> None:
    """The first saves everything; the second, which has more to save, does not."""
    stages = [program(normed()), program(mlp())]
    budget = REST + everything(stages[1]) - 1
    assert everything(stages[0]) < everything(stages[1])
    first, second = within_budget(stages, budget, lambda choices: peaks_of(stages, choices))
    assert first is None
    assert second is not None
    assert second.cost > 0


def test_nothing_runs_again_where_all_fits() -> None:
    stages = [program(mlp())]
    budget = REST + everything(stages[0])
    assert within_budget(stages, budget, lambda choices: peaks_of(stages, choices)) == [None]


def test_a_budget_below_the_leanest_is_refused_with_its_bytes() -> None:
    stages = [program(mlp())]
    (needed,) = peaks_of(stages, [stages[0].leanest()])
    assert needed > REST
    with pytest.raises(PlanError, match=f"stage 0 needs at least {needed:,} with"):
        within_budget(stages, needed - 1, lambda choices: peaks_of(stages, choices))
    assert within_budget(stages, needed, lambda choices: peaks_of(stages, choices)) != [None]


def test_the_leanest_choice_may_need_most() -> None:
    """Peaks fall and rise again; each that a budget led to is itself a budget that is kept."""
    stages = [program(mlp())]
    most = everything(stages[0])

    def peaks(choices: Sequence[Choice | None]) -> list[int]:
        saved = [most if choice is None else choice.saved_bytes for choice in choices]
        return [REST + abs(bytes_ - most // 2) for bytes_ in saved]

    with pytest.raises(PlanError, match="at least") as caught:
        within_budget(stages, 1, peaks)
    least = int(str(caught.value).split("at least ")[1].split()[0].replace(",", ""))
    assert least < peaks([stages[0].leanest()])[0] < peaks([None])[0] + most
    budget = peaks([None])[0] - 1
    while budget > least:
        (needed,) = peaks(within_budget(stages, budget, peaks))
        assert needed <= budget
        assert peaks(within_budget(stages, needed, peaks)) <= [needed]
        budget = needed - 1
    assert peaks(within_budget(stages, least, peaks)) == [least]


def test_a_named_policy_is_among_the_choices() -> None:
    found = mlp()
    calls = {
        node for node in found.forward.graph.nodes if node.target is torch.ops.aten.tanh.default
    }
    block = Candidates("block", found.forward, tuple(saved_nodes(found)), 1, (calls,))
    stage = StageProgram([block], lambda node: call_cost(node, SETTINGS))
    (named,) = stage.named()
    assert named.again["block"] == calls

    def peaks(choices: Sequence[Choice | None]) -> list[int]:
        return [REST if choice == named else 2 * REST for choice in choices]

    assert within_budget([stage], REST, peaks) == [named]
