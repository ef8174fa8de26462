"""Hypothesis strategies for what a compiler pass must be right for: models, meshes, graphs.

@given(config=msc.testing.transformer_configs(), mesh=msc.testing.meshes(max_ranks=4))
def test_my_option(config, mesh):
    model = msc.testing.Transformer(config)
    batch = msc.testing.transformer_batch(config, samples=4)
    assert msc.verify(model, batch, mesh=mesh, dtype=torch.float64).ok
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from torch import fx

from msc.ir.mesh import KNOWN_AXES, Mesh
from msc.testing.graphs import forward_graph
from msc.testing.transformer import ACTIVATIONS, Transformer, TransformerConfig, transformer_batch

_EVEN = (4, 8, 16)
_ANY = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)


def transformer_configs(
    *, divisible: bool = False, dropout: bool = False, max_layers: int = 3
) -> st.SearchStrategy[TransformerConfig]:
    """Small configurations; with `divisible`, up to 4 tp ranks divide every dimension.

    `dropout` allows dropout in training mode. Shrinks towards one layer of small even sizes.
    """
    return _configs(divisible, dropout, max_layers)


@st.composite
def _configs(draw: st.DrawFn, divisible: bool, dropout: bool, max_layers: int) -> TransformerConfig:
    kv_heads = draw(st.sampled_from((4,) if divisible else (1, 2, 3, 4)))
    return TransformerConfig(
        vocabulary=draw(st.sampled_from(_EVEN if divisible else (8, 11, 13, 16, 18))),
        heads=kv_heads * draw(st.sampled_from((1, 2) if divisible else (1, 2, 3))),
        kv_heads=kv_heads,
        head_width=draw(st.sampled_from((2, 4, 6))),
        inner=draw(st.sampled_from(_EVEN if divisible else _ANY)),
        layers=draw(st.integers(1, max_layers)),
        length=draw(st.sampled_from(_EVEN if divisible else (1, 2, 3, 4, 6, 8))),
        norm=draw(st.sampled_from(("layer", "rms"))),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        gated=draw(st.booleans()),
        fused=draw(st.booleans()),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        positions=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.25))) if dropout else 0.0,
    )


def transformers(**options: Any) -> st.SearchStrategy[Transformer]:
    """Models of `transformer_configs(**options)`, with real parameters, in training mode."""
    return transformer_configs(**options).map(Transformer)


def meshes(max_ranks: int = 8, **limits: int) -> st.SearchStrategy[Mesh]:
    """Meshes of at most `max_ranks` ranks, with axes in any order; `pp=2` limits an axis' size.

    Axes of size 1 are sometimes named and sometimes left out. Shrinks towards one rank.
    """
    return _meshes(max_ranks, limits)


@st.composite
def _meshes(draw: st.DrawFn, max_ranks: int, limits: dict[str, int]) -> Mesh:
    axes: list[tuple[str, int]] = []
    for name in draw(st.permutations(KNOWN_AXES)):
        room = max_ranks // math.prod(size for _, size in axes)
        size = draw(st.integers(1, min(room, limits.get(name, room))))
        if size > 1 or draw(st.booleans()):
            axes.append((name, size))
    return Mesh(tuple(axes))


def micro_batches(largest: int = 4) -> st.SearchStrategy[int]:
    """Numbers of micro-batches."""
    return st.integers(1, largest)


def forward_graphs(samples: int = 4, **options: Any) -> st.SearchStrategy[fx.GraphModule]:
    """Forward graphs, as `forward_graph` makes them, of `transformer_configs(**options)`."""

    def graph(config: TransformerConfig) -> fx.GraphModule:
        return forward_graph(Transformer(config), transformer_batch(config, samples))

    return transformer_configs(**options).map(graph)
