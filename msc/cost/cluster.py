"""A cluster as data: what a device and its links can do. Read from a JSON file or built in code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from msc.ir.errors import PlanError


@dataclass(frozen=True)
class Cluster:
    """Peak rates of one device and of the links between devices.

    flops_per_s: of the matrix units in the model's dtype; memory_bytes_per_s: device memory;
    memory_bytes: capacity of one device; devices_per_node; *_bytes_per_s: bandwidth of one device
    inside a node and across nodes; *_latency_s: of one message; launch_s: floor of one op.
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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "name" and not (isinstance(value, (int, float)) and value > 0):
                raise PlanError(f"Cluster '{self.name}': {name} is {value!r}; it must be positive.")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Cluster) -> Cluster:
        """Read a cluster from a JSON file or a mapping; a cluster passes through."""
        if isinstance(source, Cluster):
            return source
        if isinstance(source, Mapping):
            values = dict(source)
        elif not isinstance(source, (str, Path)):
            raise PlanError(
                f"cluster is a {type(source).__name__}; it is an msc.Cluster, a mapping or a file."
            )
        else:
            try:
                values = json.loads(Path(source).read_text())
            except (OSError, json.JSONDecodeError) as error:
                raise PlanError(f"Cluster file '{source}' cannot be read: {error}") from error
        known = {field.name for field in fields(cls)}
        required = {f.name for f in fields(cls)} - {
            "node_latency_s",
            "network_latency_s",
            "launch_s",
        }
        if unknown := sorted(set(values) - known):
            raise PlanError(f"Cluster has unknown fields {unknown}. Known: {sorted(known)}.")
        if missing := sorted(required - set(values)):
            raise PlanError(f"Cluster lacks the fields {missing}.")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON, to be read by `load`."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")
