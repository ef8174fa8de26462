"""Programs with products and norms that take what stands beside them are what one device does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import msc
from msc.ir.communication import graphs_below
from tests import models, zoo

SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32}


def small(name: str) -> tuple[torch.nn.Module, Any]:
    if name in zoo.MODELS:
        return zoo.build(name), zoo.batch(name)
    torch.manual_seed(0)
    build = models.GPT if name == "gpt" else models.Llama
    return build(**SIZES), models.tokens(samples=4)


def calls(program: msc.Program) -> Counter[str]:
    """The calls of each op in the distinct graphs of rank 0."""
    nodes = [n for gm in graphs_below(program.rank_graphs[0]) for n in gm.graph.nodes]
    return Counter(str(n.target).removesuffix(".default") for n in nodes)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"mesh": "tp=2", "fuse_collectives": True}),
    ("gpt", {"mesh": "pp=2,dp=2", "microbatches": 2, "recompute": "full"}),
    ("gpt", {"mesh": "pp=2", "microbatches": 2, "schedule": "zb-v"}),
    ("gpt", {"mesh": "dp=2", "microbatches": 2, "zero": 2}),
    ("llama", {"mesh": "tp=2"}),
    ("llama", {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 3, "recompute": "full"}),
    ("llama", {"mesh": "pp=2", "microbatches": 2, "schedule": "zb-v"}),
    ("llama", {"mesh": "dp=2", "rewrites": [msc.ParallelBlock()]}),
    ("gemma2", {"mesh": "tp=2,dp=2"}),
    ("t5", {"mesh": "tp=2"}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_parity(name: str, options: dict[str, Any]) -> None:
    model, batch = small(name)
    report = msc.verify(model, batch, dtype=torch.float64, **options)
    assert report.ok, report.first_difference
    assert report.max_error < 1e-10
