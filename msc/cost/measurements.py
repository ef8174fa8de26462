"""How long calls took on one kind of device, as `msc tune` measured them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from msc.ir.communication import FUSED
from msc.ir.errors import UserError

FORMAT, VERSION = "msc measurements", 1
FUSED_WAY, APART = "fused", "apart"
"""The ways of a fused collective: as one op, and as the collective and its GEMMs."""
ATEN = "ATen"
"""The way of a call that has kernels, without them."""


def versions_here() -> dict[str, str]:
    """Of torch and Triton, empty for what is not installed."""
    return {"torch": torch.__version__, "triton": _version("triton")}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class FusedSeconds:
    """Of a fused collective as one op, and of the collective and its GEMMs one after the other."""

    fused: float
    apart: float

    @property
    def ratio(self) -> float:
        """Below 1 the op is faster."""
        return self.fused / self.apart


@dataclass(frozen=True)
class Measurements:
    """Seconds of calls on a device, by the call's text (`call_text`) and the way it was computed.

    device: `device_name` of it. versions: of torch and Triton, whose libraries and compiler they
    are of.
    """

    device: str
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    calls: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)

    def notes(self) -> list[str]:
        """That other versions were measured than those that are here, if so."""
        here = versions_here()
        if dict(self.versions) == here:
            return []
        theirs, ours = (
            " and ".join(f"{name} {version or 'none'}" for name, version in each.items())
            for each in (self.versions, here)
        )
        return [
            f"tuned= was measured on {self.device} with {theirs or 'unknown versions'}, and here "
            f"is {ours}: measure again with 'msc tune' where the program will run."
        ]

    def of(self, node: fx.Node) -> Mapping[str, float]:
        """The seconds of a call by way; empty where it was not measured."""
        return self.calls.get(call_text(node), {})

    def fused(self, node: fx.Node) -> FusedSeconds | None:
        """Of a fused collective's node, if it was measured."""
        found = self.of(node)
        if not {FUSED_WAY, APART} <= set(found):
            return None
        return FusedSeconds(found[FUSED_WAY], found[APART])

    def with_calls(self, calls: Mapping[str, Mapping[str, float]]) -> Measurements:
        """The same with these calls too, which replace equal ones."""
        return Measurements(self.device, self.versions, {**self.calls, **calls})

    @property
    def digest(self) -> str:
        """Of all that it holds."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As it stands in a file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "device": self.device,
            "versions": dict(self.versions),
            "calls": {call: dict(ways) for call, ways in self.calls.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write it as JSON, to be read by `load`; whole or not at all."""
        file = Path(path)
        beside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        beside.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        beside.replace(file)

    @classmethod
    def load(cls, source: str | Path | Measurements | Mapping[str, Any]) -> Measurements:
        """Read the file that `msc tune` wrote; measurements, or what `to_json` gave, pass through.

        Raises `UserError` for a file that cannot be read or is none of them.
        """
        if isinstance(source, Measurements):
            return source
        if isinstance(source, Mapping):
            return cls._of(source, "Measurements")
        if not isinstance(source, (str, Path)):
            raise UserError(
                f"tuned is a {type(source).__name__}; it is the file that 'msc tune' wrote."
            )
        try:
            data = json.loads(Path(source).read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"The measurements in '{source}' cannot be read: {error}. 'msc tune' writes them."
            ) from error
        return cls._of(data, f"'{source}'")

    @classmethod
    def _of(cls, data: Any, what: str) -> Measurements:
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise UserError(f"{what} holds no measurements; 'msc tune' writes such a file.")
        if data.get("version") != VERSION:
            raise UserError(
                f"{what} has measurements of version {data.get('version')}, and this MSC reads "
                f"{VERSION}: measure again with 'msc tune'."
            )
        device, versions, calls = data.get("device"), data.get("versions"), data.get("calls")
        if (
            not isinstance(device, str)
            or not isinstance(versions, Mapping)
            or not isinstance(calls, Mapping)
            or not all(map(_are_seconds, calls.values()))
        ):
            raise UserError(
                f"{what} is damaged: it has no device, or calls whose seconds are no positive "
                "numbers. Measure again with 'msc tune'."
            )
        return cls(device, versions, calls)


def _are_seconds(ways: Any) -> bool:
    return isinstance(ways, Mapping) and all(
        isinstance(x, (int, float)) and math.isfinite(x) and x > 0 for x in ways.values()
    )


def call_text(node: fx.Node) -> str:
    """A call by op, shapes, dtypes and arguments: what its time depends on.

    Of a fused collective the name of the group is left out, not how many ranks it has.
    """
    target: Any = node.target
    args: Any = node.args[:-1] if target in FUSED else node.args
    name = getattr(target, "__name__", "") if not hasattr(target, "_schema") else str(target)
    words = [_text(each) for each in args]
    words += [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    return f"{name.removesuffix('.default')}({', '.join(words)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)
