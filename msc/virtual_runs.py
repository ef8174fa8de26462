"""What runs all ranks of a program on one device, and the kernels that are chosen for it there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import fx

from msc.codegen.devices import on_device
from msc.codegen.kernel_calls.choice import KernelChoice, choose
from msc.cost.measurements import Measurements
from msc.ir.flags import TRITON
from msc.ir.mesh import Mesh
from msc.runtime.fused_kernels.cuda import virtual_together
from msc.runtime.fused_kernels.queues import Together
from msc.runtime.fused_kernels.virtual import VirtualKernels
from msc.runtime.virtual import VirtualExecutor


class VirtualRuns:
    """Choices and executors by device, each made when it is first asked for.

    class_of: the index in `rank_graphs` of a rank's graph. measured: what `msc tune` found.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank_graphs: Sequence[fx.GraphModule],
        class_of: Callable[[int], int],
        measured: Measurements | None,
    ) -> None:
        self._mesh = mesh
        self._rank_graphs = rank_graphs
        self._class_of = class_of
        self._measured = measured
        self._choices: dict[tuple[str, bool, str], KernelChoice] = {}
        self._executors: dict[tuple[torch.device, str], VirtualExecutor] = {}

    def choice(self, device: str, shared: bool = False) -> KernelChoice:
        """The kernels for a device, those of explanations and of virtual ranks: it knows failures.

        shared: a CUDA device that all ranks of a group run on.
        """
        key = (device, shared, TRITON.text)
        if key not in self._choices:
            unfused = _without_coroutines() if device == "cpu" else ""
            self._choices[key] = choose(
                torch.device(device),
                self._rank_graphs,
                self._measured,
                shared=shared,
                unfused=unfused,
            )
        return self._choices[key]

    def executor(self, device: torch.device) -> VirtualExecutor:
        """What runs all ranks on one device, in the kernels that are chosen for it."""
        choice = self.choice(device.type, shared=device.type == "cuda")
        key = (device, TRITON.text)
        if key not in self._executors:
            graphs = self._rank_graphs
            if device.type != "cpu":
                graphs = [on_device(graph, device) for graph in graphs]
            kernels = None
            if choice.has_fused:
                kernels = VirtualKernels(choice, device, _together_on(device))
            self._executors[key] = VirtualExecutor(
                self._mesh,
                lambda rank: graphs[self._class_of(rank)],
                choice=choice,
                kernels=kernels,
            )
        return self._executors[key]


def _together_on(device: torch.device) -> Callable[[int], Together]:
    """What runs the fused kernels of several ranks on one device."""
    if device.type == "cuda":
        return virtual_together
    # what interprets kernels of several ranks is loaded only where that is asked for
    from msc.testing.interpreter.queues import interpreted_together

    return interpreted_together


def _without_coroutines() -> str:
    """Why the kernels of several ranks cannot run together in the interpreter, or ""."""
    if importlib.util.find_spec("greenlet") is not None:
        return ""
    return (
        "in the interpreter ranks run their kernels in turns, in coroutines of greenlet, which is "
        "not installed (pip install greenlet)"
    )
