"""A gate: `activation(gate) * up` (Shazeer, "GLU variants improve transformer", 2020).

As one op it keeps its two operands for the backward; written out it keeps the activation's result
as well.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msc.ir.ops.activations import ACTIVATIONS
from msc.ir.ops.library import define
from msc.ir.ops.linear import linear


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """gate and up, of one shape and dtype -> `activation(gate) * up`, of those.

    activation: one of `ACTIVATIONS`.
    """
    return ACTIVATIONS[activation].apply(gate).mul_(up).contiguous()


def gated_backward(gy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; gy is that of the result, the others are the op's operands."""
    own = ACTIVATIONS[activation]
    d_up = own.apply(gate).mul_(gy)
    return own.gradient(gy * up, gate).contiguous(), d_up.contiguous()


def gated_backward_(gy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`gated_backward`, whose gradient of gate overwrites gy."""
    own = ACTIVATIONS[activation]
    d_up = own.apply(gate).mul_(gy).contiguous()
    return own.gradient(gy.mul_(up), gate), d_up


def linear_gated(
    x: Tensor, w: Tensor, up: Tensor | None, activation: str, keep: bool, transposed: bool = False
) -> list[Tensor]:
    """`gated(linear(x, w), linear(x, up))`: x `[..., k]`, both weights `[n, k]` -> `[..., n]`.

    transposed: weights are `[k, n]`. Without `up`, w has both, the gate's first: `[2 n, k]` or
    `[k, 2 n]`. With `keep` the products follow the result, as the gradient needs them: two
    `[..., n]`, or without `up` one `[..., 2 n]`. It has no gradient (see `linear_epilogue`).
    """
    first = linear(x, w, None, transposed)
    if up is None:
        gate, other = first.chunk(2, -1)
        out = gated(gate, other, activation)
        return [out, first] if keep else [out]
    second = linear(x, up, None, transposed)
    if keep:
        return [gated(first, second, activation), first, second]
    return [ACTIVATIONS[activation].overwrite(first).mul_(second)]


def _gated_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gated: gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} are "
            "not of one shape and dtype"
        )
    _check(activation)
    return gate.new_empty(gate.shape)


def _gated_backward_fake(
    gy: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _linear_gated_fake(
    x: Tensor, w: Tensor, up: Tensor | None, activation: str, keep: bool, transposed: bool = False
) -> list[Tensor]:
    n, k = (w.shape[1], w.shape[0]) if transposed else (w.shape[0], w.shape[1])
    fits = n % 2 == 0 if up is None else up.shape == w.shape
    if x.shape[-1] != k or not fits:
        raise ValueError(
            f"linear_gated: x {tuple(x.shape)}, w {tuple(w.shape)} (transposed={transposed}) and "
            f"up {None if up is None else tuple(up.shape)} do not fit together"
        )
    _check(activation)
    widths = [n // 2, n] if up is None else [n, n, n]
    return [x.new_empty((*x.shape[:-1], width)) for width in (widths if keep else widths[:1])]


def _check(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"a gate has no activation {activation!r}; there are {[*ACTIVATIONS]}")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    return *GATED_BACKWARD(gy, *ctx.saved_tensors, ctx.activation), None


GATED_BACKWARD = define(
    "gated_backward(Tensor gy, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    gated_backward,
    _gated_backward_fake,
)
GATED = define(
    "gated(Tensor gate, Tensor up, str activation) -> Tensor",
    gated,
    _gated_fake,
    setup=_setup,
    backward=_backward,
)
LINEAR_GATED = define(
    "linear_gated(Tensor x, Tensor w, Tensor? up, str activation, bool keep,"
    " bool transposed=False) -> Tensor[]",
    linear_gated,
    _linear_gated_fake,
)
