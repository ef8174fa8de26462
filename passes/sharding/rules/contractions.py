"""Matrix products: ops whose rule is an einsum."""

from __future__ import annotations

from dataclasses import replace

from torch import ops

from msc.passes.sharding.rule import Dims, Rule
from msc.passes.sharding.rules.binding import EMPTY, Bound, dim_of, table_line
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
    """The equation says it all; None for a diagonal (a letter twice in one operand)."""
    equation = str(bound.values["equation"]).replace(" ", "")
    before, arrow, after = equation.partition("->")
    terms = before.split(",")
    letters = [letter for term in terms for letter in term]
    if not arrow:
        after = "".join(sorted({c for c in letters if letters.count(c) == 1}))
    if "." in equation or any(len(set(term)) != len(term) for term in terms):
        return None
    tensors = bound.tensors("tensors")
    lengths: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, length in zip(term, tensor.shape, strict=True):
            lengths[letter] = max(length, lengths.get(letter, 1))

    def dims(term: str, shape: tuple[int, ...]) -> Dims:
        return tuple(
            dim_of(letter, length) if length == lengths[letter] else EMPTY
            for letter, length in zip(term, shape, strict=True)
        )

    operands = [dims(term, tuple(t.shape)) for term, t in zip(terms, tensors, strict=True)]
    rule = bound.rule(
        {"tensors": operands},
        [dims(after, bound.result_shape())],
        contracted={letter: "sum" for letter in lengths if letter not in after},
        linear=[["tensors"]] if len(terms) == 1 else [],
    )
    return rule if len(terms) == 1 else _linear_in_each(rule)


def _linear_in_each(rule: Rule) -> Rule:
    return replace(rule, linear=tuple(frozenset([i]) for i in range(len(rule.operands))))


CONTRACTIONS = [
    line("mk,kn->mn", aten.mm, linear="self | mat2"),
    line("bmk,bkn->bmn", aten.bmm, linear="self | mat2"),
    line("mk,k->m", aten.mv, linear="self | vec"),
    line("k,k->", aten.dot, linear="self | tensor"),
    line("m,n->mn", aten.outer, linear="self | vec2"),
    # What is added would be added once by each rank that holds a part of k.
    line("mn,mk,kn->mn", aten.addmm, whole="k", linear="self mat1 | self mat2"),
    line("bmn,bmk,bkn->bmn", aten.baddbmm, whole="k", linear="self batch1 | self batch2"),
    table_line(_matmul, [aten.matmul]),
    table_line(_linear, [aten.linear]),
    table_line(_einsum, [aten.einsum]),
]
