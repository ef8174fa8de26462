"""Forward graphs as a pass sees them: captured, normalized, with random values to run them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from msc.capture.entry import capture
from msc.ir.structure import placeholders
from msc.ir.values import tensor_of
from msc.passes.normalize import normalize


def forward_graph(
    model: nn.Module,
    inputs: tuple[Any, ...] | dict[str, Any],
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = torch.float64,
    batch_dims: Mapping[str, int | None] | None = None,
) -> fx.GraphModule:
    """The forward graph of a model's loss after normalization: where a user's pass may stand.

    Captured in float64, so that rewrites are compared exactly. Input placeholders say their
    `batch_dim`, parameters whether they `requires_grad`.
    """
    captured = capture(model, inputs, loss_fn=loss_fn, dtype=dtype, batch_dims=batch_dims)
    normalize(captured.graph)
    dims = {info.name: info.batch_dim for info in captured.inputs}
    for node in placeholders(captured.graph):
        if node.meta["kind"] == "parameter":
            node.meta["requires_grad"] = captured.parameters[node.meta["name"]].requires_grad
        elif node.meta["kind"] == "input":
            node.meta["batch_dim"] = dims[node.meta["name"]]
    return captured.graph


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph with nodes and metadata of its own; types and submodules are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    copied = fx.GraphModule(gm, graph, type(gm).__name__)
    copied.meta = dict(gm.meta)
    return copied


def random_values(gm: fx.GraphModule, seed: int = 0) -> dict[fx.Node, Tensor]:
    """A value for every placeholder of its type: normal numbers, bits, or ids that are in range.

    Ids are smaller than every table and number of classes in the graph.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = _smallest_range(gm)
    values = {}
    for node in placeholders(gm):
        like = tensor_of(node)
        shape = tuple(like.shape)
        if node.meta.get("kind") == "rng":
            values[node] = torch.tensor([seed, 0], dtype=like.dtype)
        elif like.dtype == torch.bool:
            values[node] = torch.rand(shape, generator=generator) < 0.7
        elif like.is_floating_point():
            values[node] = torch.randn(shape, generator=generator, dtype=torch.float64)
            values[node] = (0.5 * values[node]).to(like.dtype)
        else:
            values[node] = torch.randint(limit, shape, generator=generator, dtype=like.dtype)
    return values


def _smallest_range(gm: fx.GraphModule) -> int:
    """The smallest number of rows of a table or of classes that ids in the graph may index."""
    found = [2**15]
    for node in gm.graph.nodes:
        if node.target is torch.ops.msc.embedding.default:
            found.append(tensor_of(node.args[1]).shape[0])
        elif node.target is torch.ops.msc.nll_terms.default:
            found.append(tensor_of(node.args[0]).shape[-1])
    return min(found)
