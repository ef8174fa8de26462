"""Tools to test passes and compiled programs on CPU, against the model that they come from.

    config = msc.testing.TransformerConfig(layers=2, tied=True)
    graph = msc.testing.forward_graph(
        msc.testing.Transformer(config), msc.testing.transformer_batch(config, samples=4)
    )
    msc.testing.assert_pass_parity(MyPass(), graph, mesh="pp=2,tp=2", microbatches=2)

    @given(msc.testing.forward_graphs(), msc.testing.meshes(max_ranks=4, dp=2))
    def test_my_pass(graph, mesh):
        msc.testing.assert_pass_parity(MyPass(), graph, mesh)

The strategies need hypothesis, which `pip install megascale-compiler[test]` brings.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msc.testing.graphs import copy_graph as copy_graph
    from msc.testing.graphs import forward_graph as forward_graph
    from msc.testing.graphs import random_values as random_values
    from msc.testing.parity import assert_pass_parity as assert_pass_parity
    from msc.testing.shards import check_sharding_rule as check_sharding_rule
    from msc.testing.strategies import forward_graphs as forward_graphs
    from msc.testing.strategies import meshes as meshes
    from msc.testing.strategies import micro_batches as micro_batches
    from msc.testing.strategies import transformer_configs as transformer_configs
    from msc.testing.strategies import transformers as transformers
    from msc.testing.transformer import Transformer as Transformer
    from msc.testing.transformer import TransformerConfig as TransformerConfig
    from msc.testing.transformer import transformer_batch as transformer_batch

PUBLIC = {
    "assert_pass_parity": "parity",
    "copy_graph": "graphs",
    "forward_graph": "graphs",
    "random_values": "graphs",
    "forward_graphs": "strategies",
    "meshes": "strategies",
    "micro_batches": "strategies",
    "transformer_configs": "strategies",
    "transformers": "strategies",
    "check_sharding_rule": "shards",
    "Transformer": "transformer",
    "TransformerConfig": "transformer",
    "transformer_batch": "transformer",
}
"""Public name -> its module here; loaded when first used, since not all of it needs hypothesis."""


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'msc.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"msc.testing.{PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
