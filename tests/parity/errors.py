"""What parity means in these tests: the errors of law 1, and what counts as sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from msc.program import Program
from msc.step_result import StepResult
from msc.verification import largest, relative_error

EXACT = 1e-10
"""Largest error of a loss or gradient in float64."""


def step_errors(
    program: Program, result: StepResult, loss: Tensor, grads: Mapping[str, Tensor]
) -> dict[str, float]:
    """Errors of a step's loss and of every trainable parameter's gradient that are too large."""
    scale = largest(grads.values())
    errors = {"loss": relative_error(result.loss, loss, scale)}
    for name, layout in program.parameters.items():
        if layout.trainable:
            errors[name] = relative_error(result.grads.get(name), grads.get(name), scale)
    return {name: error for name, error in errors.items() if not error <= EXACT}


def parameter_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-8
) -> dict[str, float]:
    """Largest differences of parameters that are too large."""
    differences = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
    return {name: value for name, value in differences.items() if not value <= tolerance}


def check_sharded(sharded: Mapping[str, Mapping[str, float]], mesh: Mapping[str, int]) -> None:
    """Every axis shards at least 95 % of the FLOPs, and tp and pp of the parameter bytes."""
    wanted: dict[tuple[str, str], Any] = {}
    for axis, size in mesh.items():
        if size > 1:
            for kind in ("flops",) if axis == "dp" else ("flops", "parameters"):
                wanted[axis, kind] = sharded[axis][kind]
    assert all(fraction >= 0.95 for fraction in wanted.values()), wanted
