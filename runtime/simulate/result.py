"""What a simulated step took, and what its time went to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from msc.cost import Cluster
from msc.ir.errors import UserError
from msc.ir.mesh import Mesh
from msc.runtime.simulate.rank import Slice
from msc.runtime.simulate.table import as_text
from msc.runtime.simulate.trace import trace_events

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Transfer:
    """One communication of a rank.

    name: of the group or channel; kind: "send", "recv", or that of a collective; payload_bytes: of
    the message, or of the whole value of a collective; module: where it stands, inside its layer;
    node: that starts it. begin, end: seconds; exposed_seconds: the
    part of them in which the compute stream waited for it, or for one that it held up.
    """

    name: str
    kind: str
    payload_bytes: int
    module: str
    node: str
    begin: float
    end: float
    exposed_seconds: float

    @property
    def axis(self) -> str:
        """The mesh axes that it is over: `tp`, `pp,dp`, or `pp` of a channel."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class CommunicationTotal:
    """All communications of one kind over the same axes, of one rank in one step."""

    calls: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def hidden_seconds(self) -> float:
        """The part during which the rank computes, or waits for something else."""
        return self.seconds - self.exposed_seconds


@dataclass(frozen=True)
class ClassResult:
    """One rank of a class: `compute + bubble + skew + exposed` is the time of the step.

    bubble_seconds: waiting for other pipeline stages; skew_seconds: for ranks of the same stage
    that have more to do. flops: executed on the matrix units, by dtype. memory: bytes live from
    each of these times on, as `program.memory_bytes()` counts them: while a node of the rank graph
    runs, the most that is live inside of it.
    """

    name: str
    rank: int
    count: int
    compute_seconds: float
    bubble_seconds: float
    skew_seconds: float
    flops: Mapping[torch.dtype, int]
    memory: tuple[tuple[float, int], ...]
    slices: tuple[Slice, ...]
    transfers: tuple[Transfer, ...]

    @property
    def peak_memory_bytes(self) -> int:
        """The most that is live together."""
        return max(size for _, size in self.memory)

    @cached_property
    def communication(self) -> Mapping[tuple[str, str], CommunicationTotal]:
        """Totals by axes and kind: `("tp", "all_gather")`, `("pp", "recv")`."""
        return self._totals(lambda each: (each.axis, each.kind))

    @cached_property
    def sites(self) -> Mapping[tuple[str, str, str], CommunicationTotal]:
        """Totals by axes, kind, and module inside a layer: `("tp", "all_gather", "mlp.up")`."""
        return self._totals(lambda each: (each.axis, each.kind, each.module))

    def _totals(self, key: Callable[[Transfer], _Key]) -> dict[_Key, CommunicationTotal]:
        found: dict[_Key, CommunicationTotal] = {}
        for each in self.transfers:
            had = found.get(key(each), CommunicationTotal())
            found[key(each)] = CommunicationTotal(
                had.calls + 1,
                had.payload_bytes + each.payload_bytes,
                had.seconds + each.end - each.begin,
                had.exposed_seconds + each.exposed_seconds,
            )
        return found

    @cached_property
    def exposed(self) -> Mapping[str, float]:
        """Seconds in which the rank computes nothing because of communication, by axes."""
        found: dict[str, float] = {}
        for (axis, _), total in self.communication.items():
            found[axis] = found.get(axis, 0.0) + total.exposed_seconds
        return found


@dataclass(frozen=True)
class SimulationResult:
    """A simulated step of all ranks; `print` it, or look at it with `save_trace` in Perfetto.

    model_flops: of a step on one device, each GEMM once; None if unknown.
    """

    mesh: Mesh
    cluster: Cluster
    step_seconds: float
    classes: tuple[ClassResult, ...]
    model_flops: float | None = None

    @property
    def bubble(self) -> float:
        """Idle time for the pipeline's sake over the rest of the step, mean over ranks.

        (stages - 1) / micro-batches for equal stages (Narayanan et al., SC 2021, section 2.2).
        """
        idle = self._mean(lambda each: each.bubble_seconds)
        return idle / (self.step_seconds - idle) if self.step_seconds else 0.0

    @cached_property
    def exposed(self) -> Mapping[str, float]:
        """Exposed communication in seconds by mesh axes, mean over ranks."""
        found: dict[str, float] = {}
        for each in self.classes:
            for axis, seconds in each.exposed.items():
                found[axis] = found.get(axis, 0.0) + each.count / self.mesh.size * seconds
        return found

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: FLOPs of the model over what all devices could do meanwhile.

        Chowdhery et al., PaLM, 2022, appendix B. The peak is that of the dtype of most FLOPs.
        """
        totals: Counter[torch.dtype] = Counter()
        for each in self.classes:
            totals.update({dtype: each.count * flops for dtype, flops in each.flops.items()})
        if self.model_flops is None or not totals or not self.step_seconds:
            return None
        ((dtype, _),) = totals.most_common(1)
        return self.model_flops / (self.step_seconds * self.cluster.peak(dtype) * self.mesh.size)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: as `mfu`, of the FLOPs that ranks execute, repeated ones too.

        Of several dtypes each counts by its own peak.
        """
        peak = self.cluster.peak
        busy = self._mean(lambda each: sum(f / peak(dtype) for dtype, f in each.flops.items()))
        return busy / self.step_seconds if self.step_seconds else 0.0

    def save_trace(self, file: str | Path) -> None:
        """Write the step as a Chrome trace (JSON), which ui.perfetto.dev opens.

        Raises `UserError` where the file cannot be written.
        """
        try:
            Path(file).write_text(json.dumps(trace_events(self)) + "\n")
        except OSError as error:
            raise UserError(
                f"'{file}' cannot be written: {error}. Give a file in a folder that exists."
            ) from error

    def __str__(self) -> str:
        return as_text(self)

    def _mean(self, value: Callable[[ClassResult], float]) -> float:
        """The mean over ranks."""
        return sum(each.count * value(each) for each in self.classes) / self.mesh.size
