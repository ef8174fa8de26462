"""What every rewrite shares: findings in report and dump, its own reference, errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import msc
from msc.ir.ops.linear import LINEAR
from msc.ir.rewrites import Finding, Rewrite

BATCH = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


@dataclass(frozen=True)
class ScaleLinears(Rewrite):
    """Multiply what the first linear gives by `by`."""

    by: float = 2.0

    def apply(self, gm: fx.GraphModule) -> list[Finding]:
        found = []
        for number, node in enumerate(gm.graph.find_nodes(op="call_function", target=LINEAR)):
            wanted = number == 0 and self.by != 1
            if wanted:
                with gm.graph.inserting_after(node):
                    new = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, self.by))
                new.meta = dict(node.meta)
                node.replace_all_uses_with(
                    new, delete_user_cb=lambda user, new=new: user is not new
                )
            what = f"times {self.by}" if wanted else "only the first one is wanted"
            found.append(Finding("ScaleLinears", node.meta["module_path"], wanted, what))
        return found


class Model(nn.Module):
    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            y = layer(x)
            x = x + torch.tanh(y * self.by if number == 0 else y)
        return x.square().mean()


def test_the_rewritten_model_is_the_reference() -> None:
    report = msc.verify(Model(), BATCH, mesh="tp=2", rewrites=[ScaleLinears()], dtype=torch.float64)
    assert report.ok, report.first_difference
    expected = Model(2.0).double()(BATCH[0].double())
    assert report.loss == pytest.approx(expected.item(), abs=1e-14)


def test_each_place_is_in_the_report_and_in_the_dump(tmp_path: Path) -> None:
    program = msc.compile(Model(), BATCH, rewrites=[ScaleLinears()])
    lines = (
        "ScaleLinears, layers.0: times 2.0",
        "ScaleLinears, layers.1: left alone: only the first one is wanted",
    )
    assert program.report.rewrites == lines
    program.dump(tmp_path)
    index = (tmp_path / "passes" / "index.txt").read_text()
    (dumped,) = (tmp_path / "passes").glob("*_rewrite.txt")
    for line in lines:
        assert line in index
        assert f"# {line}\n" in dumped.read_text()
    program.save(tmp_path / "saved")
    assert msc.load(tmp_path / "saved").report.rewrites == lines


def test_a_rewrite_that_changes_nothing_is_refused_with_its_reasons() -> None:
    with pytest.raises(msc.UserError, match=r"(?s)ScaleLinears\(by=1\) changes nothing.*layers.1"):
        msc.compile(Model(), BATCH, rewrites=[ScaleLinears(1)])


@pytest.mark.parametrize("given", ["parallel", ScaleLinears(), [ScaleLinears], [None]])
def test_what_is_no_rewrite_is_refused(given: object) -> None:
    with pytest.raises(msc.UserError, match="rewrites"):
        msc.compile(Model(), BATCH, rewrites=given)  # type: ignore[arg-type]
