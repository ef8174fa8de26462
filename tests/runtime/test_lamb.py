"""LAMB on one rank's tensors: as the paper has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from msc.runtime.lamb import lamb, lamb_sums
from tests.lamb import PlainLAMB
from tests.runtime.test_adam import BETAS, EPS, randoms, zeros


def one_step(
    parameters: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]], step: int
) -> Tensor:
    number, decay = torch.tensor(step), 0.1
    copies = [1] * len(parameters)
    sums, moved = lamb_sums(parameters, gradients, states, number, BETAS, EPS, decay, copies)
    found = lamb(parameters, sums, moved, number, 0.01, BETAS, EPS, decay)
    assert all(a is b for a, b in zip(found[0], parameters, strict=True))
    assert all(a is b for a, b in zip(found[1][1], states[1], strict=True))
    return sums


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_steps_equal_the_papers(zero: int | None) -> None:
    """Also of a parameter that starts at zero, as biases do: its first ratio is 1."""
    parameters, states = randoms(0), zeros()
    if zero is not None:
        parameters[zero].zero_()
    plain = PlainLAMB(0.01, BETAS, EPS, 0.1)
    expected = {str(index): value.clone() for index, value in enumerate(parameters)}
    for step in range(5):
        gradients = randoms(10 + step)
        one_step(parameters, gradients, states, step + 1)
        plain.step(expected, {str(index): g for index, g in enumerate(gradients)})
    torch.testing.assert_close(parameters, list(expected.values()), rtol=1e-12, atol=1e-12)


def test_an_update_of_zero_changes_nothing() -> None:
    parameters = [torch.zeros(3, dtype=torch.float64)]
    states = [[torch.zeros(3, dtype=torch.float64)] for _ in range(2)]
    sums = one_step(parameters, [torch.zeros(3, dtype=torch.float64)], states, 1)
    assert not sums.any()
    assert not parameters[0].any()


def test_copies_divide_the_sums() -> None:
    rest = (torch.tensor(1), BETAS, EPS, 0.0)
    whole, _ = lamb_sums(randoms(0), randoms(1), zeros(), *rest, [1, 1, 1])
    part, _ = lamb_sums(randoms(0), randoms(1), zeros(), *rest, [1, 4, 2])
    assert torch.equal(part * torch.tensor([1, 4, 2, 1, 4, 2]), whole)
    assert whole[0] == pytest.approx(float(randoms(0)[0].square().sum()))
