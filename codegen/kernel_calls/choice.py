"""Which calls of a program run in kernels, and why: from shapes, dtypes and the target alone.

Every op that has kernels is looked at, whether it gets one or not; ops without kernels (views,
pointwise ops, embeddings) are none of it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from msc.codegen.fast_calls import function_of
from msc.codegen.kernel_calls.attention import attention, attention_backward
from msc.codegen.kernel_calls.call import KernelCall, Plan
from msc.codegen.kernel_calls.cross_entropy import nll_terms, nll_terms_backward
from msc.codegen.kernel_calls.device import Kernels, kernels_on
from msc.codegen.kernel_calls.dropout import dropout
from msc.codegen.kernel_calls.epilogue import linear_epilogue
from msc.codegen.kernel_calls.fused_collectives import (
    FusedCall,
    GatherPlan,
    ScatterPlan,
    gather_plan,
    scatter_plan,
)
from msc.codegen.kernel_calls.gate import (
    gated,
    gated_backward,
    linear_gated,
    linear_then_gate,
)
from msc.codegen.kernel_calls.linear import linear, linear_dgrad, linear_wgrad
from msc.codegen.kernel_calls.linear_cross_entropy import (
    linear_nll_terms,
    linear_nll_terms_backward,
)
from msc.codegen.kernel_calls.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    layer_norm_backward_add,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_add,
)
from msc.codegen.kernel_calls.optimizer import adam, lamb, lamb_sums
from msc.codegen.kernels.description import Kernel, Target, Tiles
from msc.codegen.kernels.tiles import product_space
from msc.cost.epilogue import IN_KERNEL
from msc.cost.measurements import ATEN, Measurements
from msc.ir import actions
from msc.ir.communication import graphs_below
from msc.ir.errors import PlanError
from msc.ir.ops.attention import ATTENTION, ATTENTION_BACKWARD
from msc.ir.ops.epilogue import LINEAR_EPILOGUE
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.ir.ops.gate import GATED, GATED_BACKWARD, LINEAR_GATED
from msc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD
from msc.ir.ops.linear_loss import LINEAR_NLL_TERMS, LINEAR_NLL_TERMS_BACKWARD
from msc.ir.ops.loss import NLL_TERMS, NLL_TERMS_BACKWARD
from msc.ir.ops.norm import RMS_NORM, RMS_NORM_BACKWARD
from msc.ir.ops.norm_sum import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    LAYER_NORM_BACKWARD_ADD,
    RMS_NORM_BACKWARD_ADD,
)
from msc.ir.ops.random import DROPOUT
from msc.ir.words import counted

aten = torch.ops.aten


@dataclass(frozen=True)
class OpKernels:
    """An op that has kernels.

    maker: `maker(target, *args, **kwargs)` says how they compute a call, or raises `PlanError` with
    the reason why not. why: what they are better at. library: why the library of CUDA is preferred
    to them, where it is, unless the cluster file says otherwise (`IN_KERNEL`). beside: the maker
    of what then runs beside the library, if anything does. tiled: its maker takes `tiles`, of
    `product_space`.
    """

    maker: Callable[..., Plan]
    why: str
    library: str = ""
    beside: Callable[..., Plan] | None = None
    tiled: bool = False


_PRODUCT = (
    "product, bias and sum, where there are any, in one pass",
    "cuBLAS does it all in one call, and no kernel has been seen to beat it",
)
_EPILOGUE = (
    "what follows the product is done before its tiles leave the processor",
    "cuBLAS, then a pass over memory: no cluster file says that this pass costs more than what a "
    "kernel's product is slower",
)
_GATE = "one pass over memory"
_ATTENTION = "the scores are never in memory"
_NORM = "statistics and result in one pass over the rows"
_NORM_SUM = "sum, statistics and result in one pass over the rows"
_LOSS = "no exponentials in memory"
_HEAD = "no logits in memory, and the gradients of a part at a time"
_STEP = "all tensors in one launch; gradients are scaled and cast as they are read"

OPS: dict[Any, OpKernels] = {
    LINEAR: OpKernels(linear, *_PRODUCT, tiled=True),
    LINEAR_DGRAD: OpKernels(linear_dgrad, *_PRODUCT, tiled=True),
    LINEAR_WGRAD: OpKernels(linear_wgrad, *_PRODUCT, tiled=True),
    LINEAR_EPILOGUE: OpKernels(linear_epilogue, *_EPILOGUE, tiled=True),
    LINEAR_GATED: OpKernels(linear_gated, *_EPILOGUE, linear_then_gate, tiled=True),
    GATED: OpKernels(gated, _GATE),
    GATED_BACKWARD: OpKernels(gated_backward, _GATE),
    ATTENTION: OpKernels(attention, _ATTENTION),
    ATTENTION_BACKWARD: OpKernels(attention_backward, _ATTENTION),
    aten.native_layer_norm.default: OpKernels(layer_norm, _NORM),
    aten.native_layer_norm_backward.default: OpKernels(layer_norm_backward, _NORM),
    RMS_NORM: OpKernels(rms_norm, _NORM),
    RMS_NORM_BACKWARD: OpKernels(rms_norm_backward, _NORM),
    ADD_LAYER_NORM: OpKernels(add_layer_norm, _NORM_SUM),
    LAYER_NORM_BACKWARD_ADD: OpKernels(layer_norm_backward_add, _NORM_SUM),
    ADD_RMS_NORM: OpKernels(add_rms_norm, _NORM_SUM),
    RMS_NORM_BACKWARD_ADD: OpKernels(rms_norm_backward_add, _NORM_SUM),
    NLL_TERMS: OpKernels(nll_terms, _LOSS),
    NLL_TERMS_BACKWARD: OpKernels(nll_terms_backward, _LOSS),
    LINEAR_NLL_TERMS: OpKernels(linear_nll_terms, _HEAD),
    LINEAR_NLL_TERMS_BACKWARD: OpKernels(linear_nll_terms_backward, _HEAD),
    DROPOUT: OpKernels(dropout, "the bits of an element are made where it is read"),
    actions.adam: OpKernels(adam, _STEP),
    actions.lamb_sums: OpKernels(lamb_sums, _STEP),
    actions.lamb: OpKernels(lamb, _STEP),
}

FUSED_OPS: dict[Any, tuple[Callable[..., GatherPlan | ScatterPlan], str]] = {
    ALL_GATHER_MATMUL: (gather_plan, "a tile starts when the rows that it reads are there"),
    MATMUL_REDUCE_SCATTER: (scatter_plan, "a tile goes to the rank that owns it when it is made"),
}
"""What they are better at, and `maker(kernels, *args)`, which is told of the executor too."""

_BETWEEN_PROCESSES = "; between processes on the CPU in ATen, which multiplies in shared memory"


@dataclass(frozen=True)
class Decision:
    """What became of equal calls of an op: of the same shapes and dtypes.

    where: " in " and the first one's module path, if it has one. calls: in the distinct graphs.
    kernels: names; none where ATen computes it. slower: there are kernels, and ATen was measured
    to be faster.
    """

    op: str
    where: str
    calls: int
    kernels: tuple[str, ...]
    reason: str
    slower: bool = False

    def __str__(self) -> str:
        by = f"Triton, {', '.join(self.kernels)}" if self.kernels else "ATen"
        more = f" and {counted(self.calls - 1, 'more call')}" if self.calls > 1 else ""
        return f"{self.op}{self.where}{more}: {by}: {self.reason}"


class _Entry:
    def __init__(
        self,
        op: str,
        where: str,
        call: KernelCall | FusedCall | None,
        reason: str,
        slower: bool = False,
    ) -> None:
        self.op = op
        self.where = where
        self.call = call
        self.reason = reason
        self.slower = slower
        self.measured = False
        self.nodes: dict[fx.Node, None] = {}


class KernelChoice:
    """The choice for each call of the graphs that are looked at, and the kernels it takes."""

    def __init__(self, kernels: Kernels, measured: Measurements | None = None) -> None:
        self.kernels = kernels
        self._measured = measured
        self._entries: dict[Any, _Entry] = {}

    def of(self, node: fx.Node) -> KernelCall | None:
        """What computes a call; None where it is ATen's, or a fused collective."""
        entry = self._entry(node)
        call = None if entry is None else entry.call
        return call if isinstance(call, KernelCall) else None

    def fused(self, node: fx.Node) -> FusedCall | None:
        """The kernels of a fused collective; None where it runs unfused."""
        entry = self._entry(node)
        call = None if entry is None else entry.call
        return call if isinstance(call, FusedCall) else None

    def fused_over(self, group: str) -> list[FusedCall]:
        """All of a group's, in the order in which they were chosen: of its members the same one."""
        calls = (entry.call for entry in self._entries.values())
        return [call for call in calls if isinstance(call, FusedCall) and call.group == group]

    def look_at(self, graphs: Iterable[fx.GraphModule]) -> KernelChoice:
        """Choose for every call of some rank graphs, and of the graphs that they call."""
        for rank_graph in graphs:
            for gm in graphs_below(rank_graph):
                for node in gm.graph.nodes:
                    self.of(node)
        return self

    @property
    def has_fused(self) -> bool:
        """Whether any fused collective has kernels."""
        return any(isinstance(entry.call, FusedCall) for entry in self._entries.values())

    @property
    def decisions(self) -> list[Decision]:
        """All of them, in the order in which they were made."""
        found: list[Decision] = []
        for entry in self._entries.values():
            call = entry.call
            failure = "" if call is None else call.failure
            names = () if call is None or failure else tuple(x.name for x in call.kernels)
            own = (entry.op, entry.where, len(entry.nodes), names, failure or entry.reason)
            found.append(Decision(*own, entry.slower))
        return found

    @property
    def lines(self) -> tuple[str, ...]:
        """All decisions as text, or why there is nothing to decide."""
        if self.kernels.target is None:
            return (f"ATen computes every op: {self.kernels.reason}",)
        place = f"Triton kernels on {self.kernels.target.name}: {self.kernels.reason}"
        notes = []
        if self._measured is not None and self._measured.device != self.kernels.device:
            notes.append(f"What was measured is of {self._measured.device}: it does not count here")
        elif self._measured is not None:
            known = sum(entry.measured for entry in self._entries.values())
            notes.append(f"{known} of {len(self._entries)} kinds of calls were measured here")
        return (place, *notes, *map(str, self.decisions))

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def sources(self) -> list[Kernel]:
        """The distinct kernels, by name and text: what is loaded to run."""
        found: dict[str, Kernel] = {}
        for entry in self._entries.values():
            for kernel in entry.call.kernels if entry.call is not None else ():
                found.setdefault(kernel.source, kernel)
        return sorted(found.values(), key=lambda kernel: (kernel.name, kernel.source))

    def _entry(self, node: fx.Node) -> _Entry | None:
        known = node.target in OPS or node.target in FUSED_OPS
        if node.op != "call_function" or not known or self.kernels.target is None:
            return None
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
        key = (node.target, _described((args, kwargs)), _is_marked(node))
        if key not in self._entries:
            self._entries[key] = made = self._made(node, args, kwargs)
            made.measured = bool(self._measured_of(node))
        entry = self._entries[key]
        entry.nodes[node] = None
        return entry

    def _made(self, node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> _Entry:
        target: Any = node.target
        acts = target in actions.ACTIONS
        name = target.__name__ if acts else str(target).removesuffix(".default")
        path = node.meta.get("module_path")
        where = f" in {path}" if path else ""
        if target in FUSED_OPS:
            return self._made_fused(name, where, *FUSED_OPS[target], args)
        op, preferred = OPS[target], _is_marked(node)
        if measured := self._measured_of(node):
            way, why = _fastest(measured)
            if way == ATEN:
                return _Entry(name, where, None, why, slower=True)
        elif op.library and not self.kernels.everywhere and not preferred:
            way, why = BESIDE, op.library
            if op.beside is None:
                return _Entry(name, where, None, why)
        else:
            way, why = TRITON, op.why + "; by the cluster file it pays" * preferred
        try:
            assert self.kernels.target is not None
            plan = make_plan(self.kernels.target, target, way, args, kwargs)
        except PlanError as error:
            return _Entry(name, where, None, str(error))
        call = KernelCall(name, where, plan, _not_taken if acts else function_of(target))
        return _Entry(name, where, call, why)

    def _made_fused(
        self,
        name: str,
        where: str,
        maker: Callable[..., GatherPlan | ScatterPlan],
        why: str,
        args: Sequence[Any],
    ) -> _Entry:
        assert self.kernels.target is not None
        try:
            call = FusedCall(name, where, maker(self.kernels, *args), args[-1])
        except PlanError as error:
            return _Entry(name, where, None, str(error))
        more = _BETWEEN_PROCESSES if self.kernels.target.interpreted else ""
        return _Entry(name, where, call, why + more)

    def _measured_of(self, node: fx.Node) -> Mapping[str, float]:
        """The seconds of a call on this very kind of device, if `msc tune` measured it there."""
        measured = self._measured
        if measured is None or measured.device != self.kernels.device:
            return {}
        return measured.of(node)


def make_plan(target: Target, op: Any, way: str, args: Any, kwargs: Mapping[str, Any]) -> Plan:
    """How a call of `op`, a key of `OPS`, is computed in a way of `ways_of`.

    `PlanError` where there is no such way for these operands.
    """
    known = OPS[op]
    if way == BESIDE and known.beside is not None:
        return known.beside(target, *args, **kwargs)
    tiles = _tiles_of(way)
    return known.maker(target, *args, **kwargs, **({} if tiles is None else {"tiles": tiles}))


TRITON = "Triton"
"""The way of a call in kernels; with tiles behind it, in these."""
BESIDE = "ATen and Triton"
"""The way of a call whose product is the library's, and what follows it a kernel's."""


def ways_of(target: Target, op: Any) -> list[str]:
    """The ways in kernels that there may be for a call of `op`."""
    known = OPS[op]
    tiled = [f"{TRITON} {tiles}" for tiles in product_space(target)] if known.tiled else [TRITON]
    return tiled + [BESIDE] * (known.beside is not None)


def _tiles_of(way: str) -> Tiles | None:
    try:
        return None if way == TRITON else Tiles.parse(way.removeprefix(f"{TRITON} "))
    except ValueError as error:
        raise PlanError(f"It was measured as '{way}': {error}") from error


def _fastest(measured: Mapping[str, float]) -> tuple[str, str]:
    """The fastest way, and why it is taken."""
    best = min(measured, key=measured.__getitem__)
    others = [way for way in measured if (way == ATEN) != (best == ATEN)]
    text = f"measured: {_us(measured[best])}"
    if others:
        other = min(others, key=measured.__getitem__)
        text += f", {'ATen' if other == ATEN else 'kernels'} {_us(measured[other])}"
    return best, text


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us"


def _is_marked(node: fx.Node) -> bool:
    """Whether its kernels are worth it by the cluster file."""
    return bool(node.meta.get("marks", {}).get(IN_KERNEL))


def _not_taken(*args: Any, **kwargs: Any) -> None:
    """What an action's kernels return where they failed: the executor then takes the step."""


def _described(value: Any) -> Any:
    """A key in which tensors stand as shape and dtype."""
    leaves, spec = pytree.tree_flatten(value)
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
        for leaf in leaves
    )


def choose(
    device: torch.device,
    graphs: Iterable[fx.GraphModule],
    measured: Measurements | None = None,
    *,
    shared: bool = False,
    unfused: str = "",
) -> KernelChoice:
    """The choice for a device, with a warning where `MSC_TRITON` asks for what there is not.

    measured: what `msc tune` found; it counts on the device that it is of. shared, unfused: as of
    `Kernels`.
    """
    kernels = dataclasses.replace(kernels_on(device), shared=shared, unfused=unfused)
    choice = KernelChoice(kernels, measured).look_at(graphs)
    missing = _missing(choice)
    if missing:
        warnings.warn(missing, RuntimeWarning, stacklevel=2)
    return choice


def _missing(choice: KernelChoice) -> str:
    if not choice.kernels.asked:
        return ""
    if choice.kernels.target is None:
        return f"No Triton kernels are used: {choice.kernels.reason}."
    lines = [f"  {each}" for each in choice.decisions if not (each.kernels or each.slower)]
    return (
        "\n".join(["These calls have no Triton kernel and run in ATen:", *lines]) if lines else ""
    )
