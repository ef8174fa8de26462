"""Parameter groups: which parameters they take, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

import msc
from msc.ir.optimizer import SGD, AdamW, LearningRate, Optimizer, ParameterGroup
from tests.parity.captures import capture_once as capture_once

NAMES = {
    "wte.weight": (("wte.weight", "lm_head.weight"), 2),
    "h.0.up.weight": (("h.0.up.weight",), 2),
    "h.0.up.bias": (("h.0.up.bias",), 1),
    "h.0.norm.weight": (("h.0.norm.weight",), 1),
}


def test_the_first_group_that_matches_decides() -> None:
    groups = [
        ParameterGroup("*.norm.*", lr=2.0),
        ParameterGroup("*", max_dims=1, weight_decay=0.0),
        ParameterGroup(["h.*.up.weight", "lm_head.weight"], betas=[0.5, 0.6]),
    ]
    found = AdamW(max_norm=1.0, groups=groups).grouped(NAMES)
    assert found == {
        "h.0.norm.weight": AdamW(lr=2.0),
        "h.0.up.bias": AdamW(weight_decay=0.0),
        "h.0.up.weight": AdamW(betas=(0.5, 0.6)),
        "wte.weight": AdamW(betas=(0.5, 0.6)),  # by the name of the tied head
    }
    assert len({*found.values()}) == 3


def test_parameters_in_no_group_have_the_optimizers_own() -> None:
    found = SGD(momentum=0.9, groups=[ParameterGroup("h.*", momentum=0.0)]).grouped(NAMES)
    assert found == {name: SGD() for name in NAMES if name.startswith("h.")}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([ParameterGroup("decoder.*", lr=1.0)], 'AdamW: .*"decoder.*" matches no parameter. The'),
        ([ParameterGroup(["h.*", "x"], lr=1.0)], '"x" matches no parameter'),
        (
            [ParameterGroup("*", lr=1.0), ParameterGroup("h.*", lr=2.0)],
            r'"h\.\*" matches only parameters of groups before it',
        ),
        ([ParameterGroup("wte*", max_dims=1, lr=1.0)], "max_dims=1.* matches no parameter"),
    ],
)
def test_patterns_that_do_nothing(groups: list[ParameterGroup], message: str) -> None:
    with pytest.raises(msc.PlanError, match=message):
        AdamW(groups=groups).grouped(NAMES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(groups=[ParameterGroup("*", momentum=0.9)]), "sets 'momentum'; the hyper"),
        (lambda: AdamW(groups=[ParameterGroup("*", max_norm=0.9)]), "sets 'max_norm'; the hyper"),
        (
            lambda: AdamW(groups=[ParameterGroup("*", lr=-1)]),
            "In ParameterGroup.*: AdamW: lr is",
        ),
        (lambda: AdamW(groups=["*"]), r"groups is \('\*',\); it is a list"),  # type: ignore[list-item]
        (lambda: ParameterGroup(3), "patterns is 3; it is a text, or a list"),  # type: ignore[arg-type]
        (lambda: ParameterGroup("*", max_dims=-1), "max_dims is -1"),
    ],
)
def test_groups_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(msc.PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (AdamW, {"lr": "1e-3"}, "AdamW: lr is '1e-3'; it is a finite number of at least 0, or an"),
        (AdamW, {"lr": LearningRate}, "AdamW: lr is"),
        (AdamW, {"betas": 0.9}, "AdamW: betas is 0.9; they are two numbers in"),
        (AdamW, {"skip_nonfinite": 1}, "AdamW: skip_nonfinite is 1; it is True, False, or None"),
        (SGD, {"momentum": -1}, "SGD: momentum is -1"),
        (SGD, {"nesterov": True}, "SGD: nesterov needs momentum above 0 and dampening 0"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "SGD: nesterov needs"),
        (SGD, {"dampening": float("nan")}, "SGD: dampening is nan; it is a finite number"),
        (SGD, {"momentum": float("inf")}, "SGD: momentum is inf; it is a finite number"),
        (msc.LAMB, {"eps": -1}, "LAMB: eps is -1"),
        (msc.Adam, {"weight_decay": True}, "Adam: weight_decay is True"),
    ],
)
def test_hyperparameters_that_cannot_be(
    kind: type[Optimizer], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(msc.PlanError, match=message):
        kind(**options)


@pytest.mark.usefixtures("capture_once")
def test_compile_names_the_patterns_fault() -> None:
    from tests import models

    optimizer = msc.SGD(groups=[msc.ParameterGroup("layers.*", lr=1.0)])
    model = models.GPT(width=8, heads=1, layers=1)
    with pytest.raises(msc.PlanError, match=r'"layers\.\*" matches no parameter\. The'):
        msc.compile(model, models.tokens(), optimizer=optimizer)
