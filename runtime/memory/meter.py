"""Counts the bytes of storages that are alive while torch computes.

    with StorageMeter(inputs) as meter:
        executor.run(inputs)
    meter.peak

A storage counts from the operation that first returns it until nothing holds it any more, however
many tensors are views of it. What an operation allocates in C++ only for itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from msc.ir.torch_private import TorchDispatchMode


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks storages while it is entered; `held` are counted from the start.

    live, peak: bytes now, and the most there were.
    """

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in held:
            self._track(tensor)
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._track(leaf)
        self.peak = max(self.peak, self.live)
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number = id(storage)  # torch keeps one Python object for a storage as long as it lives
        if number in self._known:
            return
        size = storage.nbytes()

        def end(_: object) -> None:
            self.live -= size
            del self._known[number]

        self._known[number] = weakref.ref(storage, end)
        self.live += size
