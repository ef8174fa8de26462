"""Fused kernels on virtual ranks: right under every schedule, and every mutant is caught."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msc.codegen.kernels import gather_gemm, gemm_scatter
from msc.codegen.kernels.description import SM_80, SM_90, Target, Tiles
from msc.codegen.kernels.epilogue import Epilogue
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gather_weight_gradient import GatherWeightGradient
from msc.codegen.kernels.gemm_scatter import GemmScatter
from msc.codegen.kernels.protocol import Chunks, splits_for
from msc.ir.errors import PlanError
from msc.testing.interpreter import Deadlock
from tests.codegen.kernels.fused import (
    Calls,
    replaced,
    run_gather,
    run_scatter,
    run_weight_gradient,
)

LONG = "MSC_TEST_LONG" in os.environ  # set by `make test-long`
SEEDS = range(25 if LONG else 5)
TILES = Tiles(32, 32, 64, group=2)
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3}


def few(target: Target, processors: int) -> Target:
    """The target with so few processors that programs make several tiles."""
    return dataclasses.replace(target, processors=processors)


def gather(ranks: int, **changes: Any) -> GatherGemm:
    made = GatherGemm(ranks * 64, 64, (64,), ranks, "bfloat16", few(SM_90, 4), TILES)
    return dataclasses.replace(made, **changes)


def scatter(ranks: int, **changes: Any) -> GemmScatter:
    made = GemmScatter(ranks * 64, 64, 64, ranks, "bfloat16", few(SM_90, 4), TILES)
    return dataclasses.replace(made, **changes)


# Whole tiles and odd sizes, each layout, one and more flags a shard, both targets.
GATHERS = [
    gather(2, m=2 * 40, widths=(48,), k=72, dtype="float32", splits=3),
    gather(4, b_layout="kn", splits=2),
    gather(8, m=8 * 32, target=few(SM_80, 4)),
    gather(2, widths=(40, 32, 24)),
    gather(2, widths=(48, 32), b_layout="kn", m=2 * 36),
]
SCATTERS = [
    scatter(2, m=2 * 40, n=48, k=72, dtype="float32", b_layout="kn"),
    scatter(4, staged="float32"),
    scatter(8, m=8 * 32, target=few(SM_80, 4)),
    scatter(2, m=2 * 40, n=48, k=72, dtype="float32", add="bias"),
    scatter(2, m=2 * 40, n=48, b_layout="kn", add="residual"),
]
GRADIENTS = [
    GatherWeightGradient(2 * 64, 64, 32, "x", 2, "bfloat16", few(SM_90, 3), TILES, splits=2),
    GatherWeightGradient(4 * 40, 48, 40, "dy", 4, "float32", few(SM_90, 3), TILES),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", GATHERS, ids=lambda case: case.name)
def test_gather_gemm(case: GatherGemm, seed: int) -> None:
    assert run_gather(case, Calls(seed)) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.name)
def test_gather_weight_gradient(case: GatherWeightGradient, seed: int) -> None:
    assert run_weight_gradient(case, Calls(seed)) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", SCATTERS, ids=lambda case: case.name)
def test_gemm_scatter_is_right_and_the_same_on_every_schedule(case: GemmScatter) -> None:
    runs = [run_scatter(case, Calls(seed)) for seed in SEEDS]
    assert max(worst for worst, _ in runs) <= TOLERANCE[case.dtype]
    for _, results in runs[1:]:
        for found, first in zip(results, runs[0][1], strict=True):
            assert torch.equal(found, first)


@pytest.mark.parametrize("count", [2, 3])
def test_calls_that_follow_each_other(count: int) -> None:
    """A rank may be a call ahead of another: what it writes must not be read too early or late."""
    calls = Calls(seed=count, count=count, resident=2)
    assert run_gather(gather(4, splits=2), calls) <= TOLERANCE["bfloat16"]
    gradient = dataclasses.replace(GRADIENTS[0], ranks=4, m=4 * 64)
    assert run_weight_gradient(gradient, calls) <= TOLERANCE["bfloat16"]
    worst, _ = run_scatter(scatter(4), calls)
    assert worst <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("resident", [1, 4])
def test_programs_that_do_not_fit_keep_nobody_out(resident: int) -> None:
    """8 programs of each rank, some of which start when others have ended."""
    crowded = scatter(4, n=96, target=few(SM_90, 8))
    worst, _ = run_scatter(crowded, Calls(seed=1, count=2, resident=resident))
    assert worst <= TOLERANCE["bfloat16"]


def gather_mutant(**mistakes: Any) -> Callable[[int], float]:
    return lambda seed: run_gather(gather(4), Calls(seed, **mistakes))


def scatter_mutant(case: GemmScatter, **mistakes: Any) -> Callable[[int], float]:
    return lambda seed: run_scatter(case, Calls(seed, **mistakes))[0]


def gradient_mutant(**mistakes: Any) -> Callable[[int], float]:
    case = dataclasses.replace(GRADIENTS[0], splits=1)
    return lambda seed: run_weight_gradient(case, Calls(seed, **mistakes))


def one_buffer(call: int) -> int:
    return 0


def shared_counters(seed: int) -> float:
    """Counters that are not doubled: a rank that is a call ahead counts for a slower one."""
    case = scatter(4, m=4 * 96, target=few(SM_90, 2))
    return run_scatter(case, Calls(seed, 3), one_buffer, lambda ranks, call: ranks * call)[0]


NO_ACQUIRE = replaced('"acquire"', '"relaxed"')

MUTANTS: dict[str, Callable[[int], float]] = {
    "gather without acquire": gather_mutant(mutate=NO_ACQUIRE),
    "gather without wait": gather_mutant(mutate=replaced("wait(flags + chunk, want)", "pass")),
    "gather without fence": gather_mutant(mutate=replaced("fence.proxy.async.global; ", "")),
    "gather that waits for too much": gather_mutant(want_more=1),
    "gather that waits for too little": gather_mutant(want_more=-1),
    "gather with one buffer": gather_mutant(count=3, turn=one_buffer),
    "gathered weight gradient without acquire": gradient_mutant(mutate=NO_ACQUIRE),
    "gathered weight gradient without wait": gradient_mutant(
        mutate=replaced("wait(flags + chunk, want)", "pass")
    ),
    "gathered weight gradient with one buffer": gradient_mutant(count=3, turn=one_buffer),
    "scatter without release": scatter_mutant(
        scatter(4), mutate=replaced('"release"', '"relaxed"')
    ),
    "scatter without acquire": scatter_mutant(scatter(4), mutate=NO_ACQUIRE),
    "scatter without wait": scatter_mutant(
        scatter(4), mutate=replaced("wait(counters + tile, want)", "pass")
    ),
    "scatter that waits for too much": scatter_mutant(scatter(4), want_more=1),
    "scatter that waits for too little": scatter_mutant(scatter(4), want_more=-1),
    "scatter with one buffer": scatter_mutant(scatter(4), count=3, turn=one_buffer),
    "scatter with one set of counters": shared_counters,
}
DEADLOCKS = {name for name in MUTANTS if "too much" in name}


def outcome(run: Callable[[int], float], seed: int) -> str:
    """ "right", "wrong", or what a deadlock says."""
    try:
        return "right" if run(seed) <= TOLERANCE["bfloat16"] else "wrong"
    except Deadlock as deadlock:
        return str(deadlock)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught_within_five_seeds(name: str) -> None:
    found = next(filter("right".__ne__, (outcome(MUTANTS[name], seed) for seed in range(5))), "")
    if name in DEADLOCKS:  # with the names of those that wait
        assert f"rank 0 {'gather_gemm' if 'gather' in name else 'scatter_sum'} program" in found
    else:
        assert found == "wrong"


@settings(max_examples=200 if LONG else 10)
@given(
    ranks=st.sampled_from([2, 3, 4]),
    rows=st.integers(8, 72),
    n=st.sampled_from([8, 24, 32, 64]),
    k=st.sampled_from([16, 40, 64]),
    tiles=st.integers(1, 10),
    seed=st.integers(0, 2**20),
    count=st.integers(1, 2),
    resident=st.sampled_from([1, 2, None]),
)
def test_any_shape_any_schedule(
    ranks: int, rows: int, n: int, k: int, tiles: int, seed: int, count: int, resident: int | None
) -> None:
    target = few(SM_90, 3)
    calls = Calls(seed, count, resident)
    splits = splits_for(tiles, 1, rows)  # of few tiles: more flags
    gathered = GatherGemm(ranks * rows, k, (n,), ranks, "float32", target, TILES, "nk", splits)
    assert run_gather(gathered, calls) <= TOLERANCE["float32"]
    scattered = GemmScatter(ranks * rows, n, k, ranks, "float32", target, TILES)
    worst, _ = run_scatter(scattered, calls)
    assert worst <= TOLERANCE["float32"]


@given(tiles=st.integers(1, 2000), programs=st.integers(1, 132), rows=st.integers(1, 500))
def test_more_flags_for_fewer_waves(tiles: int, programs: int, rows: int) -> None:
    splits = splits_for(tiles, programs, rows)
    assert Chunks(4 * rows, 4, splits).splits == splits
    if tiles >= 6 * programs:
        assert splits == 1
    elif rows >= 4 and tiles < 3 * programs:
        assert splits > 1


def test_uneven_shards_are_refused() -> None:
    with pytest.raises(PlanError, match="100 rows do not divide over 8 ranks"):
        gather_gemm.emit(gather(8, m=100))
    with pytest.raises(PlanError, match="100 rows do not divide over 8 ranks"):
        gemm_scatter.emit(scatter(8, m=100))


def test_refusals() -> None:
    with pytest.raises(PlanError, match="no kernel computes on float64"):
        gather(2, dtype="float64")
    with pytest.raises(PlanError, match="without a product"):
        gather(2, widths=())
    with pytest.raises(PlanError, match="swiglu is of one weight"):
        gather(2, widths=(8, 8), epilogue=Epilogue(activation="swiglu"))
    with pytest.raises(PlanError, match="5 flags for a shard of 4 rows leave one without rows"):
        gather_gemm.emit(gather(2, m=8, splits=5))
    with pytest.raises(PlanError, match="4 flags for a shard of 9 rows"):
        gather_gemm.emit(gather(2, m=18, splits=4))
    with pytest.raises(PlanError, match="adds a bias or a residual, not 'all'"):
        scatter(2, add="all")
    with pytest.raises(PlanError, match="reads x and dy, not 'w'"):
        dataclasses.replace(GRADIENTS[0], gathered="w")
