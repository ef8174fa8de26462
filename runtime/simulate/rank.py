"""One class of ranks in time: what its compute stream does, and what it waits for."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from msc.ir.errors import VerifyError
from msc.runtime.simulate.network import Communication, Network
from msc.runtime.simulate.templates import Call, Compute, Fused, Item, Start, Template, Wait


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of a stream's time: of `kind` "compute", "call" or "wait"."""

    kind: str
    label: str
    begin: float
    end: float


Walk = Generator[Communication, None, Any]


class SimulatedRank:
    """Walks a rank graph's template; `waits` yields communications that are not complete yet.

    bubble: seconds of waiting for other pipeline stages to start a communication; skew: for other
    ranks of the same stage. times: when each step of the rank graph started, and its end.
    communications: what it took part in, with its side of it ("send" or "recv", else the kind).
    """

    def __init__(self, own: int, template: Template, network: Network) -> None:
        self.own = own
        self.template = template
        self.clock = 0.0
        self.bubble = 0.0
        self.skew = 0.0
        self.times: list[float] = []
        self.slices: list[Slice] = []
        self.communications: list[tuple[str, Communication]] = []
        self._network = network
        self.waits: Walk = self._program()

    def _program(self) -> Walk:
        values: dict[fx.Node, Any] = {}
        for step in self.template.steps:
            self.times.append(self.clock)
            yield from self._step(step, values)
        self.times.append(self.clock)

    def _walk(self, template: Template, values: dict[fx.Node, Any]) -> Walk:
        for step in template.steps:
            yield from self._step(step, values)
        return _held(template.result, values)

    def _step(self, step: Any, values: dict[fx.Node, Any]) -> Walk:
        if isinstance(step, Compute):
            self._slice("compute", step.label, self.clock, self.clock + step.seconds)
            self.clock += step.seconds
        elif isinstance(step, Start):
            values[step.node] = self._start(step)
        elif isinstance(step, Fused):
            operation = self._start(step.start)
            if not operation.done:
                yield operation
            self._fused(step, operation)
        elif isinstance(step, Wait):
            awaited = values.get(step.source)
            if not isinstance(awaited, Communication):
                raise VerifyError(f"a node waits for %{step.source.name}, which starts nothing.")
            if not awaited.done:
                yield awaited
            self._wait(awaited)
        elif isinstance(step, Call):
            begin = self.clock
            own = {inner: values.get(arg) for inner, arg in step.passed}
            values[step.node] = yield from self._walk(step.template, own)
            self._slice("call", step.label, begin, self.clock)
        elif isinstance(step, Item):
            values[step.node] = values[step.source][step.index]

    def _start(self, start: Start) -> Communication:
        communicator = self._network.communicator(self.own, start)
        operation = communicator.join(self.own, start, self.clock)
        self.communications.append((start.kind, operation))
        return operation

    def _fused(self, step: Fused, operation: Communication) -> None:
        """Compute beside a communication once all have come, and see what that does not hide."""
        self._idle(operation, operation.begin, operation.number - 1)
        begin = self.clock
        end = begin + step.call.seconds(self._network.cluster, operation.seconds)
        self._slice("compute", step.label, begin, begin + step.busy)
        self._slice("wait", f"wait {operation.kind}", begin + step.busy, end)
        operation.exposed[self.own] = end - begin - step.busy
        self.clock = end

    def _wait(self, operation: Communication) -> None:
        """Let the compute stream wait for a communication to end."""
        self._idle(operation, operation.end, operation.number)

    def _idle(self, operation: Communication, until: float, last: int) -> None:
        """Let the compute stream wait, and say what the time went to.

        last: the number of the last operation of the communicator that may have been under way.
        """
        begin, idle = self.clock, 0.0
        if until <= begin:
            return
        communicator = operation.communicator
        known = until  # what the time from here on went to
        for number in range(last, -1, -1):  # it queued behind those before it
            each = communicator.operations[number]
            if each.end <= begin:
                break
            idle += known - each.end
            known = max(each.begin, begin)
            each.exposed[self.own] = each.exposed.get(self.own, 0.0) + each.end - known
        idle += known - begin
        if communicator.between_stages:
            self.bubble += idle
        else:
            self.skew += idle
        self.clock = until
        self._slice("wait", f"wait {operation.kind} {communicator.name}", begin, self.clock)

    def _slice(self, kind: str, label: str, begin: float, end: float) -> None:
        if end > begin:
            self.slices.append(Slice(kind, label, begin, end))


def _held(result: Any, values: Mapping[fx.Node, Any]) -> Any:
    """The communications of a graph's result, nested as it is; None for all else."""
    if isinstance(result, fx.Node):
        return values.get(result)
    if isinstance(result, (tuple, list)):
        return [_held(item, values) for item in result]
    return None
