"""A product and what follows it: in the library's call and passes over memory, or in one kernel.

The kernel saves the passes; its product runs at the cluster's `fused_gemm_rate` of the library's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from msc.cost.cluster import Cluster
from msc.cost.flops import call_flops, nbytes
from msc.cost.roofline import Work
from msc.ir.ops.epilogue import LINEAR_EPILOGUE
from msc.ir.ops.gate import LINEAR_GATED
from msc.ir.ops.library import arguments
from msc.ir.values import operand_nodes, tensor_of, tensors_of

IN_KERNEL = "in_kernel"
"""The mark of a call that its kernel is better at, by the cluster file."""

EPILOGUES = (LINEAR_EPILOGUE, LINEAR_GATED)


def epilogue_work(node: fx.Node) -> Work:
    """Of a node of `EPILOGUES`, in the form that its mark says."""
    return _in_kernel(node) if node.meta.get("marks", {}).get(IN_KERNEL) else _in_library(node)


def kernel_gain(node: fx.Node, cluster: Cluster) -> tuple[float, float]:
    """(seconds that the kernel saves in passes over memory, those that its product takes more)."""
    library, kernel = _in_library(node), _in_kernel(node)
    product = replace(library, passes=())
    saved = library.seconds(cluster) - product.seconds(cluster)
    return saved, kernel.seconds(cluster) - product.seconds(cluster)


def _in_kernel(node: fx.Node) -> Work:
    moved = [*map(tensor_of, operand_nodes(node)), *tensors_of(node)]
    return replace(_product(node), memory_bytes=sum(map(nbytes, moved)), emitted=True)


def _in_library(node: fx.Node) -> Work:
    found: dict[str, Any] = arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    out = nbytes(tensors_of(node)[0])
    if node.target is LINEAR_GATED:
        return replace(_product(node), passes=(3 * out,))
    passes = [2 * out] if found["activation"] else []
    if found["residual"] is not None:
        passes.append(3 * out)
    return replace(_product(node), passes=tuple(passes))


def _product(node: fx.Node) -> Work:
    """Of the products alone, with a bias."""
    found: dict[str, Any] = arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    operands = [found[name] for name in ("x", "w", "b", "up") if found.get(name) is not None]
    tensors = [tensor_of(operand) for operand in operands]
    out = tensors_of(node)[0]
    written = (2 if node.target is LINEAR_GATED else 1) * nbytes(out)
    flops = call_flops(node.target, tensors, [out])
    return Work(flops, tensors[0].dtype, sum(map(nbytes, tensors)) + written)
