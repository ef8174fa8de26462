"""What is usual of a rank or a port, learned window by window, and whether it still is so."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOWS = 32  # that a band is learned from
_LEARN = 8  # of them, at least
_WIDE = 1.5  # the band: this much more or less than the median
_IN_A_ROW = 2  # windows out of the band before it is told


class Band:
    """Learns a value that should stay, and says when it does not."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_WINDOWS)
        self._out = 0
        self._fresh = 0  # values since the median was taken
        self.usual: float | None = None
        self.told = False

    def look(self, value: float) -> str:
        """ "" for nothing new, what is wrong when that begins, or "again" when it has ended."""
        usual = self.usual
        if usual is not None and not usual / _WIDE <= value <= usual * _WIDE:
            self._out += 1  # not learned: the band is of what is usual
            if self._out == _IN_A_ROW and not self.told:
                self.told = True
                return f"{value:.4g}, usually {usual:.4g}"
            return ""
        self._out = 0
        self._seen.append(value)
        self._fresh += 1
        if self._fresh == _LEARN:
            self._fresh = 0
            self.usual = statistics.median(self._seen)
        if self.told:
            self.told = False
            return "again"
        return ""


class Traffic:
    """Learns how many communications a rank starts in a step on each axis, which its program says.

    So they are the same in every step, to the last one.
    """

    def __init__(self) -> None:
        self._usual: dict[str, float] = {}
        self._same = 0
        self._out = 0
        self.told = False

    def look(self, counts: dict[str, float]) -> str:
        """As of a `Band`."""
        if counts == self._usual:
            self._same += 1
            self._out = 0
            if self.told:
                self.told = False
                return "again"
            return ""
        if self._same < _LEARN:
            self._usual, self._same = counts, 0
            return ""
        self._out += 1
        if self._out != _IN_A_ROW or self.told:
            return ""
        self.told = True
        axes = [axis for axis in counts if counts[axis] != self._usual.get(axis, 0.0)]
        return ", ".join(
            f"{axis} {counts[axis]:.4g}, usually {self._usual.get(axis, 0.0):.4g}" for axis in axes
        )
