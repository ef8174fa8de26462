"""From symbolic to plain sizes: every expression in the batch size becomes a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from msc.ir.torch_private import FakeTensorMode, new_fake

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class DataDependentSize(Exception):
    """A size that depends on the numbers in a tensor."""


class Sizes:
    """Evaluates sizes at one batch size.

    `symbol` is the symbol of the batch in the exported program, None if the batch is a constant.
    """

    def __init__(self, symbol: sympy.Symbol | None, batch: int) -> None:
        self._values = {} if symbol is None else {symbol: sympy.Integer(batch)}
        self._cache: dict[Any, int | float | bool] = {}

    def number(self, size: Any) -> Any:
        """The number that a size stands for; anything that is not symbolic passes through.

        Raises `DataDependentSize` for a size that is no expression in the batch size.
        """
        if not isinstance(size, SYMBOLIC):
            return size
        expression = size.node.expr
        if expression not in self._cache:
            self._cache[expression] = self._evaluate(expression, type(size))
        return self._cache[expression]

    def _evaluate(self, expression: Any, kind: type[Any]) -> int | float | bool:
        if not isinstance(expression, sympy.Basic):
            return expression  # type: ignore[no-any-return]
        if expression.free_symbols - self._values.keys():
            raise DataDependentSize(str(expression))
        value = expression.subs(self._values)
        convert: Callable[[Any], int | float | bool] = int
        if kind is torch.SymFloat:
            convert = float
        elif kind is torch.SymBool:
            convert = bool
        return convert(value)

    def fake(self, mode: FakeTensorMode, value: Any) -> Any:
        """The same value with plain sizes, as fake tensors of `mode`."""
        if isinstance(value, torch.Tensor):
            return new_fake(mode, [self.number(length) for length in value.shape], value.dtype)
        if isinstance(value, (tuple, list)):
            return type(value)(self.fake(mode, item) for item in value)
        return self.number(value)


def symbol_of(tensor: torch.Tensor, dim: int) -> sympy.Symbol | None:
    """The symbol that stands for a dim of an exported input; None if the dim is a number."""
    length = tensor.shape[dim]
    if not isinstance(length, torch.SymInt):
        return None
    symbols = length.node.expr.free_symbols
    return next(iter(symbols)) if symbols else None


def has_tensor(value: Any) -> bool:
    """Whether a value holds a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
