"""Actions: the nodes of a rank graph that are not ops on tensors.

A rank graph is one step of one rank, in schedule order. It calls the forward and backward graphs of
chunks (`call_module`) and these functions (`call_function`). They are names with a contract; the
executors carry them out (`msc.runtime.actions`), so calling one directly raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

ACTIONS: set[Callable[..., Any]] = set()

UPDATES: set[Callable[..., Any]] = set()
"""The actions that change parameters: `action(parameters, gradients or sums, states, ..)`."""


def _action(function: _F) -> _F:
    ACTIONS.add(function)
    return function


def _update(function: _F) -> _F:
    UPDATES.add(function)
    return _action(function)


def _executed_only(name: str) -> Any:
    raise RuntimeError(f"{name} is an action of a rank graph; an executor runs it")


@_action
def coordinate(axis: str) -> Any:
    """This rank's coordinate on a mesh axis: a 0-dim int64 tensor on the CPU."""
    return _executed_only("coordinate")


@_action
def arrived(value: Any) -> Any:
    """An input of the step: what a rank is given, or if that is a function, what it returns.

    So an input may be loaded while what stands before this node is under way.
    """
    return _executed_only("arrived")


@_action
def micro_batch_index(index: int) -> Any:
    """A micro-batch's number as a 0-dim int64 tensor on the CPU."""
    return _executed_only("micro_batch_index")


@_action
def micro_batch(value: Any, dim: int, index: int, count: int) -> Any:
    """Part `index` of `count` equal parts of this rank's share of an input, along `dim`; a view."""
    return _executed_only("micro_batch")


@_action
def send(values: Sequence[Any], stage: int, channel: str) -> Any:
    """Start sending tensors to the rank at pp coordinate `stage`; returns a token for `wait`.

    `channel` names the communicator: the two directions of a pair of stages use two, and gradients
    others than activations. Sends and receives on one channel meet in the order of their issue.
    """
    return _executed_only("send")


@_action
def recv(stage: int, channel: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> Any:
    """Start receiving tensors from the rank at pp coordinate `stage`; gives a token for `wait`."""
    return _executed_only("recv")


@_action
def wait(token: Any) -> Any:
    """Complete a `send` (returns None) or a `recv` (returns the tuple of tensors)."""
    return _executed_only("wait")


@_action
def accumulate(total: Sequence[Any] | None, parts: Sequence[Any], dtype: Any = None) -> Any:
    """`total + parts`, tensor by tensor; the result reuses `total`. None as total starts a sum.

    A part that is None adds nothing. With `dtype`, sums are of it, and parts may be of a lower one.
    """
    return _executed_only("accumulate")


@_action
def flatten(values: Sequence[Any]) -> Any:
    """One contiguous 1-D tensor that holds all values in order: a bucket."""
    return _executed_only("flatten")


@_action
def unflatten(bucket: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """The tuple of views of a bucket with the given shapes."""
    return _executed_only("unflatten")


@_action
def flatten_shards(
    values: Sequence[Any], dims: Sequence[int], parts: int, dtype: Any = None
) -> Any:
    """One 1-D tensor of `parts` equal rows: row i holds shard i of every value, in order.

    Value j is split along `dims[j]`; see `msc.ir.data_shard`. With `dtype` it is converted. May be
    a view of a single value.
    """
    return _executed_only("flatten_shards")


@_action
def unflatten_shards(
    bucket: Any, shapes: Sequence[tuple[int, ...]], dims: Sequence[int], parts: int
) -> Any:
    """The tuple of contiguous tensors of these shapes of which `flatten_shards` gives `bucket`."""
    return _executed_only("unflatten_shards")


@_action
def squared_norm(values: Sequence[Any], copies: Sequence[int]) -> Any:
    """The sum of all squared elements, 0-dim float64; `values[i]` counts one over `copies[i]`.

    Summed over ranks of which `copies[i]` hold the same `values[i]`, each counts once. A value that
    is None counts nothing.
    """
    return _executed_only("squared_norm")


@_action
def learning_rate(step: Any, phases: Sequence[tuple[Any, ...]], held: float) -> Any:
    """The rate of step `step` by an `msc.LearningRate` of these fields: 0-dim float64."""
    return _executed_only("learning_rate")


# What an optimizer does to this rank's shards. `states` has a sequence of tensors for each state of
# the optimizer (`Optimizer.state_names`), in the order of the parameters; `step` is a 0-dim int64
# tensor, 1 in the first step that changes something; `lr` a number or a 0-dim tensor; `scale`, a
# 0-dim tensor, is multiplied with the gradients, which stay as they are; where `skip`, a 0-dim bool
# tensor, is true, parameters and states stay as they are, whatever the gradients. All return
# (parameters, states), which reuse the operands.


@_update
def adam(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Sequence[Any]],
    step: Any,
    lr: Any,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    scale: Any = None,
    skip: Any = None,
) -> Any:
    """A step of Adam (Kingma and Ba, ICLR 2015), as `torch.optim.Adam`; two moments.

    decoupled: the weight decay is AdamW's (Loshchilov and Hutter, ICLR 2019), as of
    `torch.optim.AdamW`.
    """
    return _executed_only("adam")


@_update
def sgd(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Sequence[Any]],
    step: Any,
    lr: Any,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    scale: Any = None,
    skip: Any = None,
) -> Any:
    """A step of `torch.optim.SGD`; one state where there is momentum, or else none."""
    return _executed_only("sgd")


@_action
def lamb_sums(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Sequence[Any]],
    step: Any,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copies: Sequence[int],
    scale: Any = None,
    skip: Any = None,
) -> Any:
    """The first half of a LAMB step: the moments, and what the trust ratios are made of.

    Returns (sums, states); `sums`, float64 of shape [2n], are the squared norms of the n parameters
    and then those of their updates, each over `copies[i]`: the number of ranks, among those that
    are summed over, which hold the same shard.
    """
    return _executed_only("lamb_sums")


@_update
def lamb(
    parameters: Sequence[Any],
    sums: Any,
    states: Sequence[Sequence[Any]],
    step: Any,
    lr: Any,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    skip: Any = None,
) -> Any:
    """The second half of a LAMB step (You et al., ICLR 2020, algorithm 2).

    `sums` are those of `lamb_sums` over all ranks. A parameter moves by
    `lr * norm(parameter) / norm(update)` times its update; where a norm is 0, by lr times it.
    """
    return _executed_only("lamb")
