"""Stage one of a save: a rank's state is copied into a slot while the next step begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from msc.ir.torch_private import copy_each_


class Snapshots:
    """Copies tensors in the background; `settle` must be called before they are written again.

    On CUDA the copies run on a stream of their own, behind what was issued when they began, and
    `settle` lets the device wait, not the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="msc-snapshot")
        self._copy: Future[None] | None = None
        self._then: Future[None] | None = None
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def begin(
        self, values: Sequence[Tensor], slots: Sequence[Tensor], then: Callable[[], None]
    ) -> None:
        """Copy `values` into `slots`; `then` runs in another thread when all is copied."""
        self.finish()
        copied = self._on_stream(values, slots) if self._stream is not None else None

        def copy() -> None:
            if copied is None:
                with torch.no_grad():
                    copy_each_(slots, values)
            else:
                copied.synchronize()

        self._copied = copied
        self._copy = self._thread.submit(copy)
        self._then = self._thread.submit(self._after, self._copy, then)

    @staticmethod
    def _after(copy: Future[None], then: Callable[[], None]) -> None:
        copy.result()
        then()

    def _on_stream(self, values: Sequence[Tensor], slots: Sequence[Tensor]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            for value, slot in zip(values, slots, strict=True):
                slot.copy_(value, non_blocking=True)
                if value.is_cuda:
                    value.record_stream(self._stream)
            copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return copied

    def settle(self) -> None:
        """Let nothing that comes after this write into tensors that are still being copied."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None
        elif self._stream is None and self._copy is not None:
            copy, self._copy = self._copy, None
            copy.result()

    def finish(self) -> None:
        """Wait until the copy, and what follows it, is done."""
        if self._then is not None:
            then, self._then = self._then, None
            then.result()
            self._copy = self._copied = None

    def close(self) -> None:
        """Finish, and end the thread."""
        self.finish()
        self._thread.shutdown()
