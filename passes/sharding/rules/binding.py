"""A call's arguments by the names of its op's schema, and how rules are put together from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from msc.ir.placement import ReduceOp
from msc.ir.torch_private import OpOverload, schema_arguments
from msc.passes.sharding.rule import Call, Dim, Dims, LocalCall, Localize, Localized, Rule

Contracted = Mapping[str, ReduceOp | tuple[ReduceOp, ...]]
LinearGroups = Sequence[Sequence[str]]
"""Groups of argument names in which an op is jointly linear."""


@dataclass(frozen=True)
class Bound:
    """A call with its arguments by name, defaults filled in.

    values: what the caller wrote; for a tensor that is whatever stands for it in `call.args`.
    positions: the places in `call.operands` of each argument's tensors; empty for what is none.
    """

    call: Call
    values: Mapping[str, Any]
    positions: Mapping[str, tuple[int, ...]]

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        return self.call.results

    def tensors(self, name: str) -> tuple[torch.Tensor, ...]:
        """The tensors of an argument, in order: none if it is absent or a number."""
        return tuple(self.call.operands[position] for position in self.positions[name])

    def has_tensor(self, name: str) -> bool:
        return bool(self.positions[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an argument that is one tensor."""
        (tensor,) = self.tensors(name)
        return tuple(tensor.shape)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        return tuple(self.results[index].shape)

    def tensor_arguments(self) -> list[str]:
        """The arguments that take one tensor, given or not, in the order of the schema."""
        schema = schema_arguments(self.call.target)
        return [a.name for a in schema if a.type in ("Tensor", "Optional[Tensor]")]

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """An argument that names one dim, counted from the front."""
        rank = len(self.shape("self")) if rank is None else rank
        return int(self.values[name]) % max(1, rank)

    def rule(
        self,
        operands: Mapping[str, Dims | list[Dims]],
        results: Sequence[Dims],
        *,
        contracted: Contracted | None = None,
        whole: Sequence[str] = (),
        contiguous: Sequence[str] = (),
        linear: LinearGroups = (),
        localize: Localize | None = None,
    ) -> Rule:
        """A rule from dims by argument name; for a list of tensors, a list of dims."""
        dims: list[Dims] = [()] * len(self.call.operands)
        for name, given in operands.items():
            places = self.positions[name]
            entries = given if isinstance(given, list) else [given]
            for place, entry in zip(places, entries, strict=True):
                dims[place] = entry
        rule = Rule(
            operands=tuple(dims),
            results=tuple(results),
            contracted=dict(contracted or {}),
            whole=frozenset(whole),
            contiguous=frozenset(contiguous),
            linear=self._linear_groups(linear),
            localize=localize,
        )
        for tensor, described in zip(
            (*self.call.operands, *self.results), (*rule.operands, *rule.results), strict=True
        ):
            lengths = tuple(dim_length(dim) for dim in described)
            assert lengths == tuple(tensor.shape), (self.call.target, lengths, tensor.shape)
        return rule

    def _linear_groups(self, groups: LinearGroups) -> tuple[frozenset[int], ...]:
        """Operand positions of the groups that are all tensors; only floating ones are partial."""
        if not all(result.is_floating_point() for result in self.results):
            return ()
        found: list[frozenset[int]] = []
        for group in groups:
            places = [self.positions[name] for name in group]
            members = frozenset(place for part in places for place in part)
            floating = all(self.call.operands[m].is_floating_point() for m in members)
            if members and all(places) and floating:
                found.append(members)
        return tuple(found)


Build = Callable[[Bound], Rule | None]


@dataclass(frozen=True)
class Line:
    """One line of the table: ops, and how the rule of a call of one of them is built."""

    ops: tuple[OpOverload, ...]
    build: Build


def derived(build: Build, *ops: Any) -> Line:
    """A line for ops whose rule `build` derives; `aten.mm` stands for `aten.mm.default`."""
    return Line(tuple(op if isinstance(op, OpOverload) else op.default for op in ops), build)


def bind(call: Call) -> Bound:
    """Name the arguments of a call by its op's schema."""
    schema = schema_arguments(call.target)
    values = {argument.name: argument.default for argument in schema}
    takes_tensors = {argument.name for argument in schema if "Tensor" in argument.type}
    positions: dict[str, tuple[int, ...]] = dict.fromkeys(values, ())
    names = [argument.name for argument in schema]
    place = 0
    for name, value in (*zip(names, call.args, strict=False), *call.kwargs.items()):
        values[name] = value
        if name in takes_tensors:
            count = sum(1 for leaf in leaves(value) if not _is_literal(leaf))
            positions[name] = tuple(range(place, place + count))
            place += count
    assert place == len(call.operands), f"{call.target} has {place} tensors in its arguments"
    return Bound(call, values, positions)


def with_arguments(local: LocalCall, **changes: Any) -> Localized:
    """The local call with other values for some arguments, named by the op's schema."""
    names = [argument.name for argument in schema_arguments(local.target)]
    args = list(local.args)
    kwargs = dict(local.kwargs)
    for name, value in changes.items():
        index = names.index(name)
        if index < len(args):
            args[index] = value
        else:
            kwargs[name] = value
    return local.target, tuple(args), kwargs


def leaves(value: Any) -> Iterator[Any]:
    """The items of a nested list; a value that is no list is its own leaf."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _is_literal(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex))


EMPTY: Dim = ((),)
"""A dim of length 1 that shares nothing: broadcast, inserted or kept by a reduction."""


def dim_length(dim: Dim) -> int:
    """The length of a dim: the sum over its runs of the products of their factors."""
    return sum(math.prod(length for _, length in run) for run in dim)


def dim_of(name: str, length: int) -> Dim:
    """A dim that is one factor."""
    return (((name, length),),)


def dims_of(shape: Sequence[int], prefix: str = "d") -> list[Dim]:
    """Dims of one factor each, named by prefix and dim: `d0`, `d1`."""
    return [dim_of(f"{prefix}{index}", length) for index, length in enumerate(shape)]


def broadcast_dims(shape: Sequence[int], dims: Sequence[Dim]) -> Dims:
    """Dims of a tensor that broadcasts to `dims`: the last ones, without those of length 1."""
    own = dims[len(dims) - len(shape) :]
    return tuple(EMPTY if length == 1 else dim for length, dim in zip(shape, own, strict=True))


def parse_linear(text: str) -> list[list[str]]:
    """`"self other"`: jointly linear in both. `"self | other"`: linear in each of the two."""
    return [group.split() for group in text.split("|") if group.strip()]
