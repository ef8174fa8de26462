"""What a rank's steps get from other chunks and give to them: by messages, or as a value.

    %t = recv(0, 'pp:0>1', ..)                 posted some time before the step that reads it
    %x = wait(%t)
    %s = send([%y], 2, 'pp:1>2')               waited for where the schedule says

Activations and gradients between two stages go on channels of their own; what stays on a stage is
passed on as a value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from msc.ir import actions
from msc.passes.chunks import Key
from msc.passes.compilation import Compilation, Variant
from msc.passes.schedules.messages import receiver
from msc.passes.schedules.stages import Step
from msc.passes.zero.collectives import Act


class Transfers:
    """Appends the messages of the ranks of a variant at pp coordinate `stage` by `act`.

    waits: before a step, the sends to wait for, by the steps that made them.
    """

    def __init__(
        self,
        act: Act,
        unit: Compilation,
        variant: Variant,
        stage: int,
        waits: Mapping[Step, Sequence[Step]],
    ) -> None:
        self.act = act
        self.stages = unit.schedule.stages
        self.variant = variant
        self.stage = stage
        self.waits = waits
        self.received: dict[Step, tuple[fx.Node, tuple[Tensor, ...]]] = {}
        self.sent: dict[Step, fx.Node] = {}
        self.passed: dict[Step, list[fx.Node]] = {}

    def post(self, step: Step) -> None:
        """Start receiving what another stage sends to a step."""
        source, keys = self._source(step)
        if not keys or self.stages.of(source) == self.stage:
            return
        values = [self.variant.value_meta[key]["val"] for key in keys]
        shapes = [tuple(value.shape) for value in values]
        dtypes = [value.dtype for value in values]
        sender = self.stages.of(source)
        channel = _channel(step, sender, self.stage)
        token = self.act(actions.recv, sender, channel, shapes, dtypes)
        self.received[step] = token, tuple(values)

    def arrived(self, step: Step) -> list[fx.Node]:
        """What a step gets from the chunk before it, once it is there."""
        if step not in self.received:
            return self.passed.pop(step, [])
        token, values = self.received.pop(step)
        done = self.act(actions.wait, token, val=values)
        return [self._pick(done, index) for index in range(len(values))]

    def release(self, step: Step) -> None:
        """Wait for the sends that must be over before a step."""
        for sent in self.waits.get(step, ()):
            if sent in self.sent:
                self.act(actions.wait, self.sent.pop(sent))

    def pass_on(self, step: Step, results: fx.Node, count: int) -> None:
        """Hand the first `count` results of a step to the chunk that reads them."""
        reader = receiver(step, len(self.variant.chunks))
        if not count or reader is None:
            return
        values = [self._pick(results, index) for index in range(count)]
        stage = self.stages.of(reader.chunk)
        if stage == self.stage:
            self.passed[reader] = values
        else:
            channel = _channel(step, self.stage, stage)
            self.sent[step] = self.act(actions.send, values, stage, channel)

    def finish(self) -> None:
        """Wait for the sends that are left."""
        for token in self.sent.values():
            self.act(actions.wait, token)

    def _source(self, step: Step) -> tuple[int, list[Key]]:
        """The chunk that a step gets values from, and which."""
        chunk = self.variant.chunks[step.chunk]
        if step.kind == "forward":
            return chunk.index - 1, chunk.received
        return chunk.index + 1, chunk.received_gradients if step.kind == "backward" else []

    def _pick(self, node: fx.Node, index: int) -> fx.Node:
        return self.act(operator.getitem, node, index, val=node.meta["val"][index])


def _channel(step: Step, sender: int, reader: int) -> str:
    """Activations and gradients go apart: stages may send both to the same neighbour."""
    kind = "" if step.kind == "forward" else " gradients"
    return f"pp:{sender}>{reader}{kind}"
