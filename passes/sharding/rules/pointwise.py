"""Ops that compute each element from the elements at the same place, with broadcasting."""

from __future__ import annotations

from typing import Any

from torch import ops

import msc.ir.ops  # noqa: F401  registers msc::
from msc.passes.sharding.rule import Rule
from msc.passes.sharding.rules.binding import Bound, Line, derived, dims_of
from msc.passes.sharding.rules.notation import from_notation, line

aten = ops.aten
msc_ops = ops.msc


def pointwise(*targets: Any, linear: str = "") -> Line:
    """A line for pointwise ops. linear: see `parse_linear`."""
    return derived(lambda bound: _pointwise(bound, linear), *targets)


def _pointwise(bound: Bound, linear: str) -> Rule:
    terms = ",".join(["..."] * len(bound.tensor_arguments()))
    return from_notation(bound, f"{terms}->...", linear=linear)


def linear_with_zero(*targets: Any, scalar: str, linear: str) -> Line:
    """Pointwise ops that are linear only if the number that they fill in is 0."""

    def build(bound: Bound) -> Rule:
        return _pointwise(bound, linear if bound.values[scalar] == 0 else "")

    return derived(build, *targets)


def _dropout(bound: Bound) -> Rule | None:
    """Only dropout that drops nothing: random numbers need `msc.dropout`."""
    active = bound.values["train"] and bound.values["p"] > 0
    return None if active else _pointwise(bound, "input")


def _prelu(bound: Bound) -> Rule:
    """One slope for all, or one for each channel."""
    if bound.tensors("weight")[0].numel() == 1 or len(bound.shape("self")) < 2:
        return from_notation(bound, "...,w->...", whole="w")
    return from_notation(bound, "nc...,c->nc...")


def _glu(bound: Bound) -> Rule:
    """`[a | b] -> a * sigmoid(b)`: both halves are split alike."""
    dims = dims_of(bound.result_shape())
    dim = bound.dim()
    ((own,),) = dims[dim]
    joined = ((("halves", 2), own),)
    return bound.rule(
        {"self": (*dims[:dim], joined, *dims[dim + 1 :])}, [tuple(dims)], whole=["halves"]
    )


def _like_other(bound: Bound) -> Rule | None:
    """`x.type_as(other)`: reads only the other's dtype, and shares its dims where it can."""
    if bound.shape("other") != bound.shape("self"):
        return None
    return _pointwise(bound, "self")


# Linear in what is written as `linear`; a Python number in its place leaves the group out, so
# `x + 1` is not linear: each rank would add 1.
POINTWISE = [
    pointwise(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, linear="self other"),
    pointwise(aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar),
    pointwise(aten.mul.Tensor, aten.multiply.Tensor, linear="self | other"),
    pointwise(aten.mul.Scalar, aten.div.Scalar, aten.neg, linear="self"),
    pointwise(aten.div.Tensor, aten.true_divide.Tensor, aten.divide.Tensor, linear="self"),
    pointwise(aten.addcmul, linear="self tensor1 | self tensor2"),
    pointwise(aten.addcdiv, linear="self tensor1"),
    pointwise(msc_ops.training_value),
    pointwise(msc_ops.gated, linear="up"),
    pointwise(aten.lerp.Scalar, linear="self end"),
    pointwise(aten.lerp.Tensor, linear="self end"),
    pointwise(
        aten.clone,
        aten.contiguous,
        aten.alias,
        aten.detach,
        aten.lift_fresh_copy,
        aten.lift,
        linear="self",
    ),
    pointwise(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy, linear="self"),
    pointwise(aten.copy, linear="src"),
    pointwise(aten.fill.Tensor, linear="value"),
    pointwise(aten.positive, aten.negative, aten.deg2rad, aten.rad2deg, linear="self"),
    pointwise(aten.subtract.Tensor, linear="self other"),
    pointwise(aten.where.self, linear="self other"),
    linear_with_zero(aten.where.ScalarOther, scalar="other", linear="self"),
    linear_with_zero(aten.where.ScalarSelf, scalar="self", linear="other"),
    pointwise(aten.where.Scalar),
    linear_with_zero(aten.masked_fill.Scalar, scalar="value", linear="self"),
    pointwise(aten.masked_fill.Tensor, linear="self value"),
    derived(_dropout, aten.dropout),
    derived(_prelu, aten.prelu),
    derived(_glu, aten.glu),
    derived(_like_other, aten.type_as, aten.to.other),
    pointwise(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.square),
    pointwise(aten.sqrt, aten.rsqrt, aten.reciprocal, aten.exp, aten.exp2, aten.expm1),
    pointwise(aten.log, aten.log2, aten.log10, aten.log1p, aten.erf, aten.erfc, aten.xlogy.Tensor),
    pointwise(aten.sin, aten.cos, aten.tan, aten.asin, aten.acos, aten.atan, aten.atan2),
    pointwise(aten.arcsin, aten.arccos, aten.arctan, aten.arctan2, aten.asinh, aten.acosh),
    pointwise(aten.atanh, aten.arcsinh, aten.arccosh, aten.arctanh, aten.sinc, aten.logit),
    pointwise(aten.erfinv, aten.lgamma, aten.digamma, aten.special_i0, aten.special_entr),
    pointwise(aten.polygamma, aten.special_expit, aten.special_log_ndtr, aten.special_erfcx),
    pointwise(aten.special_xlog1py, aten.hypot, aten.logaddexp, aten.logaddexp2),
    pointwise(aten.copysign.Tensor, aten.copysign.Scalar, aten.heaviside, aten.ldexp.Tensor),
    pointwise(aten.float_power.Tensor_Scalar, aten.float_power.Tensor_Tensor),
    pointwise(aten.complex, aten.polar, aten.real, aten.imag, aten.angle),
    line("...->...z", aten.view_as_real, whole="z"),
    line("...z->...", aten.view_as_complex, whole="z"),
    pointwise(aten.sinh, aten.cosh, aten.tanh, aten.sigmoid, aten.log_sigmoid, aten.softplus),
    pointwise(aten.relu, aten.relu6, aten.leaky_relu, aten.elu, aten.celu, aten.selu, aten.gelu),
    pointwise(aten.silu, aten.mish, aten.hardtanh, aten.hardswish, aten.hardsigmoid),
    pointwise(aten.threshold, aten.softshrink, aten.hardshrink),
    pointwise(
        aten.abs,
        aten.absolute,
        aten.signbit,
        aten.sign,
        aten.sgn,
        aten.floor,
        aten.ceil,
        aten.round,
        aten.trunc,
        aten.frac,
    ),
    pointwise(aten.clamp, aten.clamp.Tensor, aten.clamp_min, aten.clamp_max, aten.clip),
    pointwise(aten.clamp_min.Tensor, aten.clamp_max.Tensor),
    pointwise(aten.maximum, aten.minimum, aten.max.other, aten.min.other, aten.fmax, aten.fmin),
    pointwise(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide),
    pointwise(aten.remainder.Tensor, aten.remainder.Scalar, aten.fmod.Tensor, aten.fmod.Scalar),
    pointwise(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor),
    pointwise(aten.gt.Tensor, aten.ge.Tensor, aten.isclose),
    pointwise(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar),
    pointwise(aten.gt.Scalar, aten.ge.Scalar, aten.isnan, aten.isinf, aten.isfinite),
    pointwise(aten.logical_and, aten.logical_or, aten.logical_xor, aten.logical_not),
    pointwise(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor),
    pointwise(aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar),
    pointwise(aten.bitwise_not, aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor),
    pointwise(aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar),
    pointwise(aten.nan_to_num, aten.fill.Scalar),
]
