"""Arguments and metadata of graph nodes as JSON, and back, exactly.

    None, True, 3, 0.5, "sum", [..]     themselves
    (1, 2)                              {"t": [1, 2]}
    {"a": 1}                            {"d": [["a", 1]]}        the order of keys is kept
    inf, -inf, nan                      {"float": "inf"}
    %x                                  {"n": "x"}
    fake tensor                         {"T": "f32[4,8]"}        {"T": "f32[4,8]/1,4"} with strides
    torch.int64, torch.strided          {"torch": "int64"}
    device, slice, complex              {"device": "cpu"}        {"slice": [0, 4, 1]}
    Replicate(), Shard(0, 3)            {"R": null}              {"S": [0, 3, 0]}
    Partial("sum")                      {"P": "sum"}

A list is never a tag and no plain value is an object, so each text has one reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from msc.ir.placement import Partial, Replicate, Shard
from msc.ir.torch_private import FakeTensor, FakeTensorMode, new_fake
from msc.ir.values import DTYPE_NAMES

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_TENSOR = re.compile(r"(\w+)\[([\d,]*)\](?:/([\d,]*))?")
_TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format)


def encode(value: Any) -> Any:
    """The JSON of a value; `TypeError` for a value that has none."""
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        return str(value)
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if type(value) in (tuple, torch.Size):
        return {"t": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key), encode(item)] for key, item in value.items()]}
    return _encode_object(value)


def _encode_object(value: Any) -> dict[str, Any]:
    if isinstance(value, fx.Node):
        return {"n": value.name}
    if isinstance(value, torch.Tensor):
        return {"T": _tensor_text(value)}
    if isinstance(value, _TORCH_TYPES):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": [encode(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, Replicate):
        return {"R": None}
    if isinstance(value, Shard):
        runs = value.segments
        return {"S": [value.dim, runs if isinstance(runs, int) else list(runs), value.unit]}
    if isinstance(value, Partial):
        return {"P": value.op}
    kind = type(value)
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be saved")


def _tensor_text(value: torch.Tensor) -> str:
    if not isinstance(value, FakeTensor) and value.device.type != "meta":
        raise TypeError(f"a tensor with numbers, of shape {tuple(value.shape)}, cannot be saved")
    if value.device.type not in ("cpu", "meta"):
        raise TypeError(f"a fake tensor on {value.device} cannot be saved, only one on the CPU")
    shape, stride = tuple(value.shape), tuple(value.stride())
    if not all(type(number) is int for number in (*shape, *stride)):
        raise TypeError(f"a tensor of symbolic shape {shape} cannot be saved")
    name = DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    text = f"{name}[{','.join(map(str, shape))}]"
    return text if stride == _contiguous(shape) else f"{text}/{','.join(map(str, stride))}"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class Decoder:
    """Reads what `encode` wrote; all fake tensors are of one mode, and equal ones one object."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self._tensors: dict[str, torch.Tensor] = {}

    def decode(self, data: Any, nodes: Mapping[str, fx.Node]) -> Any:
        """The value of some JSON; `nodes` are the nodes that it may refer to, by name."""
        if isinstance(data, list):
            return [self.decode(item, nodes) for item in data]
        if not isinstance(data, dict):
            return data
        ((tag, content),) = data.items()
        if tag == "n":
            return nodes[content]
        if tag == "t":
            return tuple(self.decode(item, nodes) for item in content)
        if tag == "d":
            return {self.decode(k, nodes): self.decode(v, nodes) for k, v in content}
        if tag == "T":
            return self._tensor(content)
        if tag == "slice":
            return slice(*(self.decode(part, nodes) for part in content))
        if tag == "complex":
            return complex(*(self.decode(part, nodes) for part in content))
        return _decode_literal(tag, content)

    def _tensor(self, text: str) -> torch.Tensor:
        found = self._tensors.get(text)
        if found is None:
            found = self._tensors[text] = self._new_tensor(text)
        return found

    def _new_tensor(self, text: str) -> torch.Tensor:
        match = _TENSOR.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is not the type of a tensor")
        name, *lists = match.groups()
        shape, stride = (None if part is None else _numbers(part) for part in lists)
        dtype = _DTYPES.get(name) or getattr(torch, name)
        assert shape is not None
        return new_fake(self.mode, shape, dtype, stride)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _decode_literal(tag: str, content: Any) -> Any:
    if tag == "float":
        return float(content)
    if tag == "torch":
        value = getattr(torch, content)
        if isinstance(value, _TORCH_TYPES):
            return value
    if tag == "device":
        return torch.device(content)
    if tag == "R":
        return Replicate()
    if tag == "S":
        dim, runs, unit = content
        return Shard(dim, runs if isinstance(runs, int) else tuple(runs), unit)
    if tag == "P":
        return Partial(content)
    raise ValueError(f"{{{tag!r}: {content!r}}} is no value")
