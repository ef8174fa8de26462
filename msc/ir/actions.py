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


def _action(function: _F) -> _F:
    ACTIONS.add(function)
    return function


def _executed_only(name: str) -> Any:
    raise RuntimeError(f"{name} is an action of a rank graph; an executor runs it")


@_action
def coordinate(axis: str) -> Any:
    """This rank's coordinate on a mesh axis: a 0-dim int64 tensor on the CPU."""
    return _executed_only("coordinate")


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
def squared_norm(values: Sequence[Any], copies: Sequence[int]) -> Any:
    """The sum of all squared elements, 0-dim float64; `values[i]` counts one over `copies[i]`.

    Summed over ranks of which `copies[i]` hold the same `values[i]`, each counts once. A value that
    is None counts nothing.
    """
    return _executed_only("squared_norm")


@_action
def adamw(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    first_moments: Sequence[Any],
    second_moments: Sequence[Any],
    step: Any,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decays: Sequence[float],
    scale: Any = None,
) -> Any:
    """One AdamW step (Loshchilov and Hutter, ICLR 2019) on this rank's shards.

    `step` is a 0-dim int64 tensor, 1 in the first step; `scale`, a 0-dim tensor, is multiplied with
    the gradients, which stay as they are. Returns (parameters, first_moments,
    second_moments); the results reuse the operands. Equal to `torch.optim.AdamW`.
    """
    return _executed_only("adamw")
