"""Pins are kept, a plan gives the identical program, and what does not fit is refused in full."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import placement_types as torch_placements

import msc
from msc.ir.errors import PlanError
from msc.ir.placement import REPLICATED, Replicate, Shard
from msc.program import Program
from tests import models

Q = "h.*.attn.weight"


def gpt(layers: int = 2, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return models.GPT(width=width, heads=2, layers=layers)


def compiled(mesh: str = "tp=2", model: nn.Module | None = None, **options: Any) -> Program:
    return msc.compile(model or gpt(), models.tokens(), mesh=mesh, **options)


@functools.cache
def found() -> Program:
    return compiled()


def placed(program: Program) -> dict[str, str]:
    return {name: str(state) for name, state in program.plan.parameters.items()}


def refusal(**options: Any) -> str:
    with pytest.raises(PlanError) as error:
        compiled(**options)
    return str(error.value)


def dumps(program: Program, folder: Path) -> dict[str, bytes]:
    program.dump(folder)
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.txt")}


# -- pins


@pytest.mark.parametrize(
    ("placement", "states"),
    [
        (Shard(1), {"S1"}),
        (Shard(-1), {"S1"}),
        (Shard(0), {"S0/3"}),  # the cheapest segmentation of the fused weight
        (Shard(0, 6), {"S0/6"}),
        (Replicate(), {"R~"}),
        (torch_placements.Shard(1), {"S1"}),
        (torch_placements.Replicate(), {"R~"}),
    ],
)
def test_a_pin_is_kept(placement: Any, states: set[str]) -> None:
    program = compiled(pins={Q: {"tp": placement}})
    assert {placed(program)[f"h.{i}.attn.weight"] for i in range(2)} == states
    assert program.report.search_cost >= found().report.search_cost


def test_a_pinned_program_computes_the_same() -> None:
    pins = {Q: {"tp": Shard(1)}, "h.*.proj.weight": {"tp": Replicate()}}
    report = msc.verify(
        gpt(), models.tokens(), mesh="dp=2,tp=2", dtype=torch.float64, pins=pins, microbatches=2
    )
    assert report.ok, report.first_difference


def test_a_pin_may_name_a_tied_parameter_by_either_name() -> None:
    states = {
        name: placed(compiled(pins={name: {"tp": Shard(1)}}))["wte.weight"]
        for name in ("wte.weight", "lm_head.weight")
    }
    assert states == {"wte.weight": "S1", "lm_head.weight": "S1"}


def test_a_pin_on_one_of_equal_layers_holds_for_all_and_says_so() -> None:
    program = compiled(pins={"h.0.attn.weight": {"tp": Shard(1)}})
    assert placed(program)["h.1.attn.weight"] == "S1"
    assert program.report.notes == (
        'pin "h.0.attn.weight": {"tp": Shard(1)} holds for h.1.attn.weight too: equal layers share '
        "one placement",
    )


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x).square().sum()
        return result


def test_a_pin_on_what_the_loss_does_not_read_says_so() -> None:
    program = msc.compile(
        Unused(), (torch.randn(4, 4),), mesh="tp=2", pins={"unused.weight": {"tp": Shard(0)}}
    )
    assert any("says nothing of unused.weight" in note for note in program.report.notes)


def test_over_one_rank_a_pin_is_kept_as_it_is() -> None:
    assert placed(compiled("tp=1", pins={Q: {"tp": Shard(0)}}))["h.0.attn.weight"] == "R"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({Q: {"pp": Shard(0)}}, "axis 'pp' places no parameters by choice: the balance of the"),
        ({Q: {"dp": Shard(0)}}, "axis 'dp' places no parameters by choice: parameters are whole"),
        ({Q: {"cp": Shard(0)}}, "the mesh tp=2 has no axis 'cp'"),
        ({Q: {"tp": msc.Partial()}}, "a parameter is no partial sum"),
        ({Q: {"tp": "Shard(0)"}}, "'Shard(0)' is no placement; use msc.Shard or msc.Replicate"),
        ({"h.*.atn.weight": {"tp": Shard(0)}}, "matches no parameter; there are h.1.attn.weight"),
        ({Q: Shard(0)}, "pins maps patterns of parameter names to placements"),
        ([Q], "pins is a list; pins maps patterns"),
        (
            {Q: {"tp": Shard(2)}},
            "h.0.attn.weight (48, 16) cannot be Shard(2) on tp=2; it can be Replicate(), Shard(1), "
            "Shard(0)",
        ),
        (
            {"h.0.attn.weight": {"tp": Shard(0)}, "h.1.attn.weight": {"tp": Shard(1)}},
            "contradict each other: equal layers share one placement",
        ),
        (
            {"wte.weight": {"tp": Shard(0)}, "lm_head.weight": {"tp": Shard(1)}},
            'pins "wte.weight": {"tp": Shard(0)} for wte.weight and "lm_head.weight"',
        ),
    ],
)
def test_pins_that_cannot_be_kept_are_refused(pins: Any, message: str) -> None:
    assert message in refusal(pins=pins)


def test_every_pin_that_cannot_be_kept_is_named() -> None:
    text = refusal(pins={"x": {"tp": Shard(0)}, "y": {"tp": Shard(0)}})
    assert '"x" matches no parameter' in text
    assert '"y" matches no parameter' in text


class WithoutRule(nn.Module):
    """A weight that is also read by an op that works on the whole alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x)).square().sum() + torch.linalg.slogdet(self.a.weight)[1]
        return result


def test_pins_that_leave_no_placement_are_named() -> None:
    pins = {"a.weight": {"tp": Shard(0)}, "b.weight": {"tp": Shard(1)}}
    with pytest.raises(PlanError, match="keeps the pins") as error:
        msc.compile(WithoutRule(), (torch.randn(4, 4),), mesh="tp=2", pins=pins)
    assert 'pin "a.weight": {"tp": Shard(0)}' in str(error.value)
    assert "b.weight" not in str(error.value)  # it is not to blame


# -- plans


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp=2,tp=2", "dp=2"])
def test_a_plan_gives_the_identical_program(mesh: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"microbatches": 2, "optimizer": msc.AdamW()}
    first = compiled(mesh, **options)
    first.plan.save(tmp_path / "plan.json")
    for plan in (first.plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        again = compiled(mesh, plan=plan, **options)
        assert again.fingerprint == first.fingerprint
        assert again.plan == first.plan
        assert again.report.to_json() == first.report.to_json()
    assert dumps(again, tmp_path / "again") == dumps(first, tmp_path / "first")


def test_a_plan_decides_and_not_the_search() -> None:
    pinned = compiled(pins={Q: {"tp": Shard(1)}})
    applied = compiled(plan=pinned.plan)
    assert applied.fingerprint == pinned.fingerprint != found().fingerprint
    assert applied.report.search_cost == pinned.report.search_cost > found().report.search_cost


def test_a_saved_plan_is_read_as_it_was(tmp_path: Path) -> None:
    found().plan.save(tmp_path / "plan.json")
    assert msc.Plan.load(tmp_path / "plan.json") == found().plan
    text = (tmp_path / "plan.json").read_text()
    assert '\n  "h.0.attn.weight": {"S": [0, 3' in text  # a line for each parameter


def test_a_loaded_program_has_its_plan(tmp_path: Path) -> None:
    found().save(tmp_path)
    assert msc.load(tmp_path).plan == found().plan


def test_a_plan_holds_in_another_precision() -> None:
    assert compiled(plan=found().plan, precision="bfloat16").plan == found().plan


def test_a_plan_of_another_mesh_is_refused_with_every_axis() -> None:
    text = refusal(mesh="pp=2,tp=4", plan=found().plan)
    assert "mesh axis 'tp' has 2 ranks in the plan, 4 here" in text
    assert "mesh axis 'pp' has 1 ranks in the plan, 2 here" in text
    text = refusal(microbatches=2, plan=found().plan)
    assert text.splitlines()[1] == "  the plan was made for 1 micro-batches, here are 2"


def test_a_plan_of_another_model_is_refused_with_the_differences() -> None:
    text = refusal(model=gpt(layers=3), plan=found().plan)
    assert "parameter h.2.attn.weight of the model is not in the plan" in text
    text = refusal(model=gpt(width=32), plan=found().plan)
    assert (
        "the plan has parameter wte.weight [96, 16], the model parameter wte.weight [96, 32]"
        in text
    )
    listed = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(listed) == 13
    assert listed[-1].startswith("  and ")


class Relu(models.GPTBlock):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.ln_2(x))))
        return result


def test_a_plan_with_another_op_names_it() -> None:
    def build(block: type[nn.Module]) -> nn.Module:
        model = gpt()
        model.h = nn.ModuleList(block(16, 2, 0.0) for _ in range(2))
        return model

    class Gelu(Relu):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.down(nn.functional.gelu(self.up(self.ln_2(x))))
            return result

    plan = compiled(model=build(Relu)).plan
    text = refusal(model=build(Gelu), plan=plan)
    assert (
        "h.0-1: the plan has aten.relu [8, 16, 64] in h.0, the model aten.gelu [8, 16, 64]" in text
    )


def edited(change: Any) -> Mapping[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(found().plan.to_json()))
    change(data)
    return data


def test_a_placement_that_a_parameter_cannot_have_is_refused() -> None:
    def change(data: dict[str, Any]) -> None:
        for name in ("h.0.ln_1.weight", "h.1.ln_1.weight"):
            data["parameters"][name] = data["parameters"]["h.0.up.weight"]
        data["parameters"]["h.1.up.weight"] = "R"

    text = refusal(plan=msc.Plan.load(edited(change)))
    assert "h.0.ln_1.weight is S0 in the plan; it can be R, R~" in text
    assert "h.1.up.weight is R in the plan, but S0 in h.0.up.weight: equal layers share" in text


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    def change(data: dict[str, Any]) -> None:
        for name in ("h.0.up.weight", "h.1.up.weight"):
            data["parameters"][name] = data["parameters"]["h.0.proj.weight"]

    text = refusal(plan=msc.Plan.load(edited(change)))
    assert "(msc.linear) reads h_0_up_weight as S0, which cannot be made of S1" in text

    def border(data: dict[str, Any]) -> None:
        data["blocks"][0]["outputs"] = ["R"]

    assert "does not agree with itself" in refusal(plan=msc.Plan.load(edited(border)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not one that program.plan.save"),
        ('{"format": "msc plan", "version": 99}', "is of version 99"),
        ('{"format": "msc plan", "version": 1, "mesh": {"tp": 2}}', "is damaged: KeyError"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        msc.Plan.load(tmp_path / "plan.json")


def test_what_is_no_plan_is_refused() -> None:
    assert "plan is a int" in refusal(plan=3)
    with pytest.raises(PlanError, match="cannot be written"):
        found().plan.save("/nowhere/plan.json")


def test_pins_and_a_plan_must_agree() -> None:
    agreeing = compiled(plan=found().plan, pins={Q: {"tp": Shard(0)}})
    assert agreeing.fingerprint == found().fingerprint
    text = refusal(plan=found().plan, pins={Q: {"tp": Shard(1)}})
    assert "h.0.attn.weight is S0/3 in the plan, but a pin asks S1" in text
    assert "h.1.attn.weight is S0/3 in the plan, but a pin asks S1" in text


def test_a_plan_without_tp_has_everything_whole() -> None:
    plan = compiled("dp=2").plan
    assert set(plan.parameters.values()) == {REPLICATED}
    assert [block.instances for block in plan.blocks][1] == ("h.0", "h.1")
