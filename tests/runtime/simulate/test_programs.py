"""Compiled programs: whatever the other executors run, with one rank of each class for all."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import msc
from msc.program import Program
from msc.runtime.simulate import RankClass, SimulationResult, simulate
from tests import models
from tests.parity.test_buffers import Normed

CLUSTER = msc.Cluster.load("a100")
PROGRAMS = {
    "one rank": ("gpt", "", 2),
    "tensor parallel, two classes": ("gpt", "tp=2", 1),
    "all axes, four classes": ("gpt", "pp=2,dp=2,tp=2", 2),
    "batch norm": ("normed", "pp=3,dp=2,tp=2", 2),
}


@functools.cache
def program(name: str) -> Program:
    """The GPT has dropout, tied weights, clipping, and a vocabulary that tp does not divide."""
    kind, mesh, micro_batches = PROGRAMS[name]
    torch.manual_seed(0)
    inputs: tuple[Tensor, ...]
    if kind == "normed":
        model: torch.nn.Module = Normed()
        inputs = (torch.randn(8, 12),)
    else:
        model = models.GPT(vocabulary=97, layers=2, dropout=0.1)
        tokens = torch.randint(97, (4, 8))
        inputs = tokens, tokens
    optimizer = msc.AdamW(max_norm=1.0)
    return msc.compile(model, inputs, mesh=mesh, microbatches=micro_batches, optimizer=optimizer)


@functools.cache
def simulated(name: str) -> SimulationResult:
    return program(name).simulate(CLUSTER)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_runs_and_its_time_adds_up(name: str) -> None:
    result = simulated(name)
    assert sum(each.count for each in result.classes) == result.mesh.size
    assert [each.name for each in result.classes] == program(name).class_names
    for each in result.classes:
        parts = [each.compute_seconds, each.bubble_seconds, each.skew_seconds]
        parts += each.exposed.values()
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(result.step_seconds)
        for total in each.communication.values():
            assert total.exposed_seconds <= total.seconds * (1 + 1e-9)
    assert result.mfu is not None
    assert 0 < result.mfu < 1
    if name != "batch norm":  # MFU counts the input gradient that its first layer does not need
        assert result.mfu <= result.hfu
    if result.mesh.size == 1:
        assert result.exposed == {}
        assert result.bubble == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_peak_memory_is_the_programs(name: str) -> None:
    found = [each.peak_memory_bytes for each in simulated(name).classes]
    assert found == program(name).memory_bytes()


@pytest.mark.parametrize("name", PROGRAMS)
def test_communication_is_what_the_report_counts(name: str) -> None:
    for each, reported in zip(
        simulated(name).classes, program(name).report.collectives, strict=True
    ):
        found: dict[str, int] = {}
        for (axes, kind), total in each.communication.items():
            suffix = "" if kind in ("send", "all_reduce") else "_tensor"
            if kind != "recv":
                label = "all_gather_into" if kind == "all_gather" else kind
                found[f"{label}{suffix} over {axes}"] = total.calls
        assert found == {kind: calls for kind, (calls, _) in reported.items()}


@pytest.mark.parametrize("name", ["all axes, four classes", "batch norm"])
def test_one_rank_of_a_class_stands_for_all(name: str) -> None:
    """The simulation of every single rank says the same of each."""
    whole, result = program(name), simulated(name)
    ranks = range(whole.mesh.size)
    classes = [RankClass(f"rank {rank}", rank, 1, whole.rank_graph(rank)) for rank in ranks]
    apart = simulate(whole.mesh, CLUSTER, classes, lambda rank: rank, ("pp", "dp", "tp"))
    assert apart.step_seconds == pytest.approx(result.step_seconds)
    for rank in ranks:
        one, expected = apart.classes[rank], result.classes[whole.class_of(rank)]
        assert one.bubble_seconds == pytest.approx(expected.bubble_seconds)
        assert one.skew_seconds == pytest.approx(expected.skew_seconds)
        assert one.exposed == pytest.approx(expected.exposed)


def test_two_simulations_are_equal() -> None:
    name = "all axes, four classes"
    assert program(name).simulate(CLUSTER) == simulated(name)


def test_a_saved_program_is_simulated_alike(tmp_path: object) -> None:
    name = "all axes, four classes"
    program(name).save(str(tmp_path))
    loaded = msc.load(str(tmp_path)).simulate("a100")
    assert str(loaded) == str(simulated(name))


def test_a_slow_network_costs_time() -> None:
    name = "all axes, four classes"
    slow = msc.Cluster("slow", 312e12, 2e12, 8e10, 4, 3e11, 1e6)
    assert program(name).simulate(slow).step_seconds > 2 * simulated(name).step_seconds


def test_what_is_no_cluster_is_refused() -> None:
    with pytest.raises(msc.PlanError, match="Cluster file 'b200' cannot be read"):
        program("one rank").simulate("b200")
