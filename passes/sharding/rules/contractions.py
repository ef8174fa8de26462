"""Matrix products: ops whose rule is an einsum."""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import ops

from msc.passes.sharding.rule import LocalCall, Localized, Rule
from msc.passes.sharding.rules.binding import (
    Bound,
    broadcast_dims,
    derived,
    dim_of,
    with_arguments,
)
from msc.passes.sharding.rules.notation import from_notation, line

aten = ops.aten


def _matmul(bound: Bound) -> Rule:
    """torch.matmul: a tensor of one dim stands for a row (left) or a column (right)."""
    left = "k" if len(bound.shape("self")) == 1 else "...mk"
    right = "k" if len(bound.shape("other")) == 1 else "...kn"
    result = "..." * ("..." in left + right) + "m" * (left != "k") + "n" * (right != "k")
    return from_notation(bound, f"{left},{right}->{result}", linear="self | other")


def _linear(bound: Bound) -> Rule:
    """A bias would be added once by each rank that holds a part of k: with one, k is whole."""
    whole = "k" if bound.has_tensor("bias") else ""
    weight = "nk" if len(bound.shape("weight")) == 2 else "k"
    return from_notation(
        bound,
        f"...k,{weight},n->...{weight[:-1]}",
        whole=whole,
        linear="weight bias | input bias" if whole else "input | weight",
    )


def _inner(bound: Bound) -> Rule:
    """The last dims are contracted."""
    left, right = len(bound.shape("self")), len(bound.shape("other"))
    first, second = "abcdefg"[: left - 1], "uvwxyz"[: right - 1]
    text = f"{first}k,{second}k->{first}{second}"
    if 0 in (left, right):
        text = "...,...->..."
    return from_notation(bound, text, linear="self | other")


def _einsum(bound: Bound) -> Rule | None:
    """The equation says it all; None for diagonals (a letter twice in a term)."""
    tensors = bound.tensors("tensors")
    terms, after = _spelled_out(str(bound.values["equation"]), [x.dim() for x in tensors])
    if any(len(set(term)) != len(term) for term in terms):
        return None
    lengths: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, length in zip(term, tensor.shape, strict=True):
            lengths[letter] = max(length, lengths.get(letter, 1))
    full = [[dim_of(letter, lengths[letter]) for letter in term] for term in terms]
    rule = bound.rule(
        {
            "tensors": [
                broadcast_dims(tuple(tensor.shape), dims)
                for dims, tensor in zip(full, tensors, strict=True)
            ]
        },
        [tuple(dim_of(letter, lengths[letter]) for letter in after)],
        contracted={letter: "sum" for letter in lengths if letter not in after},
        linear=[["tensors"]],
    )
    # Jointly linear it would be with one operand; with several it is linear in each alone.
    alone = frozenset[int]().union(*rule.linear)
    return replace(rule, linear=tuple(frozenset([operand]) for operand in sorted(alone)))


def _spelled_out(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """An equation's terms and result with a letter for each dim: `...` is `0`, `10`, `210`."""
    before, arrow, after = equation.replace(" ", "").partition("->")
    terms = before.split(",")
    letters = "".join(terms).replace(".", "")
    if not arrow:
        once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        after = "..." * ("." in before) + "".join(once)
    missing = [
        rank - len(term.replace(".", "")) if "." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    digits = "9876543210"
    spelled = [
        term.replace("...", digits[len(digits) - count :])
        for term, count in zip(terms, missing, strict=True)
    ]
    return spelled, after.replace("...", digits[len(digits) - max(missing) :])


def _convolution(bound: Bound, transposed: bool = False) -> Rule | None:
    """Samples, groups and channels; the places stay whole, as neighbours see each other.

    The weight is `[(g o), c, ...]`, of a transposed convolution `[(g c), o, ...]`.
    """
    rank = len(bound.shape("weight")) - 2
    if len(bound.shape("input")) != rank + 2:
        return None
    before, window, after = "xyz"[:rank], "uvw"[:rank], "pqr"[:rank]
    weight = "(gc)o" if transposed else "(go)c"
    biased = bound.has_tensor("bias")
    return from_notation(
        bound,
        f"n(gc){before},{weight}{window},(go)->n(go){after}",
        whole=before + window + after + ("c" if biased else ""),
        lengths={"g": int(bound.values["groups"])},
        linear="input bias | weight bias" if biased else "input | weight",
        localize=_local_transposed_groups if transposed else _local_groups,
    )


def _local_groups(local: LocalCall) -> Localized:
    channels, in_group = local.operand_shapes[0][1], local.operand_shapes[1][1]
    return with_arguments(local, groups=channels // in_group)


def _local_transposed_groups(local: LocalCall) -> Localized:
    channels, in_group = local.result_shapes[0][1], local.operand_shapes[1][1]
    return with_arguments(local, groups=channels // in_group)


def _vecdot(bound: Bound) -> Rule | None:
    """Only along the last dim."""
    if bound.values["dim"] != -1:
        return None
    return from_notation(bound, "...k,...k->...", linear="x | y")


def _tensordot(bound: Bound) -> Rule:
    """Pairs of dims are contracted; the others of both stand one after the other."""
    sides = ("self", "other")
    terms = [[f"{name}{d}" for d in range(len(bound.shape(name)))] for name in sides]
    contracted = [f"k{pair}" for pair in range(len(bound.values["dims_self"]))]
    for term, name in zip(terms, sides, strict=True):
        for letter, d in zip(contracted, bound.values[f"dims_{name}"], strict=True):
            term[int(d)] = letter
    dims = [
        [dim_of(*factor) for factor in zip(term, bound.shape(name), strict=True)]
        for term, name in zip(terms, sides, strict=True)
    ]
    kept = [dim for side in dims for dim in side if dim[0][0][0] not in contracted]
    return bound.rule(
        {name: tuple(side) for name, side in zip(sides, dims, strict=True)},
        [tuple(kept)],
        contracted=dict.fromkeys(contracted, "sum"),
        linear=[["self"], ["other"]],
    )


CONTRACTIONS = [
    line("mk,kn->mn", aten.mm, linear="self | mat2"),
    line("bmk,bkn->bmn", aten.bmm, linear="self | mat2"),
    line("mk,k->m", aten.mv, linear="self | vec"),
    line("k,k->", aten.dot, linear="self | tensor"),
    line("k,k->", aten.vdot, linear="self | other"),
    line("m,n->mn", aten.outer, aten.ger, linear="self | vec2"),
    derived(_vecdot, aten.linalg_vecdot),
    derived(_inner, aten.inner),
    derived(_tensordot, aten.tensordot),
    # What is added would be added once by each rank that holds a part of k.
    line("mn,mk,kn->mn", aten.addmm, whole="k", linear="self mat1 | self mat2"),
    line("bmn,bmk,bkn->bmn", aten.baddbmm, whole="k", linear="self batch1 | self batch2"),
    line("mn,bmk,bkn->mn", aten.addbmm, whole="bk", linear="self batch1 | self batch2"),
    line("m,mk,k->m", aten.addmv, whole="k", linear="self mat | self vec"),
    line("mn,m,n->mn", aten.addr, linear="self vec1 | self vec2"),
    line("...i,...j,oij,o->...o", aten.bilinear, whole="ij", linear="weight bias"),
    derived(_matmul, aten.matmul),
    derived(_linear, aten.linear),
    derived(_einsum, aten.einsum),
    derived(_convolution, aten.conv1d, aten.conv2d, aten.conv3d),
    derived(_convolution, aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
    derived(
        functools.partial(_convolution, transposed=True),
        aten.conv_transpose1d,
        aten.conv_transpose2d.input,
    ),
    derived(functools.partial(_convolution, transposed=True), aten.conv_transpose3d.input),
]
