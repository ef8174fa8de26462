"""Optimizer kernels over tensors of many sizes against the executors' own steps in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from msc.codegen.kernels import optimizer
from msc.codegen.kernels.description import SM_90
from msc.codegen.kernels.launch import launch
from msc.codegen.kernels.optimizer import PIECE, Moments
from msc.runtime.adam import adam
from msc.runtime.lamb import lamb, lamb_sums
from msc.testing.interpreter import interpreted
from tests.codegen.kernels.fused import error

SIZES = (5, PIECE + 3, 2 * PIECE)
BETAS, EPS, DECAY, RATE, STEP = (0.9, 0.95), 1e-8, 0.1, 1e-2, 3
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}


class Tensors:
    """Parameters, gradients and moments, and the tables that say where they are."""

    def __init__(self, dtype: str, skip: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def randoms(stored: torch.dtype) -> list[Tensor]:
            return [torch.randn(size, generator=generator).to(stored) for size in SIZES]

        stored = getattr(torch, dtype)
        self.parameters, self.gradients = randoms(stored), randoms(stored)
        self.firsts = randoms(torch.float32)
        self.seconds = [second.abs() for second in randoms(torch.float32)]
        pieces = [(i, at) for i, size in enumerate(SIZES) for at in range(0, size, PIECE)]
        counts = [-(-size // PIECE) for size in SIZES]
        self.ends = torch.tensor([0, *counts]).cumsum(0).int()
        self.tables: dict[str, Any] = {
            name: torch.tensor([tensor.data_ptr() for tensor in getattr(self, name)])
            for name in ("parameters", "gradients", "firsts", "seconds")
        }
        corrections = [1 / (1 - beta**STEP) for beta in BETAS]
        self.given = {
            "lengths": torch.tensor(SIZES),
            "tensors": torch.tensor([tensor for tensor, _ in pieces], dtype=torch.int32),
            "starts": torch.tensor([at for _, at in pieces]),
            "scalars": torch.tensor([RATE, *corrections, 0.5, float(skip)]),
        }
        self.pieces = len(pieces)

    def moments(self, decoupled: bool = True) -> Moments:
        dtype = str(self.parameters[0].dtype).removeprefix("torch.")
        counts = (len(SIZES), self.pieces)
        return Moments(*counts, dtype, dtype, SM_90, BETAS, EPS, DECAY, decoupled)

    def doubled(self) -> tuple[list[Tensor], list[Tensor], tuple[list[Tensor], list[Tensor]]]:
        """The same in float64, gradients with their factor."""
        lists = (self.parameters, self.gradients, self.firsts, self.seconds)
        p, g, m, v = ([tensor.double() for tensor in values] for values in lists)
        return p, [gradient * 0.5 for gradient in g], (m, v)

    def check(self, parameters: Any, states: Any, tolerance: float) -> None:
        for found, wanted in zip(self.parameters, parameters, strict=True):
            assert error(found, wanted) <= tolerance
        for found, wanted in zip(
            [*self.firsts, *self.seconds], [*states[0], *states[1]], strict=True
        ):
            assert error(found, wanted) <= 1e-6


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_adam(dtype: str, decoupled: bool) -> None:
    tensors = Tensors(dtype)
    values = tensors.doubled()
    step = torch.tensor(STEP)
    parameters, states = adam(*values, step, RATE, BETAS, EPS, DECAY, decoupled)
    with interpreted():
        launch(optimizer.emit_adam(tensors.moments(decoupled)), tensors.tables | tensors.given)
    tensors.check(parameters, states, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lamb(dtype: str) -> None:
    tensors = Tensors(dtype)
    tensors.parameters[0].zero_()  # no norm: the step is not scaled
    p, g, before = tensors.doubled()
    step = torch.tensor(STEP)
    sums, between = lamb_sums(p, g, before, step, BETAS, EPS, DECAY, [1] * len(SIZES))
    parameters, states = lamb(p, sums, between, step, RATE, BETAS, EPS, DECAY)
    norms = run_lamb(tensors)
    assert error(norms, sums) <= 1e-6
    tensors.check(parameters, states, TOLERANCE[dtype])
    again = Tensors(dtype)
    again.parameters[0].zero_()
    assert torch.equal(run_lamb(again), norms)


def run_lamb(tensors: Tensors) -> Tensor:
    """Takes the step; the squared norms of all parameters, then of all updates."""
    moments = tensors.moments()
    squares = torch.full((tensors.pieces, 2), float("nan"))
    norms = torch.full((2 * len(SIZES),), float("nan"), dtype=torch.float64)
    tables = tensors.tables
    without = {name: table for name, table in tables.items() if name != "gradients"}
    with interpreted():
        first = optimizer.emit_lamb_moments(moments)
        launch(first, tables | tensors.given | {"squares": squares})
        second = optimizer.emit_lamb_norms(moments)
        launch(second, {"squares": squares, "ends": tensors.ends, "norms": norms})
        third = optimizer.emit_lamb_step(moments)
        launch(third, without | tensors.given | {"norms": norms, "count": len(SIZES)})
    return norms


def test_a_skipped_step_changes_nothing() -> None:
    tensors = Tensors("float32", skip=True)
    before = [tensor.clone() for tensor in (*tensors.parameters, *tensors.firsts, *tensors.seconds)]
    launch(optimizer.emit_adam(tensors.moments()), tensors.tables | tensors.given)
    run_lamb(tensors)
    after = (*tensors.parameters, *tensors.firsts, *tensors.seconds)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
