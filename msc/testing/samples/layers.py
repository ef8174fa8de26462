"""Sample calls of what layers are made of: products, attention, norms, MSC's own ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import ops

import msc.ir.ops  # noqa: F401  registers msc::
from msc.ir.torch_private import OpOverload
from msc.testing.samples.draw import Draw, samples

aten = ops.aten
msc_ops = ops.msc


@samples(aten.mm)
def _mm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    m, k, n = draw.length(), draw.length(), draw.length()
    return draw.normal([m, k]), draw.normal([k, n])


@samples(aten.bmm)
def _bmm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    b, m, k, n = draw.length(), draw.length(), draw.length(), draw.length()
    return draw.normal([b, m, k]), draw.normal([b, k, n])


@samples(aten.mv)
def _mv(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    m, k = draw.length(), draw.length()
    return draw.normal([m, k]), draw.normal([k])


@samples(aten.inner)
def _inner(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    k = draw.length()
    left, right = [*draw.shape(0, 2), k], [*draw.shape(0, 2), k]
    return draw.normal(left), draw.normal(draw.pick([right, right, []]))


@samples(aten.linalg_vecdot)
def _vecdot(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1)
    return draw.normal(shape), draw.normal(shape)


@samples(aten.tensordot)
def _tensordot(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    k = draw.shape(0, 2)
    left, right = draw.shape(0, 2), draw.shape(0, 2)
    dims = list(range(len(k)))
    return (
        draw.normal(left + k),
        draw.normal(k + right),
        [d - len(k) for d in dims],
        dims,
    )


@samples(aten.addbmm)
def _addbmm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    b, m, k, n = draw.length(), draw.length(), draw.length(), draw.length()
    bias = draw.broadcast([m, n])
    return draw.normal(bias), draw.normal([b, m, k]), draw.normal([b, k, n])


@samples(aten.addmv)
def _addmv(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    m, k = draw.length(), draw.length()
    return draw.normal(draw.broadcast([m])), draw.normal([m, k]), draw.normal([k])


@samples(aten.addr)
def _addr(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    m, n = draw.length(), draw.length()
    return draw.normal(draw.broadcast([m, n])), draw.normal([m]), draw.normal([n])


@samples(aten.bilinear)
def _bilinear(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    i, j, o = draw.length(), draw.length(), draw.length()
    lead = draw.shape(1, 2)
    bias = draw.normal([o]) if draw.flag() else None
    return draw.normal([*lead, i]), draw.normal([*lead, j]), draw.normal([o, i, j]), bias


@samples(aten.dot, aten.vdot)
def _dot(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    k = draw.length()
    return draw.normal([k]), draw.normal([k])


@samples(aten.outer, aten.ger)
def _outer(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.normal([draw.length()]), draw.normal([draw.length()])


@samples(aten.addmm)
def _addmm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    m, k, n = draw.length(), draw.length(), draw.length()
    bias = draw.pick([[n], [m, n], [1, n], [m, 1]])
    scale = draw.pick([{}, {"alpha": 2, "beta": 0.5}])
    return draw.normal(bias), draw.normal([m, k]), draw.normal([k, n]), scale


@samples(aten.baddbmm)
def _baddbmm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    b, m, k, n = draw.length(), draw.length(), draw.length(), draw.length()
    bias = draw.broadcast([b, m, n])
    return draw.normal(bias), draw.normal([b, m, k]), draw.normal([b, k, n])


@samples(aten.matmul)
def _matmul(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    k = draw.length()
    batch = draw.shape(0, 2)
    left = draw.pick([[k], [draw.length(), k], [*draw.broadcast(batch), draw.length(), k]])
    right = draw.pick([[k], [k, draw.length()], [*batch, k, draw.length()]])
    return draw.normal(left), draw.normal(right)


@samples(aten.linear)
def _linear(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    k, n = draw.length(), draw.length()
    x = draw.normal([*draw.shape(0, 2), k])
    if draw.count(0, 4) == 0:
        return x, draw.normal([k])
    bias = draw.pick([(), (draw.normal([n]),), (None,)])
    return x, draw.normal([n, k]), *bias


EQUATIONS = ("ij,jk->ik", "i,j->ij", "bshd,hde->bse", "bhqd,bhkd->bhqk", "ij->ji", "ij->", "ij,jk",
             "...d,ed->...e", "...ij,...jk", "b...,...->b")  # fmt: skip


@samples(aten.einsum)
def _einsum(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    equation = draw.pick(EQUATIONS)
    terms = equation.replace("...", "AB").split("->")[0].split(",")
    lengths = {letter: draw.length() for letter in sorted(set("".join(terms)))}
    lengths |= {letter: draw.pick([1, 2, 3]) for letter in "AB"}
    return equation, [draw.normal([lengths[letter] for letter in term]) for term in terms]


@samples(aten.conv1d, aten.conv2d, aten.conv3d)
def _convolution(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rank = int(str(op)[len("aten.conv")])
    groups, inner, outer = draw.pick([1, 1, 2, 6]), draw.pick([1, 2, 3, 6]), draw.pick([1, 2, 3])
    x = draw.normal([draw.pick([1, 2, 3, 6]), groups * inner, *[4] * rank])
    weight = draw.normal([groups * outer, inner, *[draw.pick([1, 2])] * rank])
    bias = draw.normal([groups * outer]) if draw.flag() else None
    stride, padding = [draw.pick([1, 2])] * rank, [draw.pick([0, 1])] * rank
    return x, weight, bias, stride, padding, [1] * rank, groups


@samples(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def _padded_convolution(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rank = int(str(op)[len("aten.conv")])
    groups, inner, outer = draw.pick([1, 2, 6]), draw.pick([1, 2, 3]), draw.pick([1, 2, 3])
    x = draw.normal([draw.pick([1, 2, 3]), groups * inner, *[4] * rank])
    weight = draw.normal([groups * outer, inner, *[draw.pick([1, 3])] * rank])
    bias = draw.normal([groups * outer]) if draw.flag() else None
    return x, weight, bias, [1] * rank, draw.pick(["same", "valid"]), [1] * rank, groups


@samples(aten.conv_transpose1d, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def _transposed_convolution(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rank = int(str(op)[len("aten.conv_transpose")])
    groups, inner, outer = draw.pick([1, 1, 2, 6]), draw.pick([1, 2, 3, 6]), draw.pick([1, 2, 3])
    x = draw.normal([draw.pick([1, 2, 3, 6]), groups * inner, *[3] * rank])
    weight = draw.normal([groups * inner, outer, *[draw.pick([1, 2])] * rank])
    bias = draw.normal([groups * outer]) if draw.flag() else None
    return x, weight, bias, [draw.pick([1, 2])] * rank, [0] * rank, [0] * rank, groups


@samples(aten.scaled_dot_product_attention)
def _sdpa(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    b, r, g = draw.pick([1, 2, 6]), draw.pick([1, 2, 3]), draw.pick([1, 2, 3])
    s, t, d = draw.pick([1, 2, 4, 6]), draw.pick([2, 3, 6]), draw.pick([1, 4])
    options: dict[str, Any] = {"enable_gqa": True} if r > 1 else {}
    if draw.flag():
        options["is_causal"] = True
    elif draw.flag():
        mask = draw.broadcast([b, g * r, s, t])
        mask[-1:] = [t]
        options["attn_mask"] = draw.normal(mask if len(mask) > 1 else [s, t])
    key, value = draw.normal([b, g, t, d]), draw.normal([b, g, t, draw.pick([d, 2, 6])])
    return draw.normal([b, g * r, s, d]), key, value, options


@samples(msc_ops.attention, constant=(3,))
def _attention(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    b, r, g = draw.pick([1, 2, 6]), draw.pick([1, 2, 3]), draw.pick([1, 2, 3, 6])
    s, d = draw.pick([2, 4, 6]), draw.pick([1, 4])
    q = draw.normal([b, g * r, s, d])
    k, v = draw.normal([b, g, s, d]), draw.normal([b, g, s, d])
    causal = draw.flag()
    window = draw.pick([0, 2]) if causal else 0
    mask = None
    if not causal and draw.flag():
        shape = draw.broadcast([b, g * r, s, s])
        mask = draw.normal(shape) if draw.flag() else draw.truths(shape)
    return q, k, v, mask, 0.5, causal, window, draw.pick([0.0, 0.0, 0.8])


@samples(msc_ops.linear)
def _msc_linear(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    k, n = draw.length(), draw.length()
    transposed = draw.flag()
    weight = draw.normal([k, n] if transposed else [n, k])
    bias = draw.normal([n]) if draw.flag() else None
    return draw.normal([*draw.shape(0, 2), k]), weight, bias, transposed


@samples(msc_ops.gated)
def _gated(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 4)
    return draw.normal(shape), draw.normal(shape), draw.pick(["relu", "gelu", "gelu_tanh", "silu"])


@samples(msc_ops.embedding)
def _msc_embedding(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rows, width = draw.length(), draw.length()
    ids, w = draw.integers(draw.shape(0, 3), rows), draw.normal([rows, width])
    return (ids, w) if draw.flag() else (ids, w, None, draw.count(0, rows - 1))


@samples(msc_ops.nll_terms)
def _nll_terms(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    rows, v = draw.shape(0, 2), draw.length()
    target = draw.integers(rows, v)
    ignored = draw.truths(rows) & draw.truths(rows)
    return draw.normal([*rows, v]), target.masked_fill(ignored, -100)


@samples(msc_ops.training_value)
def _training_value(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = [draw.length(), draw.length()]
    return draw.normal(shape), draw.normal(shape)


@samples(msc_ops.dropout)
def _msc_dropout(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    whole = draw.shape()
    key = torch.tensor(draw.count(0, 10**9))
    part = list(whole)
    coordinates: list[torch.Tensor | None] = [None] * len(whole)
    if whole and draw.count(0, 3) == 0:  # a part of a larger tensor already
        dim = draw.count(0, len(whole) - 1)
        coordinates[dim] = torch.arange(0, whole[dim], 2)
        part[dim] = len(range(0, whole[dim], 2))
    return draw.normal(part), draw.pick([0.0, 0.3]), key, coordinates, whole


@samples(msc_ops.rng_key)
def _rng_key(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    return draw.integers([2], 1000), draw.count(0, 9)


@samples(aten.layer_norm)
def _layer_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 4)
    normalized = shape[-draw.count(1, min(2, len(shape))) :]
    affine = draw.pick(
        [(), (draw.unit(normalized), draw.normal(normalized)), (draw.unit(normalized),)]
    )
    return draw.normal(shape), normalized, *affine


@samples(aten.native_layer_norm)
def _native_layer_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 4)
    normalized = shape[-1:]
    affine = draw.pick([(None, None), (draw.unit(normalized), draw.normal(normalized))])
    return draw.normal(shape), normalized, *affine, 1e-5


@samples(aten.rms_norm)
def _rms_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 4)
    normalized = shape[-1:]
    weight = draw.pick([None, draw.unit(normalized)])
    return draw.normal(shape), normalized, weight, 1e-5


@samples(msc_ops.rms_norm)
def _msc_rms_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = draw.shape(1, 4)
    return draw.normal(shape), draw.unit(shape[-1:]), 1e-5


@samples(aten.group_norm)
def _group_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    groups, channels = draw.pick([1, 2, 3, 6]), draw.pick([1, 2, 4])
    shape = [draw.length(), groups * channels, 4, *draw.shape(0, 1)]
    affine = [draw.unit(shape[1:2]), draw.normal(shape[1:2])] if draw.flag() else []
    return draw.normal(shape), groups, *affine


@samples(aten.batch_norm, constant=(3, 4))
def _batch_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = [max(2, draw.length()), draw.length(), *draw.shape(0, 2)]
    channels = shape[1:2]
    affine: tuple[Any, Any] = draw.unit(channels), draw.normal(channels)
    training = draw.flag()
    if training and draw.flag():
        affine = None, None
    running = (None, None) if training else (draw.normal(channels), draw.unit(channels))
    return draw.normal(shape), *affine, *running, training, 0.1, 1e-5, False


@samples(aten.instance_norm, constant=(3, 4))
def _instance_norm(draw: Draw, op: OpOverload) -> tuple[Any, ...]:
    shape = [draw.length(), draw.length(), 4, *draw.shape(0, 1)]
    channels = shape[1:2]
    affine: tuple[Any, Any] = draw.unit(channels), draw.normal(channels)
    own = draw.flag()
    if own and draw.flag():
        affine = None, None
    running = (None, None) if own else (draw.normal(channels), draw.unit(channels))
    return draw.normal(shape), *affine, *running, own, 0.1, 1e-5, False
