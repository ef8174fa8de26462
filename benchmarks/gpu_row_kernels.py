"""The Triton kernels of `gpu_check` that work on rows or elements: they mostly move bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_cases import Case, Make, Sizes
from benchmarks.gpu_kernels import gives, launcher, target_of, tiles_of
from benchmarks.gpu_references import (
    adamw_float64,
    linear_float64,
    nll_float64,
    nll_grad_float64,
)
from msc.codegen.kernel_calls.optimizer import adam
from msc.codegen.kernels import cross_entropy, dropout, gate, linear_cross_entropy, norm
from msc.codegen.kernels.cross_entropy import CrossEntropy
from msc.codegen.kernels.description import Target
from msc.codegen.kernels.dropout import Dropout
from msc.codegen.kernels.gate import Gate
from msc.codegen.kernels.linear_cross_entropy import LinearCrossEntropy
from msc.codegen.kernels.norm import Norm
from msc.ir.ops.random import flat_indices

OPS = torch.ops.msc


def row_kernel_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Norms, cross entropy and dropout, which move bytes."""
    if dtype != torch.bfloat16:
        return
    rows, width = sizes.batch * sizes.sequence, sizes.hidden
    target = target_of(make)
    x, other, gy = (make.normal(rows, width, dtype=dtype) for _ in range(3))
    weight = make.normal(width, dtype=dtype)
    y, summed, dx = (torch.empty_like(x) for _ in range(3))
    own = Norm("rms", rows, width, "bfloat16", target, residual=True)
    rstd = x.new_empty(rows, dtype=torch.float32)
    values = {"x": x, "residual": other, "weight": weight, "y": y, "summed": summed, "rstd": rstd}
    moved = float(x.nbytes)
    case = functools.partial(Case, unit="GB/s", dtype=dtype)
    forward = launcher(norm.emit_forward(own), values)

    def wanted() -> list[Tensor]:
        value = (x + other).double()
        return [functional.rms_norm(value, (width,), weight.double(), own.eps), value]

    rival = lambda: functional.rms_norm(x + other, (width,), weight, own.eps)  # noqa: E731
    yield case("kernel rms_norm + residual", gives(forward, y, summed), wanted, rival, 4 * moved)
    forward()
    parts = x.new_empty(own.programs, width, dtype=torch.float32)
    known = {"gy": gy, "x": summed, "weight": weight, "g_summed": other, "dx": dx, "rstd": rstd}
    kernel = norm.emit_backward(own)
    backward = launcher(kernel, known | ({"dw_parts": parts} if own.sums_in_backward else {}))
    yield case(
        "kernel rms_norm backward + residual",
        gives(backward, dx),
        functools.partial(_rms_gradient_float64, gy, summed, weight, other, own.eps),
        None,
        4 * moved,
    )
    yield from _gate_cases(x, other, gy, target, case)
    yield from _loss_cases(make, sizes, target, case)
    key = OPS.rng_key(torch.tensor([5, 7]), 3).view(1).to(make.device)
    places, _ = flat_indices([None, None], [rows, width], torch.device(make.device))
    given = {"x": x, "row_places": places, "key": key, "y": y}
    drop = launcher(dropout.emit(Dropout(rows, width, 0.1, "bfloat16", target)), given)
    yield case(
        "kernel dropout",
        gives(drop, y),
        lambda: [OPS.dropout(x.cpu(), 0.1, key.cpu().view(()), [None, None], [rows, width])],
        functools.partial(functional.dropout, x, 0.1, training=True),
        2 * moved,
        exact=True,
    )


def _rms_gradient_float64(
    gy: Tensor, x: Tensor, weight: Tensor, g_summed: Tensor, eps: float
) -> Tensor:
    leaf = x.double().requires_grad_()
    with torch.enable_grad():
        y = functional.rms_norm(leaf, (x.shape[1],), weight.double(), eps)
        gradient = torch.autograd.grad(y, leaf, gy.double())[0]
    return gradient + g_summed.double()


def _gate_cases(
    x: Tensor, up: Tensor, gy: Tensor, target: Target, case: Callable[..., Case]
) -> Iterator[Case]:
    """A gate with SiLU, beside torch's two ops forward and what autograd runs backward."""
    rows, width = x.shape
    own = Gate(rows, width, "silu", "bfloat16", target)
    y, d_gate, d_up = (torch.empty_like(x) for _ in range(3))
    given = {"gate": x, "up": up, "gate_row": width, "up_row": width}
    yield case(
        "kernel gate",
        gives(launcher(gate.emit_forward(own), given | {"y": y}), y),
        lambda: functional.silu(x.double()) * up.double(),
        lambda: functional.silu(x) * up,
        3.0 * x.nbytes,
    )
    given |= {"gy": gy, "d_gate": d_gate, "d_up": d_up}
    yield case(
        "kernel gate backward",
        gives(launcher(gate.emit_backward(own), given), d_gate, d_up),
        functools.partial(_gate_gradient_float64, gy, x, up),
        functools.partial(OPS.gated_backward, gy, x, up, "silu"),
        5.0 * x.nbytes,
    )


def _gate_gradient_float64(gy: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    wide = gate.double()
    below = torch.sigmoid(wide)
    slope = below * (1 + wide * (1 - below))
    return [gy.double() * up.double() * slope, gy.double() * wide * below]


def _loss_cases(
    make: Make, sizes: Sizes, target: Target, case: Callable[..., Case]
) -> Iterator[Case]:
    rows, width = sizes.batch * sizes.sequence, sizes.vocabulary
    logits = make.normal(rows, width, dtype=torch.bfloat16)
    labels = make.integers(width, rows)
    lse, picked = (logits.new_empty(rows, dtype=torch.float64) for _ in range(2))
    g_lse, g_target = (make.normal(rows, dtype=torch.float64) for _ in range(2))
    gradient = torch.empty_like(logits)
    loss = CrossEntropy(rows, width, "bfloat16", target)
    given = {"logits": logits, "target": labels, "lse": lse, "start": 0}
    terms = launcher(cross_entropy.emit_terms(loss), {**given, "target_logit": picked})
    expected = functools.partial(nll_float64, logits, labels, None)
    rival = functools.partial(functional.cross_entropy, logits, labels)
    moved = float(logits.nbytes)
    yield case("kernel cross_entropy terms", gives(terms, lse, picked), expected, rival, moved)
    known = {**given, "g_lse": g_lse, "g_target": g_target, "gradient": gradient}
    backward = launcher(cross_entropy.emit_gradient(loss), known)

    wanted = functools.partial(nll_grad_float64, g_lse, g_target, logits, labels, None)
    yield case("kernel cross_entropy gradient", gives(backward, gradient), wanted, None, 2 * moved)
    yield from _head_cases(make, sizes, target, labels)


def _head_cases(make: Make, sizes: Sizes, target: Target, labels: Tensor) -> Iterator[Case]:
    rows, width, depth = labels.shape[0], sizes.vocabulary, sizes.hidden
    x = make.normal(rows, depth, dtype=torch.bfloat16)
    w = make.normal(width, depth, dtype=torch.bfloat16) / math.sqrt(depth)
    tiles = dataclasses.replace(tiles_of(make, target), parts=1)
    head = LinearCrossEntropy(rows, width, depth, "bfloat16", target, tiles)
    highest, total = (x.new_empty(head.columns, rows, dtype=torch.float32) for _ in range(2))
    lse, picked = (x.new_empty(rows, dtype=torch.float64) for _ in range(2))
    given: dict[str, Any] = {"target": labels, "start": 0, "highest": highest, "total": total}
    given["target_logit"] = picked
    first = launcher(linear_cross_entropy.emit_terms(head), {**given, "x": x, "w": w})
    second = launcher(linear_cross_entropy.emit_combine(head), {**given, "lse": lse})

    def both() -> list[Tensor]:
        first()
        second()
        return [lse, picked]

    yield Case(
        "kernel linear_cross_entropy terms",
        both,
        lambda: nll_float64(linear_float64(x, w), labels, None),
        lambda: functional.cross_entropy(x @ w.t(), labels),
        2.0 * rows * width * depth,
        "TFLOP/s",
        torch.bfloat16,
    )


def optimizer_kernel_cases(make: Make, sizes: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """One AdamW step of eight tensors in one launch."""
    if dtype != torch.bfloat16:
        return
    size = sizes.parameters // 8
    lists = [
        [make.normal(size, dtype=own) for _ in range(8)]
        for own in (dtype, dtype, torch.float32, torch.float32)
    ]
    parameters, gradients, *states = lists
    for second in states[1]:
        second.abs_()
    before = [tensors[0].double() for tensors in lists]
    operands = (parameters, gradients, states, torch.tensor(3), 1e-3, (0.9, 0.999), 1e-8, 0.1, True)
    ((kernel, values),), _ = adam(target_of(make), *operands).run(*operands)
    run = launcher(kernel, values)

    def step() -> list[Tensor]:
        run()  # in place: only the first of the steps is compared
        # the kernel has addresses alone: `lists` keeps all of the tensors
        return [lists[0][0].clone(), lists[2][0].clone()]

    moved = float(sum(x.nbytes for tensors in (*lists, parameters, *states) for x in tensors))
    yield Case(
        "kernel adamw", step, functools.partial(adamw_float64, *before), None, moved, "GB/s", dtype
    )
