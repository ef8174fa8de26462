"""Rules as strings, in the spirit of einsum.

    mk,kn->mn                     a letter is a factor; one that no result has is contracted (a sum)
    ...k,nk,n->...n               `...` stands for any leading, middle or trailing dims
    b(gr)sd,bgtd->b(gr)st         `(gr)` is a dim that is a product of two factors
    b s (g r) d, d -> b s (g r) d spaces mean nothing

The terms belong to the op's tensor arguments in the order of its schema; the term of an absent
optional tensor is skipped. Tensors broadcast as in torch: a term may have more dims than its
tensor, which then has the last ones, and a dim of length 1 lacks the factors of its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msc.ir.placement import ReduceOp
from msc.passes.sharding.rule import Dim, Dims, Localize, Rule
from msc.passes.sharding.rules.binding import (
    EMPTY,
    Bound,
    Contracted,
    Line,
    derived,
    parse_linear,
)

Token = tuple[str, ...]
"""The factors of a dim, major to minor."""
ELLIPSIS: Token = ("...",)


def line(text: str, *ops: Any, whole: str = "", linear: str = "") -> Line:
    """A line of the table: ops whose dims `text` describes.

    whole: letters that cannot be sharded. linear: see `parse_linear`.
    """
    return derived(lambda bound: from_notation(bound, text, whole=whole, linear=linear), *ops)


def from_notation(
    bound: Bound,
    text: str,
    *,
    whole: str = "",
    contiguous: str = "",
    linear: str = "",
    contracted: Contracted | None = None,
    lengths: Mapping[str, int] | None = None,
    localize: Localize | None = None,
) -> Rule:
    """The rule of a call whose dims `text` describes.

    contracted: overrides the sum that a letter without a place in the results stands for.
    lengths: of letters that occur only inside products.
    """
    before, _, after = text.partition("->")
    named = dict(zip(bound.tensor_arguments(), before.split(","), strict=True))
    terms = {name: tokens(term) for name, term in named.items() if bound.has_tensor(name)}
    shapes = {name: bound.shape(name) for name in terms}
    sides = [(terms[name], shapes[name]) for name in terms]
    made = [
        (tokens(term), tuple(tensor.shape))
        for term, tensor in zip(after.split(","), bound.results, strict=True)
    ]
    known = factor_lengths([*sides, *made], lengths or {})
    operands = {name: _dims(terms[name], shapes[name], known) for name in terms}
    results = [_dims(found, shape, known) for found, shape in made]
    any_dims = [name for name in known if len(name) > 1]  # those of `...`
    sums: dict[str, ReduceOp | tuple[ReduceOp, ...]] = {
        letter: "sum" for letter in known if letter not in [*after, *whole, *any_dims]
    }
    return bound.rule(
        operands,
        results,
        contracted={**sums, **(contracted or {})},
        whole=[*whole.replace("...", ""), *(any_dims if "..." in whole else [])],
        contiguous=contiguous,
        linear=parse_linear(linear),
        localize=localize,
    )


def tokens(term: str) -> list[Token]:
    """The dims that a term names, in order."""
    pieces = re.findall(r"\.\.\.|\(\w+\)|\w", term.replace(" ", ""))
    return [ELLIPSIS if piece == "..." else tuple(piece.strip("()")) for piece in pieces]


def _expand(found: Sequence[Token], rank: int) -> list[Token]:
    """The tokens of a tensor of `rank` dims: `...` spelled out (`e_1 e_0`), or the last tokens."""
    if ELLIPSIS not in found:
        return list(found[len(found) - rank :])
    at = found.index(ELLIPSIS)
    missing = rank - (len(found) - 1)
    if missing < 0:
        return [token for token in found if token != ELLIPSIS][-rank:] if rank else []
    middle = [(f"e_{index}",) for index in reversed(range(missing))]
    return [*found[:at], *middle, *found[at + 1 :]]


def factor_lengths(
    terms: Sequence[tuple[Sequence[Token], tuple[int, ...]]], given: Mapping[str, int]
) -> dict[str, int]:
    """Lengths of all factors: of those alone in a dim, then of the unknown one of a product."""
    known = dict(given)
    products: list[tuple[Token, int]] = []
    for found, shape in terms:
        for token, length in zip(_expand(found, len(shape)), shape, strict=True):
            if len(token) == 1:
                before = known.get(token[0], 1)
                known[token[0]] = length if before == 1 else before  # 1 broadcasts to any length
            else:
                products.append((token, length))
    for token, length in products:
        unknown = [letter for letter in token if letter not in known]
        if len(unknown) == 1:
            inside = math.prod(known[letter] for letter in token if letter in known)
            known[unknown[0]] = length // inside if inside else 0
    return known


def _dims(found: Sequence[Token], shape: tuple[int, ...], lengths: Mapping[str, int]) -> Dims:
    dims: list[Dim] = []
    for token, length in zip(_expand(found, len(shape)), shape, strict=True):
        run = tuple((letter, lengths[letter]) for letter in token)
        broadcast = length == 1 and math.prod(lengths[letter] for letter in token) != 1
        dims.append(EMPTY if broadcast else (run,))
    return tuple(dims)
