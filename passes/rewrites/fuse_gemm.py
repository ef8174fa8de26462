"""One GEMM in place of those that read one activation.

    %q = msc.linear(%u, %wq) + %bq          %w = aten.cat([%wq, %wk, %wv, %up])
    %k = msc.linear(%u, %wk) + %bk          %b = aten.cat([%bq, %bk, %bv, %bup])
    %v = msc.linear(%u, %wv) + %bv   ->     %y = msc.linear(%u, %w) + %b
    %m = msc.linear(%u, %up) + %bup         %q, %k, %v, %m = aten.split_with_sizes(%y, ...)

As GPT-J and PaLM run their parallel blocks (Chowdhery et al., 2022, section 2). The parameters stay
the model's own: they are put together in every micro-batch, which copies them once. A projection
that is itself taken apart, as a fused q, k and v, is so before, part by part: each part is a
segment of the whole, and sharded as one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.walks import num_reads
from msc.passes.normalize.dead_code import remove_dead_code
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    is_parameter,
    named_arguments,
    replace,
    shape_of,
)

_LINEAR = torch.ops.msc.linear.default
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


@dataclass(frozen=True)
class _Gemm:
    """A linear of the activation and its bias; results: its value, or the parts of its last dim."""

    linear: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    results: tuple[fx.Node, ...]

    @property
    def sizes(self) -> list[int]:
        return [shape_of(node)[-1] for node in self.results]


def fuse_gemms(gm: fx.GraphModule, activation: fx.Node) -> int:
    """Fuse the linears that read `activation`, also by way of a reshape; returns their number.

    0 where there is only one, or where their weights are stored in different ways.
    """
    linears = _linears(activation)
    ways = {bool(_arguments(node)["transposed"]) for node in linears}
    if len(linears) < 2 or len(ways) > 1:
        return 0
    (transposed,) = ways
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    linears.sort(key=order.__getitem__)
    with_bias = all(_bias(node) is not None for node in linears)
    gemms = [_gemm(node, with_bias) for node in linears]
    emit = Emitter(gm, linears[0])
    weight = _joined(emit, [(g.weight, g.sizes) for g in gemms], 1 if transposed else 0)
    sizes = [size for gemm in gemms for size in gemm.sizes]
    shape = (*shape_of(activation)[:-1], sum(sizes))
    extra = (None, True) if transposed else ()
    y = emit(_LINEAR, activation, weight, *extra, shape=shape)
    if with_bias:
        biases = [(g.bias, g.sizes) for g in gemms if g.bias is not None]
        y = emit(aten.add.Tensor, y, _joined(emit, biases, 0), shape=shape)
    parts = _split(emit, y, sizes, len(shape) - 1)
    for old, new in zip((r for gemm in gemms for r in gemm.results), parts, strict=True):
        if shape_of(new) != shape_of(old):
            new = emit(aten.reshape.default, new, list(shape_of(old)), shape=shape_of(old))
        replace(old, new)
    remove_dead_code(gm)
    return len(gemms)


def _linears(activation: fx.Node) -> list[fx.Node]:
    """The linears without a bias that read a value or a reshape of it that keeps the last dim."""
    found: list[fx.Node] = []
    for user in activation.users:
        last = shape_of(user)[-1:] if user.target is aten.reshape.default else ()
        readers = list(user.users) if last == shape_of(activation)[-1:] else [user]
        found += [
            each
            for each in readers
            if each.target is _LINEAR
            and is_parameter(_arguments(each)["w"])
            and _arguments(each)["b"] is None
        ]
    return found


def _arguments(linear: fx.Node) -> dict[str, Any]:
    return named_arguments(linear, {"b": None, "transposed": False})


def _bias(linear: fx.Node) -> fx.Node | None:
    """The parameter that is added to all that a linear gives."""
    users = list(linear.users)
    if num_reads(linear) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return None
    others = [node for node in users[0].all_input_nodes if node is not linear]
    if len(others) != 1 or not is_parameter(others[0]):
        return None
    return others[0] if shape_of(others[0]) == shape_of(linear)[-1:] else None


def _gemm(linear: fx.Node, with_bias: bool) -> _Gemm:
    bias = _bias(linear) if with_bias else None
    result = linear if bias is None else next(iter(linear.users))
    results: tuple[fx.Node, ...] = (result,)
    users = list(result.users)
    if len(users) == 1 and users[0].target in _SPLITS:
        split = users[0]
        lengths = [part.shape[-1] for part in split.meta["val"]]
        items = {user.args[1]: user for user in split.users if user.target is operator.getitem}
        if sum(lengths) == shape_of(result)[-1] and items.keys() == set(range(len(lengths))):
            results = tuple(items[index] for index in range(len(lengths)))
    return _Gemm(linear, _arguments(linear)["w"], bias, results)


def _joined(emit: Emitter, values: list[tuple[fx.Node, list[int]]], dim: int) -> fx.Node:
    """Parameters one after the other along `dim`, each taken apart into its own parts."""
    parts: list[fx.Node] = []
    for value, sizes in values:
        parts += _split(emit, value, sizes, dim) if len(sizes) > 1 else [value]
    return emit(aten.cat.default, parts, dim)


def _split(emit: Emitter, value: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
    parts = emit(aten.split_with_sizes.default, value, sizes, dim)
    shapes = [part.shape for part in parts.meta["val"]]
    return [
        emit(operator.getitem, parts, index, shape=shape, like=value)
        for index, shape in enumerate(shapes)
    ]
