"""A weak memory: what a program stored is not yet seen by others, what it loads may be old.

Stores wait in the program's own buffer. They become visible one by one, in any order, or all of
them before a release. A load of what another program has overwritten since the reader's last
acquire may still give the old value. Tensor descriptors (the TMA unit, PTX's async proxy) have
rules of their own: their loads see what was acquired only after a proxy fence, and a release covers
their stores only after a full bulk wait. Weaker than PTX allows in places (a program may see a new
value and then the old one again), never stronger at the level of programs.

PTX ISA 8.7, "Memory consistency model"; Sewell et al., "x86-TSO", CACM 2010, for the store buffer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Write:
    """Elements that one store writes; `bulk`: it went through the TMA unit."""

    addresses: NDArray[np.uint64]
    values: Array
    bulk: bool

    def overlaps(self, low: int, high: int) -> bool:
        """Whether it may touch an address from `low` to `high`."""
        return bool(self.addresses.size) and (
            int(self.addresses.min()) <= high and low <= int(self.addresses.max())
        )


@dataclass
class View:
    """What one program has not yet published, and up to when it sees what others did.

    seen, seen_bulk: the time of the last acquire, for its own loads and for the TMA unit's.
    """

    seen: int = -1
    seen_bulk: int = -1
    pending: list[Write] = field(default_factory=list)


@dataclass
class _Overwritten:
    """Values that were lost to a store, sorted by address."""

    time: int
    owner: View
    low: int
    high: int
    addresses: NDArray[np.uint64]
    values: Array


class Memory:
    """All memory. `read` and `write` reach the real one; `version` counts changes to it."""

    def __init__(
        self,
        rng: random.Random,
        read: Callable[[Array, np.dtype[Any]], Array],
        write: Callable[[Array, Array], None],
    ) -> None:
        self._rng = rng
        self._read, self._write = read, write
        # how soon stores become visible by themselves differs between schedules
        self._drain_chance = rng.choice([0.0, 0.02, 0.15])
        self._stale_chance = 0.5
        self._time = 0
        self._lost: list[_Overwritten] = []
        self.version = 0

    def load(
        self, view: View, addresses: Array, mask: Array, fresh: Callable[[], Array], bulk: bool
    ) -> Array:
        """`fresh()` (what memory has), with some elements as they were before others' stores."""
        used = addresses[mask]
        if not used.size:
            return fresh()
        low, high = int(used.min()), int(used.max())
        for write in [w for w in view.pending if w.overlaps(low, high)]:
            self._commit(view, write)
        result = fresh()
        horizon = view.seen_bulk if bulk else view.seen
        for lost in reversed(self._lost):
            if lost.time <= horizon:
                break
            if lost.owner is view or lost.high < low or high < lost.low:
                continue
            if self._rng.random() < self._stale_chance:
                result = _with_old(result, addresses, mask, lost)
        return result

    def store(self, view: View, addresses: Array, values: Array, mask: Array, bulk: bool) -> None:
        """Puts the store into the program's buffer."""
        addresses = np.broadcast_to(addresses, values.shape)
        mask = np.broadcast_to(mask, values.shape)
        view.pending.append(Write(addresses[mask].copy(), values[mask].copy(), bulk))

    def release(self, view: View) -> None:
        """Publishes all that the program stored, but not what the TMA unit still holds."""
        for write in [w for w in view.pending if not w.bulk]:
            self._commit(view, write)

    def finish_bulk(self, view: View) -> None:
        """Waits until the TMA unit has written: `cp.async.bulk.wait_group 0` and a proxy fence."""
        for write in [w for w in view.pending if w.bulk]:
            self._commit(view, write)

    def acquire(self, view: View) -> None:
        """From here on the program's own loads see everything that has been published."""
        self._time += 1
        view.seen = self._time

    def fence_bulk(self, view: View) -> None:
        """From here on the TMA unit sees what the program has acquired."""
        view.seen_bulk = view.seen

    def begin(self, view: View) -> None:
        """A kernel starts: it sees everything that came before in its stream."""
        self.acquire(view)
        self.fence_bulk(view)

    def drain(self, view: View) -> None:
        """One buffered store of the program, drawn by chance, becomes visible."""
        self._commit(view, self._rng.choice(view.pending))

    def drain_by_chance(self, view: View) -> None:
        """The same, but most of the time nothing happens."""
        if view.pending and self._rng.random() < self._drain_chance:
            self.drain(view)

    def write_now(self, view: View, addresses: NDArray[np.uint64], values: Array) -> None:
        """A write of a copy engine: at once, but not ordered before anything else."""
        self._commit(view, Write(addresses, values, bulk=False))

    def _commit(self, view: View, write: Write) -> None:
        view.pending = [other for other in view.pending if other is not write]
        if not write.addresses.size:
            return
        order = np.argsort(write.addresses, kind="stable")
        addresses = write.addresses[order]
        old = self._read(addresses, write.values.dtype)
        self._time += 1
        low, high = int(addresses[0]), int(addresses[-1])
        self._lost.append(_Overwritten(self._time, view, low, high, addresses, old))
        self._write(write.addresses, write.values)
        self.version += 1


def _with_old(result: Array, addresses: Array, mask: Array, lost: _Overwritten) -> Array:
    flat = np.ascontiguousarray(addresses).ravel()
    place = np.searchsorted(lost.addresses, flat)
    place[place == lost.addresses.size] = 0
    hit = (lost.addresses[place] == flat) & np.ascontiguousarray(mask).ravel()
    if not hit.any() or lost.values.dtype.itemsize != result.dtype.itemsize:
        return result
    values = result.ravel().copy()
    values[hit] = lost.values[place[hit]].view(result.dtype)
    return values.reshape(result.shape)
