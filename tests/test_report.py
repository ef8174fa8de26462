"""The report: fractions, collectives, fallbacks with their reasons, and no times in the JSON."""

from __future__ import annotations

import functools
import json
import operator
from dataclasses import replace

import pytest
import torch
from torch import fx

from msc.fallbacks import fallback
from msc.passes.sharding.plan_of import plan_of
from msc.report import CompileReport, make_report
from tests.passes.graphs import ATEN, Forward, compilation, layers, through


@functools.cache
def report(mesh: str, micro_batches: int = 1, tied: bool = False) -> CompileReport:
    unit = compilation(layers(2, tied=tied), mesh, micro_batches)
    return make_report(through("check-communication", unit), 0.5, ["a note"])


def reported(gm: fx.GraphModule, mesh: str) -> CompileReport:
    return make_report(through("check-communication", compilation(gm, mesh)), 0.0, [])


def test_axes_of_one_rank_are_left_out() -> None:
    assert report("").sharded == {}
    assert list(report("dp=2,tp=2").sharded) == ["dp", "tp"]


def test_fractions() -> None:
    found = report("pp=2,dp=2,tp=2", 2).sharded
    assert found["pp"] == {"flops": 1.0, "parameters": 1.0}
    assert found["dp"] == {"flops": 1.0, "parameters": 0.0}
    assert found["tp"]["parameters"] == 1.0
    # all but the sum of the partial results
    gemms = 2 * 4 * (4 * 8 * 16 + 8 * 8)
    others = 2 * (4 * 16 + 4 * 8)
    assert found["tp"]["flops"] == pytest.approx((gemms + others) / (gemms + others + 1))


@pytest.mark.parametrize("planned", [False, True])
def test_a_product_that_is_whole_though_it_could_be_split_says_why(planned: bool) -> None:
    unit = through("place", compilation(layers(2), "tp=2"))
    assert unit.placing is not None
    assert unit.placed is not None
    (node, *_) = (n for n in unit.placed.strategies if "linear" in str(n.target))
    options = unit.placing.candidates.strategies[node]
    unit.placed.strategies[node] = next(each for each in options if each.factor is None)
    if planned:
        plan = plan_of(unit.structure, unit.placed, unit.settings.mesh, 1)
        unit.settings = replace(unit.settings, plan=plan)
    why = "the given plan says so" if planned else "splitting it would cost more than it saves"
    assert fallback(unit, node).endswith(f": msc.linear runs whole on every tp rank: {why}")


def test_a_tied_weight_is_not_split_over_pp() -> None:
    head, layer = 8 * 8, 2 * 8 * 16
    found = report("pp=2", tied=True).sharded["pp"]["parameters"]
    assert found == pytest.approx(2 * layer / (2 * layer + head))


def test_collectives_are_counted_per_step_and_rank() -> None:
    first, last = report("pp=2,dp=2,tp=2", 2).collectives
    one_activation = 8 * 1 * 8
    assert first["send over pp"] == (2, one_activation)  # half of it per micro-batch and tp rank
    assert last["send over pp"] == (2, one_activation)
    # the first layer's gather is of its gradient; the last stage gathers a value as well
    assert first["all_gather_into_tensor over tp"] == (2, one_activation)
    assert last["all_gather_into_tensor over tp"] == (4, 2 * one_activation)
    assert first["reduce_scatter_tensor over tp"] == (2, 2 * one_activation)
    gradients = 8 * 2 * 8 * 16 // 2
    assert first["all_reduce over dp"] == (1, gradients)
    assert first["all_reduce over pp,dp,tp"] == (1, 8)
    assert report("").collectives == ({},)


def odd_heads() -> fx.GraphModule:
    """A linear of odd dims on an odd number of rows, and an inverse, which has no rule."""
    build = Forward()
    w, x = build.parameter("w", 5, 3), build.input("x", 7, 3)
    y = build.linear(x, w, "odd")
    product = build.call(ATEN.mm.default, build.call(ATEN.t.default, y), y, path="square")
    inverse = build.call(torch.ops.aten.linalg_inv_ex.default, product, path="inverse")
    picked = build.call(operator.getitem, inverse, 0, path="inverse")
    return build.done(build.call(ATEN.sum.default, picked, path="loss"))


def test_what_runs_whole_is_listed_with_the_reason() -> None:
    found = reported(odd_heads(), "tp=2")
    assert found.fallbacks == (
        "inverse: aten.linalg_inv_ex has no sharding rule; it runs whole on every tp rank "
        "(26 FLOPs of a step's forward, 4.2%; 404 bytes, 16.2%)",
    )
    assert found.replicated == ("w (5, 3)",)  # fifteen numbers: splitting them costs more messages


def test_nothing_falls_back_without_tp() -> None:
    found = reported(odd_heads(), "")
    assert (found.fallbacks, found.replicated) == ((), ())


def test_json_is_plain_and_holds_no_times() -> None:
    data = report("pp=2,dp=2,tp=2", 2).to_json()
    assert json.loads(json.dumps(data)) == data
    assert sorted(data) == [
        "chunk_stages",
        "chunks",
        "collectives",
        "distinct_blocks",
        "epilogues",
        "fallbacks",
        "fused_collectives",
        "fused_losses",
        "instances",
        "model_flops",
        "notes",
        "replicated",
        "rewrites",
        "schedule",
        "sharded",
    ]
    assert data["chunk_stages"] == [0, 1]
    schedule = data["schedule"]
    assert 0 < schedule.pop("bubble") < 0.5  # 1 / 2 if the head cost nothing
    assert schedule == {"name": "1f1b", "virtual_stages": 1, "live_activations": [2, 1]}
    assert data["chunks"] == [["layers.0"], ["layers.1", "head"]]
    assert (data["distinct_blocks"], data["instances"]) == (3, 3)
    assert data["notes"] == ["a note"]


def test_seconds_are_those_of_capture_and_of_every_pass() -> None:
    found = report("tp=2").cpu_seconds
    assert found["capture"] == 0.5
    names = ["capture", "rewrite", "merge-branches", "raise-rms-norm", "raise-gate", "cut"]
    assert list(found)[:6] == names
    assert all(seconds >= 0 for seconds in found.values())


def test_flops_of_the_model_do_not_depend_on_the_mesh() -> None:
    """Of the GEMMs of both layers and the head, three times: two for the backward."""
    for mesh in ("", "tp=2", "pp=2,dp=2,tp=2"):
        assert report(mesh).model_flops == 3 * (2 * 2 * (2 * 4 * 8 * 16) + 2 * 4 * 8 * 8)


def test_the_search_says_what_it_found() -> None:
    assert report("").search_cost == 0
    assert report("tp=2").search_cost > 0
