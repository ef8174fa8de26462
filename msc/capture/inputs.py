"""The example batch: its structure, its tensors, and which of their dims are the batch.

A batch is a tuple (positional arguments of the model) or a dict (keywords), of any nesting. What is
not a tensor in it (None, flags, numbers) is part of the program.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from msc.ir.errors import CaptureError, InputError


@dataclass(frozen=True)
class InputInfo:
    """A tensor of the batch. `batch_dim` None: every micro-batch reads the whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None


@dataclass(frozen=True)
class InputSpec:
    """The structure of a batch: `names[i]` and `leaves[i]` for every leaf of `structure`.

    A leaf is an `InputInfo`, or the constant that stands there.
    """

    structure: pytree.TreeSpec
    keywords: bool
    names: tuple[str, ...]
    leaves: tuple[Any, ...]

    @property
    def inputs(self) -> tuple[InputInfo, ...]:
        """The tensors of the batch, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, InputInfo))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The batch that holds `tensors`, one for each of `inputs`."""
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(leaf, InputInfo) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)

    def _example(self) -> Any:
        return pytree.tree_unflatten(self.leaves, self.structure)

    def flatten(self, batch: Any) -> list[torch.Tensor]:
        """The tensors of a batch; `InputError` if it differs from this description."""
        values, structure = pytree.tree_flatten(as_plain(batch, InputError))
        if structure != self.structure:
            raise InputError(
                "The batch has another structure than the one that was compiled: "
                f"{_outline(batch)} instead of {_outline(self._example())}. Pass the same inputs "
                "as in the example batch."
            )
        tensors = []
        for name, leaf, value in zip(self.names, self.leaves, values, strict=True):
            if isinstance(leaf, InputInfo):
                _check(leaf, value)
                tensors.append(value)
            elif isinstance(value, torch.Tensor) or value != leaf:
                raise InputError(
                    f"Input '{name}' is {_say(value)}; the program was compiled for {leaf!r}. "
                    "Values that are not tensors are part of the program: compile again."
                )
        return tensors


def describe_inputs(
    model: nn.Module, batch: Any, batch_dims: Mapping[str, int | None] | None
) -> tuple[InputSpec, list[torch.Tensor], int]:
    """The structure of the example batch, its tensors, and the batch size.

    A tensor carries the batch if its dim 0 is as long as that of the first tensor; `batch_dims`
    (name -> dim or None) says otherwise.
    """
    plain = as_plain(batch, CaptureError)
    keyed, structure = pytree.tree_flatten_with_path(plain)
    names = tuple(_name(model, path) for path, _ in keyed)
    tensors = [(name, v) for name, (_, v) in zip(names, keyed, strict=True) if _is_tensor(v)]
    if not tensors:
        raise CaptureError("The example batch has no tensor. Pass the inputs of one training step.")
    if batch_dims is not None and not isinstance(batch_dims, Mapping):
        raise CaptureError(
            f"batch_dims is a {type(batch_dims).__name__}; it maps names of inputs to dims, for "
            "example {'mask': 1, 'table': None}."
        )
    dims = _batch_dims(tensors, dict(batch_dims or {}))
    sizes = {name: tensor.shape[dim] for name, tensor in tensors if (dim := dims[name]) is not None}
    if len(set(sizes.values())) > 1:
        raise CaptureError(f"Inputs differ in the length of their batch dim: {sizes}.")
    if not sizes or 0 in sizes.values():
        raise CaptureError(
            "No input has a batch dim that is not empty. The first tensor's dim 0 is the batch; "
            "batch_dims={'name': dim} names another."
        )
    leaves = tuple(
        InputInfo(name, tuple(v.shape), v.dtype, dims[name]) if _is_tensor(v) else v
        for name, (_, v) in zip(names, keyed, strict=True)
    )
    spec = InputSpec(structure, isinstance(plain, dict), names, leaves)
    return spec, [tensor for _, tensor in tensors], next(iter(sizes.values()))


def as_plain(
    batch: Any, error: type[CaptureError] | type[InputError]
) -> tuple[Any, ...] | dict[str, Any]:
    """A batch as a tuple or a dict; a single tensor is a tuple of one."""
    if isinstance(batch, torch.Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch)
    raise error(
        f"A batch is a tuple (positional inputs) or a dict (keyword inputs), not {_say(batch)}."
    )


def _outline(value: Any) -> str:
    """The structure of a batch in one line: `(tensor, {'mask': tensor, 'labels': None})`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_outline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_outline, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return "tensor" if isinstance(value, (InputInfo, torch.Tensor)) else repr(value)


def _batch_dims(
    tensors: Sequence[tuple[str, torch.Tensor]], given: dict[str, int | None]
) -> dict[str, int | None]:
    unknown = given.keys() - dict(tensors).keys()
    if unknown:
        known = ", ".join(name for name, _ in tensors)
        raise CaptureError(f"batch_dims names {sorted(unknown)}; the tensor inputs are {known}.")
    result: dict[str, int | None] = {}
    length: int | None = None
    for name, tensor in tensors:
        dim = given.get(name, 0 if tensor.dim() else None)
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise CaptureError(f"batch_dims['{name}'] is {dim!r}; it is a dim, or None.")
        if dim is not None and not -tensor.dim() <= dim < tensor.dim():
            raise CaptureError(f"batch_dims['{name}'] is {dim}; '{name}' has {tensor.dim()} dims.")
        dim = dim if dim is None else dim % tensor.dim()
        if name not in given and dim is not None:
            length = tensor.shape[0] if length is None else length
            dim = dim if tensor.shape[0] == length else None
        elif dim is not None and length is None:
            length = tensor.shape[dim]
        result[name] = dim
    return result


def _name(model: nn.Module, path: tuple[Any, ...]) -> str:
    """The user's name of an input: the keyword, or the name of the positional argument."""
    first, *rest = path
    name = str(first.key) if isinstance(first, pytree.MappingKey) else _argument(model, first.idx)
    return name + pytree.keystr(tuple(rest))


def _argument(model: nn.Module, index: int) -> str:
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    return names[index] if index < len(names) else f"input{index}"


def _check(info: InputInfo, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"Input '{info.name}' is {_say(value)}; a tensor is needed.")
    shape = tuple(value.shape)
    if shape != info.shape:
        raise InputError(
            f"Input '{info.name}' has shape {list(shape)}; the program was compiled for "
            f"{list(info.shape)}. Every batch has the shape of the example batch: pad or drop "
            "the last one, or compile again."
        )
    if value.dtype != info.dtype:
        raise InputError(
            f"Input '{info.name}' is {value.dtype}; the program was compiled for {info.dtype}."
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _say(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{value!r} of type {type(value).__name__}"
