"""Which layers a chunk has, what it costs, and what cannot be scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msc.cost import CostModel
from msc.ir.errors import PlanError
from msc.passes.compilation import Compilation
from msc.passes.schedules.timeline import peak_held
from tests.passes.graphs import compilation, layers, through


def chosen(num_layers: int, mesh: str, micro_batches: int = 1, **settings: Any) -> Compilation:
    gm = layers(num_layers, samples=micro_batches)
    return through("choose-schedule", compilation(gm, mesh, micro_batches, **settings))


def paths(unit: Compilation) -> list[list[str]]:
    return [[unit.structure.instances[i].path for i in run] for run in unit.schedule.runs]


def test_chunks_of_two_virtual_stages() -> None:
    unit = chosen(4, "pp=2", schedule="interleaved")
    assert paths(unit) == [["layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "head"]]
    assert unit.schedule.stages.virtual == 2


def test_costs_are_those_of_the_chunks() -> None:
    """The last chunk has the head; a split backward costs in two parts what the whole one does."""
    whole, split = (
        chosen(4, "pp=4", schedule=name).schedule.modelled for name in ("1f1b", "zb-h1")
    )
    assert whole.forward == split.forward
    assert whole.forward[1] == whole.forward[2] < whole.forward[3]
    assert whole.weight == (0.0,) * 4
    assert all(weight > 0 for weight in split.weight)
    for one, backward, weight in zip(whole.backward, split.backward, split.weight, strict=True):
        assert backward + weight == pytest.approx(one)
    assert whole.transfer == CostModel().send(8 * 8)  # a row of a micro-batch, float64


@pytest.mark.parametrize(
    ("mesh", "settings", "message"),
    [
        (
            "pp=2",
            {"schedule": "interleaved", "virtual_stages": 3},
            "Schedule 'interleaved' makes 6 chunks (pp=2, 3 virtual stages), but the model has "
            "only 4 layers to put on them (layers.0, layers.1, layers.2, layers.3). Use a smaller "
            "pp or fewer virtual stages.",
        ),
        (
            "pp=4",
            {"schedule": "zb-v"},
            "Schedule 'zb-v' makes 8 chunks (pp=4, 2 virtual stages), but the model has only "
            "4 layers to put on them (layers.0, layers.1, layers.2, layers.3). Use a smaller pp, "
            "or another schedule.",
        ),
        (
            "pp=8",
            {"schedule": "auto"},
            "The mesh has 8 pipeline stages (pp=8), but the model has only 4 layers to put on them "
            "(layers.0, layers.1, layers.2, layers.3). Use pp=4 or less.",
        ),
    ],
)
def test_more_chunks_than_layers(mesh: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        chosen(4, mesh, **settings)
    assert message in str(error.value)


def test_auto_keeps_to_a_bound_on_memory() -> None:
    """Parameters and gradients of the last stage, which has the head, and two layers' results."""
    state = 2 * 8 * (2 * 8 * 16 + 8 * 8)
    layer = 8 * 8 * (16 + 8)  # saved of 8 samples
    settings: dict[str, Any] = {"micro_batches": 8, "schedule": "auto"}
    gm = layers(4, samples=64)
    unit = compilation(gm, "pp=4", memory=state + 2 * layer, **settings)
    orders = through("choose-schedule", unit).schedule.orders
    assert all(peak_held(order) <= 2 for order in orders)
    wider = compilation(layers(4, samples=64), "pp=4", memory=10 * state, **settings)
    assert any(peak_held(o) > 2 for o in through("choose-schedule", wider).schedule.orders)


def test_the_dump_says_the_orders(tmp_path: Path) -> None:
    unit = chosen(2, "pp=2", 2)
    assert unit.dump is not None
    unit.dump.write(tmp_path)
    text = (tmp_path / "index.txt").read_text()
    assert "1f1b: modelled bubble" in text
    assert "stage 1: F0@1 B0@1 F1@1 B1@1\n" in text
