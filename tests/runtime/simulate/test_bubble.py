"""The pipeline's bubble of equal stages on links that take no time is the closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import msc
from msc.program import Program
from tests.runtime.simulate.build import IDEAL

WIDTH = 16


class Chain(nn.Module):
    """Equal layers; only their GEMMs take time on `IDEAL`, three for each layer and sample."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def compiled(
    stages: int, micro_batches: int, schedule: str = "1f1b", dp: int = 1, virtual: int | None = None
) -> Program:
    ids = torch.zeros(micro_batches * dp, 4, dtype=torch.int64)
    return msc.compile(
        Chain(stages * (virtual or 1)),
        (ids,),
        mesh=f"pp={stages},dp={dp}",
        microbatches=micro_batches,
        schedule=schedule,
        virtual_stages=virtual,
        cluster=IDEAL,
        optimizer=msc.AdamW(),
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 8)])
def test_the_closed_form(schedule: str, stages: int, micro_batches: int) -> None:
    """(p - 1) / m, Narayanan et al., SC 2021; so the utilization is m / (m + p - 1)."""
    result = compiled(stages, micro_batches, schedule).simulate(IDEAL)
    assert result.bubble == pytest.approx((stages - 1) / micro_batches)
    assert result.mfu == pytest.approx(micro_batches / (micro_batches + stages - 1))
    assert result.hfu == pytest.approx(result.mfu)
    layer = 3 * micro_batches * 2 * 4 * WIDTH**2 / IDEAL.flops_per_s
    for each in result.classes:
        assert each.compute_seconds == pytest.approx(layer)
        assert each.bubble_seconds == pytest.approx(result.step_seconds - layer)
        assert each.skew_seconds == 0
        assert set(each.exposed.values()) <= {0}


@pytest.mark.parametrize(
    ("schedule", "virtual", "idle"),
    [("interleaved", 2, 3 * 2), ("interleaved", 3, 3 * 2), ("zb-h1", None, 2), ("zb-v", 2, 2)],
)
def test_other_schedules(schedule: str, virtual: int | None, idle: int) -> None:
    """On three stages; idle: in GEMMs, of which a chunk has three per micro-batch."""
    program = compiled(3, 6, schedule, virtual=virtual)
    bubble = idle / (3 * 6 * (virtual or 1))
    assert program.report.schedule.bubble == pytest.approx(bubble)
    result = program.simulate(IDEAL)
    assert result.bubble == pytest.approx(bubble)
    assert all(each.skew_seconds == 0 for each in result.classes)


def test_thousands_of_ranks_are_as_few_classes_as_eight() -> None:
    few, many = (compiled(4, 2, dp=dp).simulate("a100") for dp in (2, 512))
    assert [each.count for each in many.classes] == [512] * 4
    for one, other in zip(few.classes, many.classes, strict=True):
        assert len(one.slices) == len(other.slices)
        assert one.compute_seconds == other.compute_seconds
        assert one.communication.keys() == other.communication.keys()
    assert many.step_seconds > few.step_seconds  # a reduction over 512 has more hops
