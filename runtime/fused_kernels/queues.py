"""What fused kernels need of a device: two queues per rank, of computation and of copies.

Each queue runs in order. The main one computes; the other copies beside it. Nothing here waits on
the host: a call puts work into queues and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from msc.codegen.kernels.description import Kernel


class Queues(Protocol):
    """The queues of one rank of a group; `position`: its place among the members."""

    @property
    def position(self) -> int:
        """Its place among the members of the group."""

    def write(self, destination: Tensor, source: Tensor) -> None:
        """Main queue: copy inside this rank's memory."""

    def tell(self, flags: Tensor, index: int, value: int) -> None:
        """Main queue: `flags[index] = value`, of any rank, seen after all before it."""

    def follow(self) -> None:
        """Copies from here on come after all that the main queue has by now."""

    def wait(self, flags: Tensor, index: int, value: int) -> None:
        """Copies from here on come when `flags[index]`, of this rank, is `value` or more."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Beside the main queue: copy, from the memory of another rank."""

    def raise_flag(self, flags: Tensor, index: int, value: int) -> None:
        """Beside the main queue: `flags[index] = value`, seen after all copies before it."""

    def launch(self, kernel: Kernel, values: Mapping[str, Any]) -> None:
        """Main queue: run a kernel."""

    def join(self) -> None:
        """What comes on the main queue from here on comes after all copies so far."""


Together = Callable[[], AbstractContextManager[Sequence[Queues]]]
"""Begins a call of the ranks that this process runs: their queues, in order of position. When the
block ends, what the caller does next comes after all that was put into them."""


@dataclass(frozen=True)
class Connection:
    """What the ranks of a group have in common: `parts[rank]` are bytes of a rank, zeroed, that all
    ranks reach; `together` begins a call."""

    parts: Sequence[Tensor]
    together: Together
