"""A cluster as data: what a device and its links can do. Read from a JSON file or built in code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from msc.cost.clusters import presets
from msc.ir.errors import PlanError

_MAY_BE_ZERO = (
    "node_latency_s",
    "network_latency_s",
    "launch_s",
    "fused_least_rows",
    "fused_least_flops",
)
_WHOLE = ("devices_per_node", "multiprocessors", "fused_least_rows")


@dataclass(frozen=True)
class Cluster:
    """Peak rates of one device and of the links between devices.

    flops_per_s: of the matrix units, in every dtype that `dtype_flops_per_s` does not name
    ("float32" -> FLOP/s); memory_bytes_per_s: device memory; memory_bytes: capacity of one device;
    devices_per_node; *_bytes_per_s: bandwidth of one device, one way, inside a node and across
    nodes; *_latency_s: of one message; launch_s: floor of one op; gemm_efficiency: the fraction of
    the peak that GEMMs reach, as measured; multiprocessors: that work on the tiles of a GEMM at
    once, 1 if tiles are so small that their number does not matter; fused_gemm_rate: the rate of a
    GEMM that is fused with a collective, over that of the library's (persistent Triton kernels
    reach 0.85 to 0.95 of cuBLAS on Hopper: tritonbench, PR 894); fused_least_rows and
    fused_least_flops: of such GEMMs, below which they were seen to lose, whatever a model says;
    sources: where the figures are from.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    devices_per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    node_latency_s: float = 5e-6
    network_latency_s: float = 2e-5
    launch_s: float = 5e-6
    gemm_efficiency: float = 1.0
    multiprocessors: int = 1
    fused_gemm_rate: float = 0.9
    fused_least_rows: int = 0
    fused_least_flops: float = 0.0
    dtype_flops_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    sources: str = ""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "dtype_flops_per_s":
                self._check_dtypes(value)
            elif name in ("name", "sources"):
                if not isinstance(value, str):
                    raise PlanError(f"Cluster '{self.name}': {name} is {value!r}; it is text.")
            else:
                self._check(name, value)
        for name in ("gemm_efficiency", "fused_gemm_rate"):
            if getattr(self, name) > 1:
                raise PlanError(
                    f"Cluster '{self.name}': {name} is {getattr(self, name)!r}; it is a fraction "
                    "of another rate, 1 at most."
                )
        for name in _WHOLE:
            if not isinstance(getattr(self, name), int):
                raise PlanError(
                    f"Cluster '{self.name}': {name} is {getattr(self, name)!r}; it is a whole "
                    "number."
                )

    def _check(self, name: str, value: Any) -> None:
        place = f"Cluster '{self.name}': {name} is {value!r}"
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise PlanError(f"{place}; it must be a number.")
        least = "0 or positive" if name in _MAY_BE_ZERO else "positive"
        if math.isnan(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            raise PlanError(f"{place}; it must be {least}.")

    def _check_dtypes(self, rates: Any) -> None:
        if not isinstance(rates, Mapping):
            raise PlanError(
                f"Cluster '{self.name}': dtype_flops_per_s is {rates!r}; it maps dtypes to rates, "
                'as {"float32": 1.95e13}.'
            )
        for name, value in rates.items():
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise PlanError(
                    f"Cluster '{self.name}': dtype_flops_per_s names '{name}', which is no dtype "
                    "of torch."
                )
            self._check(f"dtype_flops_per_s of {name}", value)

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of the matrix units in a dtype."""
        return self.dtype_flops_per_s.get(str(dtype).removeprefix("torch."), self.flops_per_s)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Cluster) -> Cluster:
        """Read a cluster from a JSON file or a mapping, or a shipped one by its name.

        A cluster passes through. Shipped are the files of `msc/cost/clusters`: "a100", "h100".
        """
        if isinstance(source, Cluster):
            return source
        if isinstance(source, Mapping):
            values = dict(source)
        elif not isinstance(source, (str, Path)):
            raise PlanError(
                f"cluster is a {type(source).__name__}; it is an msc.Cluster, a mapping or a file."
            )
        else:
            values = _read(source)
        file = isinstance(source, (str, Path))
        which = f"Cluster file '{source}'" if file else f"Cluster {values.get('name', '')!r}"
        known = {field.name for field in fields(cls)}
        required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
        if unknown := sorted(set(values) - known):
            raise PlanError(f"{which} has unknown fields {unknown}. Known: {sorted(known)}.")
        if missing := sorted(required - set(values)):
            raise PlanError(f"{which} lacks the fields {missing}.")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON, to be read by `load`."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file, in which no field stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1})
        raise ValueError(f"it has the fields {twice} more than once")
    return found


def _read(source: str | Path) -> dict[str, Any]:
    shipped = presets()
    try:
        values = json.loads(
            shipped.get(str(source), Path(source)).read_text(), object_pairs_hook=_fields
        )
    except (OSError, ValueError) as error:  # no file, no text, or no JSON
        raise PlanError(
            f"Cluster file '{source}' cannot be read: {error}. Clusters that need no file: "
            f"{', '.join(shipped)}."
        ) from error
    if not isinstance(values, dict):
        raise PlanError(f"Cluster file '{source}' holds no JSON object with a cluster's fields.")
    return values
