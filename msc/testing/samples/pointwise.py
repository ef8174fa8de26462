"""Sample calls of pointwise ops and of ops that make tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import ops

from msc.ir.torch_private import OpOverload
from msc.testing.samples.draw import Draw, samples

aten = ops.aten


@samples(
    aten.sqrt, aten.rsqrt, aten.reciprocal, aten.exp, aten.exp2, aten.expm1,
    aten.log, aten.log2, aten.log10, aten.log1p, aten.erf, aten.erfc, aten.square,
    aten.sin, aten.cos, aten.tan, aten.asin, aten.acos, aten.atan,
    aten.arcsin, aten.arccos, aten.arctan, aten.asinh, aten.atanh, aten.arcsinh, aten.arctanh,
    aten.sinc, aten.logit, aten.erfinv, aten.lgamma, aten.digamma, aten.special_entr,
    aten.special_expit, aten.special_log_ndtr, aten.special_erfcx, aten.special_i0,
    aten.sinh, aten.cosh, aten.tanh, aten.sigmoid, aten.log_sigmoid, aten.softplus,
)  # fmt: skip
def _function(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.unit(draw.shape()),)


@samples(
    aten.relu, aten.relu6, aten.leaky_relu, aten.elu, aten.celu, aten.selu, aten.gelu,
    aten.silu, aten.mish, aten.hardtanh, aten.hardswish, aten.hardsigmoid,
    aten.softshrink, aten.hardshrink, aten.positive, aten.deg2rad, aten.rad2deg, aten.neg,
    aten.negative, aten.absolute, aten.signbit,
    aten.abs, aten.sign, aten.sgn, aten.floor, aten.ceil, aten.round, aten.trunc, aten.frac,
    aten.isnan, aten.isinf, aten.isfinite, aten.nan_to_num,
)  # fmt: skip
def _activation(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape()),)


@samples(
    aten.clone,
    aten.contiguous,
    aten.alias,
    aten.detach,
    aten.lift_fresh_copy,
    aten.lift,
    aten.logical_not,
)
def _any_dtype(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.values(draw.shape()),)


@samples(
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.mul.Tensor, aten.multiply.Tensor,
    aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
)  # fmt: skip
def _binary(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    x = draw.normal(draw.broadcast(shape))
    takes_number = "rsub" not in str(op) and str(op).split(".")[1] in ("add", "sub", "mul")
    if takes_number and draw.count(0, 3) == 0:
        return x, draw.pick([2, 0.5])
    y = draw.integers(shape, 5) if draw.count(0, 3) == 0 else draw.normal(shape)
    if str(op).split(".")[1] in ("add", "sub") and draw.flag():
        return x, y, {"alpha": 2}
    return (x, y) if draw.flag() or "rsub" in str(op) else (y, x)


@samples(
    aten.div.Tensor, aten.true_divide.Tensor, aten.divide.Tensor, aten.xlogy.Tensor,
    aten.atan2, aten.pow.Tensor_Tensor, aten.remainder.Tensor, aten.fmod.Tensor,
)  # fmt: skip
def _divisor(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.unit(draw.broadcast(shape)), draw.unit(shape)


@samples(aten.floor_divide, constant=(0, 1))
def _floor_divide(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(draw.broadcast(shape)), draw.unit(shape)


@samples(
    aten.maximum, aten.minimum, aten.max.other, aten.min.other, aten.fmax, aten.fmin, aten.isclose,
    aten.clamp_min.Tensor, aten.clamp_max.Tensor,
)  # fmt: skip
def _two(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(draw.broadcast(shape))


@samples(
    aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.mul.Scalar, aten.div.Scalar,
    aten.remainder.Scalar, aten.fmod.Scalar, aten.clamp_min, aten.clamp_max,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
)  # fmt: skip
def _with_number(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), draw.pick([2, 0.5, -0.25])


@samples(aten.pow.Tensor_Scalar)
def _power(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.unit(draw.shape()), draw.pick([2, 3, 0.5, -1])


@samples(aten.pow.Scalar)
def _exponential(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.pick([2, 0.5]), draw.unit(draw.shape())


@samples(aten.div.Tensor_mode)
def _rounded_division(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    mode = {"rounding_mode": draw.pick([None, "floor", "trunc"])}
    return draw.normal(shape), draw.unit(draw.broadcast(shape)), mode


@samples(aten.div.Scalar_mode)
def _rounded_division_by_number(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), 0.3, {"rounding_mode": draw.pick(["floor", "trunc"])}


@samples(aten.addcmul, aten.addcdiv)
def _three(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    parts = [draw.broadcast(shape), draw.broadcast(shape), shape]
    return (*(draw.unit(part) for part in parts), {"value": 2})


@samples(aten.lerp.Scalar)
def _lerp_number(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(draw.broadcast(shape)), 0.3


@samples(aten.lerp.Tensor)
def _lerp(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(draw.broadcast(shape)), draw.unit(shape)


@samples(aten.threshold)
def _threshold(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), 0.2, draw.pick([0, 1.5])


@samples(aten.clamp, aten.clip)
def _clamp(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape()), *draw.pick([(-0.5, 0.5), (None, 0.5), (-0.5,)]))


@samples(aten.clamp.Tensor)
def _clamp_tensors(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return (
        draw.normal(shape),
        draw.pick([None, draw.normal(draw.broadcast(shape))]),
        draw.normal(()),
    )


DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)


@samples(aten.to.dtype)
def _to_dtype(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    # Through float32 a sum of parts is not the part of a sum at 1e-12: only from other dtypes.
    return draw.values(draw.shape()), draw.pick([torch.float64, torch.int64, torch.bool])


@samples(aten.to.dtype_layout, aten._to_copy)
def _to_keyword(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.values(draw.shape()), {"dtype": draw.pick([torch.float64, torch.int64])}


@samples(aten.to.device)
def _to_device(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.values(draw.shape()), torch.device("cpu"), torch.float64


@samples(aten.type_as, aten.to.other)
def _type_of_other(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.values(shape), draw.normal(shape)


@samples(aten.where.self)
def _where(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    condition = draw.truths(draw.broadcast(shape))
    return condition, draw.normal(draw.broadcast(shape)), draw.normal(shape)


@samples(aten.where.ScalarOther)
def _where_else_number(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.truths(shape), draw.normal(draw.broadcast(shape)), draw.pick([0, 0.0, 1.5])


@samples(aten.where.ScalarSelf)
def _where_number(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.truths(shape), draw.pick([0, 0.0, 1.5]), draw.normal(draw.broadcast(shape))


@samples(aten.where.Scalar)
def _where_numbers(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.truths(draw.shape()), 1.5, 0.0


@samples(aten.masked_fill.Scalar)
def _masked_fill(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.truths(draw.broadcast(shape)), draw.pick([0, 0.0, -1e4])


@samples(aten.masked_fill.Tensor)
def _masked_fill_tensor(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.truths(draw.broadcast(shape)), draw.normal(())


@samples(aten.copy, constant=(0, 1))
def _copy(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(draw.broadcast(shape))


@samples(aten.fill.Scalar)
def _fill(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), 1.5


@samples(aten.fill.Tensor)
def _fill_tensor(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), draw.normal(())


@samples(aten.dropout)
def _no_dropout(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal(draw.shape()), *draw.pick([(0.5, False), (0.0, True)]))


@samples(
    aten.logical_and, aten.logical_or, aten.logical_xor,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor,
    aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor,
)  # fmt: skip
def _logic(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    first, second = shape, draw.broadcast(shape)
    if draw.flag():
        return draw.truths(first), draw.truths(second)
    return draw.integers(first, 9), draw.integers(second, 9)


@samples(
    aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar,
    aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar,
)  # fmt: skip
def _logic_with_number(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.integers(draw.shape(), 9), draw.count(0, 5)


@samples(aten.bitwise_not)
def _bitwise_not(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return (draw.pick([draw.truths(shape), draw.integers(shape, 9)]),)


@samples(aten.zeros, aten.ones)
def _filled(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.shape(), {"dtype": draw.pick(DTYPES)}


@samples(aten.full)
def _full(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.shape(), 1.5, {"dtype": torch.float64}


@samples(aten.new_zeros, aten.new_ones)
def _new(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), draw.shape()


@samples(aten.empty.memory_format, uninitialized=True)
def _empty(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.shape(),)


@samples(aten.new_empty, uninitialized=True)
def _new_empty(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), draw.shape()


@samples(aten.empty_like, uninitialized=True)
def _empty_like(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.values(draw.shape()),)


@samples(aten.new_full)
def _new_full(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), draw.shape(), 7


@samples(aten.zeros_like, aten.ones_like)
def _like(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.values(draw.shape()), {"dtype": draw.pick([None, torch.bool])}


@samples(aten.full_like)
def _full_like(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal(draw.shape()), 0.5


@samples(aten.arange)
def _arange(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.length(),)


@samples(aten.arange.start)
def _arange_from(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return 2, 2 + draw.length()


@samples(aten.arange.start_step)
def _arange_step(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return 0, 2 * draw.length(), 2


@samples(aten.linspace)
def _linspace(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return 0, 1, draw.length()


@samples(aten.eye)
def _eye(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.length(),)


@samples(aten.scalar_tensor)
def _scalar_tensor(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.pick([1, 0.5]),)


@samples(aten.acosh, aten.arccosh)
def _acosh(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.unit(draw.shape()) + 1.5,)


@samples(aten.polygamma)
def _polygamma(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return 1, draw.unit(draw.shape())


@samples(
    aten.hypot, aten.logaddexp, aten.logaddexp2, aten.special_xlog1py, aten.arctan2,
    aten.float_power.Tensor_Tensor, aten.copysign.Tensor, aten.subtract.Tensor,
)  # fmt: skip
def _of_two(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.unit(draw.broadcast(shape)), draw.unit(shape)


@samples(aten.heaviside, aten.ldexp.Tensor, constant=(0, 1))
def _of_two_constants(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(draw.broadcast(shape)), draw.normal(shape)


@samples(aten.float_power.Tensor_Scalar, aten.copysign.Scalar)
def _with_power(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.unit(draw.shape()), draw.pick([2, 0.5])


@samples(aten.complex, aten.polar)
def _complex(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return draw.normal(shape), draw.normal(shape)


@samples(aten.real, aten.imag, aten.angle, aten.view_as_real)
def _of_complex(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape()
    return (torch.complex(draw.normal(shape), draw.normal(shape)),)


@samples(aten.view_as_complex)
def _to_complex(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return (draw.normal([*draw.shape(0, 3), 2]),)


@samples(aten.prelu)
def _prelu(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    slopes = shape[1] if len(shape) > 1 and draw.flag() else 1
    return draw.normal(shape), draw.normal([slopes])


@samples(aten.glu)
def _glu(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 3)
    dim = draw.dim(shape)
    shape[dim] *= 2
    return draw.normal(shape), dim
