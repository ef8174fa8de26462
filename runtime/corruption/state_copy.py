"""A copy of a rank's state, to undo the step that follows."""

from __future__ import annotations

from torch import Tensor

from msc.runtime.state import RankState


class StateCopy:
    """Holds one copy, in memory that is used again."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Tensor]] = [{}, {}, {}]
        self._step = 0
        self._skipped: Tensor | None = None

    def keep(self, state: RankState) -> None:
        """Copy the state as it is."""
        for kept, values in zip(self._kept, _parts(state), strict=True):
            for name in kept.keys() - values.keys():
                del kept[name]
            for name, value in values.items():
                if name in kept:
                    kept[name].copy_(value)
                else:
                    kept[name] = value.clone()
        self._step, self._skipped = state.step, state.skipped.clone()

    def restore(self, state: RankState) -> None:
        """Make the state what it was, in its own memory."""
        assert self._skipped is not None, "nothing was kept"
        for kept, values in zip(self._kept, _parts(state), strict=True):
            for name in values.keys() - kept.keys():
                del values[name]  # moments that the step has made
            for name, value in kept.items():
                values[name].copy_(value)
        state.step, state.skipped = self._step, self._skipped.clone()


def _parts(state: RankState) -> tuple[dict[str, Tensor], ...]:
    return state.parameters, state.moments, state.buffers
