"""Check a sharding rule by running a call on shards, in eager mode, and putting it together again.

Everything that a strategy promises is compared with the whole call: local shapes, results, and
the gradients of all operands, where each result's cotangent has the placement that its state says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from msc.ir.placement import Partial, Placement, Shard, Split, State, shard_of, unshard
from msc.ir.torch_private import OpOverload
from msc.passes.sharding.axes import Axis, local_shape
from msc.passes.sharding.rule import Call, LocalCall, Rule, Strategy, factors, strategies
from msc.passes.sharding.rules import rule_for

TOLERANCE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
}
"""Rounding of sums in another order, for the small shapes of the samples."""


class RuleError(AssertionError):
    """What a strategy promises differs from what the shards give."""


def call_of(target: Any, *args: Any, **kwargs: Any) -> Call:
    """The call of an op on real tensors."""
    with torch.no_grad():
        results = _tuple(target(*args, **kwargs))
    return Call(target, args, kwargs, tuple(_tensors((args, kwargs))), results)


def check_sharding_rule(op: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Check the rule of an op on one call: `check_sharding_rule(torch.ops.mylib.op, x, weight)`.

    Runs it over 2 and 3 ranks in every way that its rule allows, compares results and gradients
    with the whole call, and returns those ways; lengths that 2 and 3 divide show all of them.
    Raises `RuleError` at the first difference, and if the op has no rule. Use float64.
    """
    call = call_of(op if isinstance(op, OpOverload) else op.default, *args, **kwargs)
    rule = rule_for(call)
    if rule is None:
        raise RuleError(f"{call.target} has no sharding rule for this call")
    found: dict[str, None] = {}
    for size in (2, 3):
        found.update(dict.fromkeys(map(str, check_rule(call, rule, size))))
    return list(found)


@dataclass
class EagerLocalCall(LocalCall):
    """One rank's call, on real tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    call: Call
    rule: Rule
    strategy: Strategy
    size: int
    rank: int

    def start(self, factor: str) -> torch.Tensor | None:
        if factor != self.strategy.factor:
            return None
        split, length = self.strategy.split, factors(self.rule)[factor]
        assert split.segments == 1, "only an interval has a start"
        return torch.tensor(sum(split.part(length, self.size, r) for r in range(self.rank)))

    def coordinates(self, result: int, dim: int) -> torch.Tensor | None:
        placement = self.strategy.results[result].value
        if not isinstance(placement, Shard) or placement.dim != dim:
            return None
        whole = torch.arange(self.call.results[result].shape[dim])
        along = Shard(0, placement.segments, placement.unit)
        return shard_of(whole, along, self.size, self.rank)


@dataclass
class _Rank:
    """A rank's operands and results, and the gradients of its operands."""

    operands: list[torch.Tensor]
    results: tuple[torch.Tensor, ...]
    gradients: list[torch.Tensor] = field(default_factory=list)


def check_rule(
    call: Call,
    rule: Rule,
    size: int,
    *,
    candidates: Sequence[tuple[str, Split]] = (),
    constant: Sequence[int] = (),
    uninitialized: bool = False,
    seed: int = 0,
) -> list[Strategy]:
    """Check every strategy of a rule over an axis of `size`; raise `RuleError` at the first fault.

    candidates: factors with splits, as in `strategies`; parts may be unequal.
    constant: places of operands that take no gradient.
    uninitialized: the results' elements are arbitrary; only shapes are checked.
    Returns the strategies that were checked.
    """
    found = strategies(rule, len(call.operands), len(call.results), size, candidates, uneven=True)
    for strategy in found:
        try:
            ranks = _run_all(call, rule, strategy, size, constant, seed)
            if not uninitialized:
                _check_results(call, strategy, ranks)
                _check_gradients(call, strategy, ranks, constant, seed)
        except (RuleError, RuntimeError) as error:
            reason = error if isinstance(error, RuleError) else f"it does not run: {error}"
            raise RuleError(
                f"{call.target} on {[tuple(t.shape) for t in call.operands]}, {size} ranks, "
                f"{strategy}: {reason}"
            ) from error
    return found


def _run_all(
    call: Call,
    rule: Rule,
    strategy: Strategy,
    size: int,
    constant: Sequence[int],
    seed: int,
) -> list[_Rank]:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        [_leaf(part, index in constant) for part in _place(tensor, state, size, generator)]
        for index, (tensor, state) in enumerate(zip(call.operands, strategy.operands, strict=True))
    ]
    return [
        _run(call, rule, strategy, size, rank, [part[rank] for part in parts])
        for rank in range(size)
    ]


def _check_results(call: Call, strategy: Strategy, ranks: list[_Rank]) -> None:
    for index, (whole, state) in enumerate(zip(call.results, strategy.results, strict=True)):
        what = f"result {index}"
        found = _combine(
            what, [rank.results[index] for rank in ranks], state.value, _tolerance(call)
        )
        _compare(what, found, whole, _tolerance(call))


def _place(
    tensor: torch.Tensor, state: State, size: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Each rank's part of an operand."""
    if isinstance(state.value, Shard):
        return [shard_of(tensor, state.value, size, rank) for rank in range(size)]
    if isinstance(state.value, Partial):
        return summands(tensor, size, generator)
    return [tensor] * size


def _leaf(tensor: torch.Tensor, constant: bool) -> torch.Tensor:
    """A contiguous copy that takes a gradient, if it can."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(copy.is_floating_point() and not constant)


def summands(tensor: torch.Tensor, size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random tensors whose sum is `tensor`."""
    parts = [
        torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) for _ in range(size - 1)
    ]
    return [*parts, tensor - sum(parts)]


def _run(
    call: Call, rule: Rule, strategy: Strategy, size: int, rank: int, operands: list[torch.Tensor]
) -> _Rank:
    left = iter(operands)
    args, kwargs = _replace((call.args, dict(call.kwargs)), lambda _: next(left))
    local = EagerLocalCall(
        target=call.target,
        args=args,
        kwargs=kwargs,
        operand_shapes=tuple(tuple(operand.shape) for operand in operands),
        result_shapes=tuple(
            local_shape(whole.shape, (state,), (Axis("", size, rank),))
            for whole, state in zip(call.results, strategy.results, strict=True)
        ),
        call=call,
        rule=rule,
        strategy=strategy,
        size=size,
        rank=rank,
    )
    target, args, kwargs = (
        (local.target, local.args, local.kwargs) if rule.localize is None else rule.localize(local)
    )
    results = _tuple(target(*args, **kwargs))
    shapes = tuple(tuple(result.shape) for result in results)
    if shapes != local.result_shapes:
        raise RuleError(f"local shapes {shapes}, expected {local.result_shapes}")
    return _Rank(operands, results)


def _check_gradients(
    call: Call,
    strategy: Strategy,
    ranks: list[_Rank],
    constant: Sequence[int],
    seed: int,
) -> None:
    if any(state.value == Partial("max") for state in strategy.results):
        return  # all_reduce of a maximum has no gradient
    generator = torch.Generator().manual_seed(seed + 1)
    wholes = [_leaf(tensor, index in constant) for index, tensor in enumerate(call.operands)]
    left = iter(wholes)
    args, kwargs = _replace((call.args, dict(call.kwargs)), lambda _: next(left))
    results = _tuple(call.target(*args, **kwargs))
    used = [index for index, result in enumerate(results) if result.requires_grad]
    if not used:
        return
    cotangents = {
        index: torch.randn(results[index].shape, dtype=results[index].dtype, generator=generator)
        for index in used
    }
    expected = _gradients(results, wholes, cotangents)
    placed = {
        index: _place_cotangent(index, cotangents[index], strategy, ranks, call, generator)
        for index in used
    }
    for rank, here in enumerate(ranks):
        own = {index: placed[index][rank] for index in used}
        here.gradients = _gradients(here.results, here.operands, own)
    for index, state in enumerate(strategy.operands):
        if not wholes[index].requires_grad:
            continue
        found = [rank.gradients[index] for rank in ranks]
        what = f"gradient of operand {index}"
        whole = _combine(what, found, state.grad, _tolerance(call))
        _compare(what, whole, expected[index], _tolerance(call))


def _gradients(
    results: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    cotangents: dict[int, torch.Tensor],
) -> list[torch.Tensor]:
    """The gradient of each operand; zeros where none flows."""
    outputs = [(results[i], g) for i, g in cotangents.items() if results[i].requires_grad]
    inputs = [operand for operand in operands if operand.requires_grad]
    if not outputs or not inputs:
        return [torch.zeros_like(operand) for operand in operands]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in outputs],
            inputs,
            [cotangent for _, cotangent in outputs],
            materialize_grads=True,
            allow_unused=True,
        )
    )
    return [next(found) if x.requires_grad else torch.zeros_like(x) for x in operands]


def _place_cotangent(
    index: int,
    cotangent: torch.Tensor,
    strategy: Strategy,
    ranks: list[_Rank],
    call: Call,
    generator: torch.Generator,
) -> list[torch.Tensor]:
    """Each rank's part of a result's cotangent, placed as the result's state says."""
    state = strategy.results[index]
    size = len(ranks)
    if isinstance(state.grad, Shard):
        return [shard_of(cotangent, state.grad, size, rank) for rank in range(size)]
    if isinstance(state.grad, Partial):
        return summands(cotangent, size, generator)
    if state.value == Partial("logsumexp"):  # what all_reduce passes on
        whole = call.results[index]
        return [cotangent * (rank.results[index].detach() - whole).exp() for rank in ranks]
    return [cotangent] * size


def _combine(
    what: str, parts: Sequence[torch.Tensor], placement: Placement, tolerance: float
) -> torch.Tensor:
    """The whole of a value or gradient from what the ranks hold."""
    found = [part.detach() for part in parts]
    if isinstance(placement, Shard):
        return unshard(found, placement)
    if isinstance(placement, Partial):
        if placement.op == "sum":
            return sum(found[1:], start=found[0])
        stacked = torch.stack(found)
        return stacked.amax(0) if placement.op == "max" else stacked.logsumexp(0)
    for rank, other in enumerate(found[1:], 1):
        _compare(f"{what} on rank {rank}", other, found[0], tolerance)
    return found[0]


def _tolerance(call: Call) -> float:
    """That of the least precise tensor of a call."""
    return max(TOLERANCE.get(tensor.dtype, 0.0) for tensor in (*call.operands, *call.results))


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise RuleError(
            f"{what} is {found.dtype} {tuple(found.shape)}, "
            f"expected {expected.dtype} {tuple(expected.shape)}"
        )
    if expected.dtype in TOLERANCE:
        finite = expected[expected.isfinite()].abs()
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        close = torch.isclose(found, expected, rtol=0, atol=tolerance * scale, equal_nan=True)
    else:
        close = found == expected
    if not bool(close.all()):
        wrong = int((~close).sum())
        raise RuleError(f"{what} is wrong in {wrong} of {close.numel()} elements")


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _replace(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with its tensors replaced, in the order of `_tensors`."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replace(item, replace) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, replace) for item in value)
    return value
