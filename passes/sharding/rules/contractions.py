"""Matrix products: ops whose rule is an einsum."""

from __future__ import annotations

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


def _einsum(bound: Bound) -> Rule | None:
    """The equation says it all; None for `...` and for diagonals (a letter twice in a term)."""
    before, arrow, after = str(bound.values["equation"]).replace(" ", "").partition("->")
    terms = before.split(",")
    letters = "".join(terms)
    if not arrow:
        after = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if "." in letters or any(len(set(term)) != len(term) for term in terms):
        return None
    tensors = bound.tensors("tensors")
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


def _convolution(bound: Bound) -> Rule | None:
    """Samples, groups and channels; the places stay whole, as neighbours see each other."""
    rank = len(bound.shape("weight")) - 2
    if len(bound.shape("input")) != rank + 2:
        return None
    places = bound.result_shape()[2:]
    before, window, after = "xyz"[:rank], "uvw"[:rank], "pqr"[:rank]
    biased = bound.has_tensor("bias")
    return from_notation(
        bound,
        f"n(gc){before},(go)c{window},(go)->n(go){after}",
        whole=before + window + after + ("c" if biased else ""),
        lengths={"g": int(bound.values["groups"]), **dict(zip(after, places, strict=True))},
        linear="input bias | weight bias" if biased else "input | weight",
        localize=_local_groups,
    )


def _local_groups(local: LocalCall) -> Localized:
    channels, in_group = local.operand_shapes[0][1], local.operand_shapes[1][1]
    return with_arguments(local, groups=channels // in_group)


CONTRACTIONS = [
    line("mk,kn->mn", aten.mm, linear="self | mat2"),
    line("bmk,bkn->bmn", aten.bmm, linear="self | mat2"),
    line("mk,k->m", aten.mv, linear="self | vec"),
    line("k,k->", aten.dot, linear="self | tensor"),
    line("m,n->mn", aten.outer, linear="self | vec2"),
    # What is added would be added once by each rank that holds a part of k.
    line("mn,mk,kn->mn", aten.addmm, whole="k", linear="self mat1 | self mat2"),
    line("bmn,bmk,bkn->bmn", aten.baddbmm, whole="k", linear="self batch1 | self batch2"),
    derived(_matmul, aten.matmul),
    derived(_linear, aten.linear),
    derived(_einsum, aten.einsum),
    derived(_convolution, aten.conv1d, aten.conv2d, aten.conv3d),
]
