"""The choice between one kernel and two: the floors, the model, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from msc.cost import Cluster
from msc.cost.fusion import Site, choose
from msc.cost.topology import Span

H100 = Cluster.load("h100")
NODE = Span(8, 1, 8)
FC1 = Site("all_gather", 8192, 6144, 12288, 8, torch.bfloat16)
FC2 = Site("reduce_scatter", 8192, 12288, 6144, 8, torch.bfloat16)


@pytest.mark.parametrize("site", [FC1, FC2], ids=["all_gather", "reduce_scatter"])
def test_large_layers_are_fused(site: Site) -> None:
    choice = choose(site, H100, NODE)
    assert choice.fused
    assert choice.reason.startswith("fused: modelled x1.1")
    assert choice.fused_s < choice.serial_s


@pytest.mark.parametrize(
    ("changes", "span", "reason"),
    [
        ({"m": 1024}, NODE, "apart: 1024 rows; below 2048 fused kernels lose"),
        ({"n": 128, "k": 1024}, NODE, "apart: 2.1e+09 FLOPs; below 1e+11 fused kernels lose"),
        ({"m": 8195}, NODE, "apart: 8195 rows do not divide over 8 ranks"),
        ({}, Span(16, 2, 8), "apart: the group spans 2 nodes"),
        ({"kernel_speed": 0.5}, NODE, "apart: modelled x0."),
    ],
)
def test_the_rest_stays_apart(changes: dict[str, float], span: Span, reason: str) -> None:
    site = dataclasses.replace(FC1, **changes)  # type: ignore[arg-type]
    choice = choose(site, H100, span)
    assert not choice.fused
    assert choice.reason.startswith(reason)


def test_other_collectives_have_no_kernel() -> None:
    with pytest.raises(ValueError, match="no fused kernel has a all_to_all"):
        choose(dataclasses.replace(FC1, kind="all_to_all"), H100, NODE)
