"""What stages send to each other, and when a sender may take its buffers back.

    stage 0   F0 send  F1 send  wait(F0) F2 send ..      a send is waited for at the first step that
    stage 1            F0       F1            F2         starts later than the step that receives it

In the time in which the orders were made, that wait is over when it comes. So no order of waits can
end in a ring: along each of them, and from each step to those that need it, that time grows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msc.passes.schedules.stages import Stages, Step


def receiver(step: Step, num_chunks: int) -> Step | None:
    """The step that reads what a step passes on to another chunk."""
    if step.kind == "forward" and step.chunk + 1 < num_chunks:
        return Step("forward", step.micro_batch, step.chunk + 1)
    if step.kind == "backward" and step.chunk:
        return Step("backward", step.micro_batch, step.chunk - 1)
    return None


def releases(
    order: Sequence[Step], stages: Stages, starts: Mapping[Step, float]
) -> dict[Step, list[Step]]:
    """For a step of one stage's `order`, the sends, by the steps that made them, to wait for first.

    starts: of all steps of all stages. A send that is in no list is waited for at the step's end.
    """
    found: dict[Step, list[Step]] = defaultdict(list)
    pending: list[Step] = []
    for step in order:
        arrived = [s for s in pending if starts[_reader(s, stages)] < starts[step]]
        if arrived:
            found[step] = arrived
            pending = [sent for sent in pending if sent not in arrived]
        reader = receiver(step, stages.num_chunks)
        if reader is not None and stages.of(reader.chunk) != stages.of(step.chunk):
            pending.append(step)
    return dict(found)


def _reader(step: Step, stages: Stages) -> Step:
    reader = receiver(step, stages.num_chunks)
    assert reader is not None  # only what is sent is pending
    return reader
