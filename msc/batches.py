"""Where a rank's rows come from: an iterable of global batches, or rows asked for by number."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from msc.capture.inputs import InputInfo
from msc.ir import actions
from msc.ir.errors import InputError
from msc.ir.layout import InputLayout
from msc.program import Program


@runtime_checkable
class RowSource(Protocol):
    """Data that gives any rows of any step, so that a rank reads its own alone."""

    def rows(self, step: int, indices: Sequence[int]) -> Any:
        """Rows `indices` of the global batch of `step` (from 0), as a batch of that many rows."""

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to give the same rows after a restart."""


Data = RowSource | Iterable[Any]


class Loading(Mapping[str, Callable[[], Tensor]]):
    """Inputs that are loaded when the first of them is asked for (`msc.ir.actions.arrived`)."""

    def __init__(self, names: Iterable[str], load: Callable[[], Mapping[str, Tensor]]) -> None:
        self._names = tuple(names)
        self._load = functools.cache(load)

    def __getitem__(self, name: str) -> Callable[[], Tensor]:
        return lambda: self._load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Batches:
    """One rank's inputs, step after step.

    Every rank must be given the same data. From an iterable each rank takes its part of every
    global batch; of a `RowSource` it asks its own rows only, and none if its stage reads none.
    """

    def __init__(self, program: Program, rank: int, data: Data, device: torch.device) -> None:
        if not isinstance(data, (RowSource, Iterable)):
            raise InputError(
                f"data has type {type(data).__name__}; it is an iterable of global batches, or an "
                "object with rows(step, indices) and state_dict()."
            )
        self._program = program
        self._rank = rank
        self._data = data
        self._device = device
        self._iterator: Iterator[Any] | None = None
        self._taken = 0
        graph = program.rank_graph(rank).graph
        given = graph.find_nodes(op="placeholder")
        self._wanted = {node.meta["name"] for node in given if node.meta["kind"] == "input"}
        arrived = graph.find_nodes(op="call_function", target=actions.arrived)
        self._may_load_later = bool(arrived)

    def while_gathering(self, load: Callable[[], dict[str, Tensor]]) -> Mapping[str, Any]:
        """The inputs that `load` gives, loaded inside of the step if its program can wait for them.

        That is if it begins with gathers of parameters, which run meanwhile.
        """
        if self._may_load_later:
            return Loading(self._wanted, load)
        return load()

    def position(self) -> Any:
        """What the data's `state_dict` says, as JSON has it; None for data that has none."""
        state_dict = getattr(self._data, "state_dict", None)
        if state_dict is None:
            return None
        state = state_dict()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The state_dict() of the data has no JSON ({error}), and a checkpoint holds the "
                "data's position as JSON. Let it give numbers, strings, lists and dicts."
            ) from error

    def seek(self, step: int, position: Any) -> None:
        """Go to where `step` steps were taken; `position` is what `position` said there.

        Data with `load_state_dict` is given it. Other rows are asked for by step, so their
        `state_dict` must be as it was; of an iterable the batches of those steps are dropped.
        """
        load = getattr(self._data, "load_state_dict", None)
        if load is not None and position is not None:
            load(position)
        elif self.endless or position is not None:
            here = self.position()
            if here != position:
                raise InputError(
                    f"The data differs from that of the checkpoint: its state_dict() is {here}, "
                    f"and was {position}. Pass the same data, or save into another folder."
                )
        if load is None and not self.endless:
            for _ in range(step):
                if self._iterator is None:
                    self._iterator = iter(self._data)  # type: ignore[arg-type]
                if next(self._iterator, None) is None:
                    raise InputError(
                        f"The data ended at step {self._taken}, and the checkpoint is of step "
                        f"{step}. Pass the same data from its start."
                    )
                self._taken += 1

    @property
    def can_rewind(self) -> bool:
        """Whether the data can be gone through again: not so what is an iterator itself."""
        return isinstance(self._data, RowSource) or not isinstance(self._data, Iterator)

    def rewind(self) -> None:
        """Go back to where no step was taken, for `seek` to go on from there."""
        self._iterator = None
        self._taken = 0

    @property
    def endless(self) -> bool:
        """Whether the data has no end of its own."""
        return isinstance(self._data, RowSource)

    def next(self, step: int) -> dict[str, Tensor] | None:
        """The rank's inputs of `step`; None if the data has ended."""
        if isinstance(self._data, RowSource):
            return self._rows(self._data, step) if self._wanted else {}
        if self._iterator is None:
            self._iterator = iter(self._data)
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        self._taken += 1
        return self._move(self._program.local_inputs(batch, self._rank))

    def need(self, step: int, last: int) -> dict[str, Tensor]:
        """As `next`, where the data must go on; `last` is the last step that was asked for."""
        found = self.next(step)
        if found is None:
            raise InputError(
                f"The data ended at step {step}: it had {self._taken} batches, and training was to "
                f"go on to step {last}. Pass an iterable with a batch for every step, such as "
                "itertools.cycle(batches), or fit fewer steps."
            )
        return found

    def _rows(self, data: RowSource, step: int) -> dict[str, Tensor]:
        program, rank = self._program, self._rank
        indices = batch_rows(program, rank)
        parts = [_with_rows(layout, len(indices)) for layout in program.inputs]
        batch = data.rows(step, indices)
        supply = iter(parts)
        spec = program.input_spec
        leaves = tuple(
            dataclasses.replace(leaf, shape=next(supply).shape)
            if isinstance(leaf, InputInfo)
            else leaf
            for leaf in spec.leaves
        )
        try:
            tensors = dataclasses.replace(spec, leaves=leaves).flatten(batch)
        except InputError as error:
            error.add_note(f"in what rows({step}, {len(indices)} indices) gave to rank {rank}")
            raise
        tensors = program.cast(tensors)
        return self._move({p.name: t for p, t in zip(parts, tensors, strict=True)})

    def _move(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.to(self._device) for n, t in inputs.items() if n in self._wanted}


def batch_rows(program: Program, rank: int) -> list[int]:
    """The rows of the global batch that `rank` works on, micro-batch after micro-batch."""
    size = next(i.shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None)
    rows = InputLayout("rows", (size,), torch.int64, 0)
    return rows.local(torch.arange(size), program.mesh, rank, program.micro_batches).tolist()


def _with_rows(layout: InputLayout, count: int) -> InputLayout:
    if layout.batch_dim is None:
        return layout
    shape = list(layout.shape)
    shape[layout.batch_dim] = count
    return dataclasses.replace(layout, shape=tuple(shape))


def samples_and_tokens(program: Program) -> tuple[int, int | None]:
    """Samples in a global batch, and tokens if its first input is a batch of sequences."""
    first = next(i for i in program.inputs if i.batch_dim is not None)
    assert first.batch_dim is not None
    samples = first.shape[first.batch_dim]
    if first.dtype.is_floating_point or len(first.shape) < 2:
        return samples, None
    return samples, first.shape[0] * first.shape[1]
