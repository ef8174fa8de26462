"""Rules that users give their own ops (`msc.sharding_rule`)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from msc.ir.errors import PlanError, UserError
from msc.ir.placement import ReduceOp
from msc.ir.torch_private import OpOverload, num_returns, schema_arguments
from msc.passes.sharding.rule import Localize, Rule
from msc.passes.sharding.rules.binding import Bound, parse_linear
from msc.passes.sharding.rules.notation import (
    ELLIPSIS,
    Token,
    factor_lengths,
    from_notation,
    tokens,
)

T = TypeVar("T")

REDUCTIONS: tuple[ReduceOp, ...] = ("sum", "max", "logsumexp")
_TERM = re.compile(r"(\.\.\.|\([a-zA-Z]+\)|[a-zA-Z])*")
_NAME = re.compile(r"\w+::\w+(\.\w+)?")


@dataclass(frozen=True)
class CustomRule:
    """What a user has said about an op; checked against its schema and shapes when it is used."""

    op: str
    notation: str
    contracted: Mapping[str, ReduceOp | tuple[ReduceOp, ...]]
    whole: tuple[str, ...]
    linear: str
    lengths: Mapping[str, int]
    localize: Localize | None

    @property
    def operands(self) -> list[str]:
        """The terms of the op's tensor arguments."""
        return self.notation.partition("->")[0].split(",")

    @property
    def results(self) -> list[str]:
        """The terms of the op's results."""
        return self.notation.partition("->")[2].split(",")

    def build(self, bound: Bound) -> Rule:
        """The rule of one call; `PlanError` if the call's tensors are not as the notation says."""
        self.check_schema(bound.call.target)
        self._check_shapes(bound)
        return from_notation(
            bound,
            self.notation,
            whole="".join(self._kept_whole()),
            contracted=dict(self.contracted),
            linear=self.linear,
            lengths=self.lengths,
            localize=self.localize,
        )

    def _kept_whole(self) -> list[str]:
        """Letters that a side lacks are whole, unless `contracted` or `localize` sees to them."""
        read, made = (set(_letters(",".join(terms))) for terms in (self.operands, self.results))
        lone = read - made - set(self.contracted)
        if self.localize is None:
            lone |= made - read
        return [*self.whole, *(letter for letter in sorted(lone) if letter not in self.whole)]

    def check_syntax(self) -> None:
        """Raise `UserError` unless notation and options are well formed."""
        if self.notation.count("->") != 1:
            self._refuse("has to hold one '->', with operands before it and results behind it")
        for term in (*self.operands, *self.results):
            joined = term.replace(" ", "")
            letters = _letters(joined)
            if not _TERM.fullmatch(joined) or joined.count("...") > 1:
                self._refuse(
                    f"has the term '{term.strip()}'; a term is made of letters, products of "
                    "letters '(gd)', and at most one '...'"
                )
            if len(set(letters)) != len(letters):
                self._refuse(f"names a factor twice in the term '{term.strip()}'")
        self._check_options()

    def _check_options(self) -> None:
        known = set(_letters(self.notation))
        options = {"whole": self.whole, "contracted": self.contracted, "lengths": self.lengths}
        for option, named in options.items():
            for letter in named:
                if letter not in known and letter != "...":
                    self._refuse(f"has no factor '{letter}', which {option}= names")
        for letter, given in self.contracted.items():
            if all(letter in _letters(term) for term in self.results):
                self._refuse(f"contracts '{letter}', but every result has it")
            reductions = (given,) if isinstance(given, str) else tuple(given)
            if any(reduction not in REDUCTIONS for reduction in reductions):
                self._refuse(f"contracts '{letter}' by {given!r}; {', '.join(REDUCTIONS)} exist")
            if not isinstance(given, str) and len(reductions) != len(self.results):
                self._refuse(
                    f"gives '{letter}' {len(reductions)} reductions for {len(self.results)} results"
                )

    def check_schema(self, target: OpOverload) -> None:
        """Raise `UserError` unless there is a term for each tensor argument and result."""
        arguments = schema_arguments(target)
        for argument in arguments:
            if "Tensor" in argument.type and argument.type not in ("Tensor", "Optional[Tensor]"):
                self._refuse(
                    f"cannot describe argument '{argument.name}', which is a {argument.type}; "
                    "only single tensors have terms"
                )
        names = [a.name for a in arguments if "Tensor" in a.type]
        if len(names) != len(self.operands):
            self._refuse(
                f"has {len(self.operands)} operands, but the op takes {len(names)} tensors "
                f"({', '.join(names)})"
            )
        if num_returns(target) != len(self.results):
            self._refuse(
                f"has {len(self.results)} results, but the op returns {num_returns(target)}"
            )
        for name in itertools.chain.from_iterable(parse_linear(self.linear)):
            if name not in names:
                self._refuse(f"has no tensor argument '{name}', which linear= names")

    def _check_shapes(self, bound: Bound) -> None:
        lengths: dict[str, int] = {}
        arguments = zip(bound.tensor_arguments(), self.operands, strict=True)
        sides = [
            (f"argument '{name}'", term, bound.shape(name))
            for name, term in arguments
            if bound.has_tensor(name)
        ]
        for index, term in enumerate(self.results):
            sides.append((f"result {index}", term, bound.result_shape(index)))
        for what, term, shape in sides:
            found = tokens(term)
            exact = ELLIPSIS not in found
            if len(shape) < len(found) - (not exact) or (exact and len(shape) != len(found)):
                self._refuse(
                    f"says '{term.strip()}' of {what}, which has {len(shape)} dims {list(shape)}",
                    PlanError,
                )
            for token, length in _placed(found, shape):
                if len(token) != 1:
                    continue
                (letter,) = token
                before = lengths.setdefault(letter, length)
                if before == 1:
                    lengths[letter] = length
                elif length not in (1, before):
                    self._refuse(
                        f"gives factor '{letter}' length {before} and, in {what} "
                        f"{list(shape)}, {length}",
                        PlanError,
                    )
        self._check_products(sides)

    def _check_products(self, sides: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        known = factor_lengths([(tokens(term), shape) for _, term, shape in sides], self.lengths)
        for what, term, shape in sides:
            for token, length in _placed(tokens(term), shape):
                missing = [letter for letter in token if letter not in known]
                if missing:
                    self._refuse(
                        f"leaves the lengths of {', '.join(missing)} open: give one of them by "
                        "lengths=",
                        PlanError,
                    )
                product = math.prod(known[letter] for letter in token)
                if length not in (1, product):
                    self._refuse(
                        f"makes {product} of ({''.join(token)}), which in {what} {list(shape)} "
                        f"has length {length}",
                        PlanError,
                    )

    def _refuse(self, reason: str, kind: type[UserError] = UserError) -> None:
        raise kind(f"The sharding rule '{self.notation}' of {self.op} {reason}.")


def _letters(text: str) -> list[str]:
    return [character for character in text if character.isalpha()]


def _placed(found: Sequence[Token], shape: Sequence[int]) -> list[tuple[Token, int]]:
    """The named dims with their lengths."""
    at = found.index(ELLIPSIS) if ELLIPSIS in found else len(found)
    behind = len(found) - at - 1
    pairs = list(zip(found[:at], shape[:at], strict=True))
    if behind > 0:
        pairs += zip(found[at + 1 :], shape[-behind:], strict=True)
    return pairs


_RULES: dict[str, CustomRule] = {}


def custom_rule(target: Any) -> CustomRule | None:
    """What a user has said about an op; None if nothing."""
    return _RULES.get(str(target)) if _RULES else None


def sharding_rule(
    op: str,
    notation: str,
    *,
    contracted: Mapping[str, ReduceOp | tuple[ReduceOp, ...]] | None = None,
    whole: str | Sequence[str] = (),
    linear: str = "",
    lengths: Mapping[str, int] | None = None,
    localize: Localize | None = None,
) -> Callable[[T], T]:
    """Say how the dims of an op's operands and results belong together, so that it can be sharded.

        @msc.sharding_rule("mylib::scale", "b s d, d -> b s d")
        @torch.library.custom_op("mylib::scale", mutates_args=())
        def scale(x: Tensor, weight: Tensor) -> Tensor: ...

    A letter is a factor: a dim that operands and results share, so that the op on shards of it
    gives shards of the result. `...` stands for any dims, `(gd)` for a dim that is a product of
    factors, and spaces mean nothing. Terms belong to the op's tensor arguments, in their order, and
    to its results. An op without a rule runs on whole tensors, and the report says so.

    Args:
        op: `"namespace::name"`, with `.overload` unless it is the default one. It may be defined
            later: the call works as a decorator of its definition, and alone.
        notation: see above. A rule given twice replaces the first.
        contracted: factor -> how the ranks' results are put together where a result lacks it:
            "sum", "max" or "logsumexp", or one of them for each result. Any other factor that the
            results lack stays whole; so does one that only they have, without `localize`.
        whole: more factors that cannot be split, as the dim that a norm divides by.
        linear: names of arguments in which the op is jointly linear, groups separated by `|`.
        lengths: of factors that occur in products only, as the width of a head.
        localize: gets the call on this rank (`local.args`, `local.operand_shapes`,
            `local.result_shapes`, `local.start(factor)`), returns target, args and kwargs that
            run: for an op that takes sizes.

    Raises:
        UserError: name, notation or options are malformed, or do not fit the op's schema.
    """
    if not isinstance(op, str) or not isinstance(notation, str):
        raise UserError(
            f"An op and its rule are two strings, such as 'mylib::op' and 'b d -> b d'; they are "
            f"{op!r} and {notation!r}."
        )
    if not _NAME.fullmatch(op):
        raise UserError(f"'{op}' is no name of an op; it looks like 'mylib::op'.")
    rule = CustomRule(
        op,
        notation,
        dict(contracted or {}),
        tuple(whole),
        linear,
        dict(lengths or {}),
        localize,
    )
    rule.check_syntax()
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is not None:
        rule.check_schema(getattr(packet, overload or "default"))
    _RULES[f"{namespace}.{name}.{overload or 'default'}"] = rule
    return lambda definition: definition
