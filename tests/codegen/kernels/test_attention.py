"""Flash attention kernels in the interpreter against float64: masks, groups, caps, sizes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from msc.codegen.kernels import attention_backward, attention_forward
from msc.codegen.kernels.attention import Attention, operands
from msc.codegen.kernels.description import SM_80, SM_90, Tiles
from msc.codegen.kernels.launch import launch
from msc.ir.errors import PlanError
from msc.testing.interpreter import interpreted
from tests.codegen.kernels.fused import error, poisoned

TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3}
PLAIN = Attention(2, 64, 2, 1, 16, "float32", SM_90, 0.25)
TILES = Tiles(16, 32, 0)


def attention(**changes: Any) -> Attention:
    return dataclasses.replace(PLAIN, **changes)


def reference(case: Attention, tensors: dict[str, Tensor], documents: Tensor) -> tuple[Tensor, ...]:
    """out, lse [b, s, h], dq, dk, dv in float64, in the layout of the kernels."""
    leaves = [tensors[name].double().requires_grad_() for name in ("q", "k", "v")]
    copies = case.heads // case.groups
    q, k, v = (
        leaf.transpose(1, 2).repeat_interleave(1 if i == 0 else copies, 1)
        for i, leaf in enumerate(leaves)
    )
    scores = case.scale * q @ k.transpose(2, 3)
    if case.soft_cap:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    ahead = torch.arange(case.length)[:, None] - torch.arange(case.length)
    hidden = torch.zeros(case.batch, 1, case.length, case.length, dtype=torch.bool)
    if case.causal:
        hidden |= ahead < 0
    if case.window:
        hidden |= ahead >= case.window
    if case.documents:
        hidden |= (documents[:, :, None] != documents[:, None, :])[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, tensors["gy"].double())
    return (out.detach(), scores.logsumexp(-1).transpose(1, 2).detach(), *grads)


def check(case: Attention, tiles: Tiles = TILES) -> None:
    """Forward and backward of the kernels, each against the reference."""
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = (case.batch, case.length, heads, case.head_size)
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {name: random(case.heads) for name in ("q", "gy")}
    tensors |= {name: random(case.groups) for name in ("k", "v")}
    begins, ends = documents_of(case)
    own = {"begins": begins, "ends": ends} if case.documents else {}
    rows = (case.batch, case.length, case.heads)
    out = poisoned(*rows, case.head_size, dtype=dtype)
    lse, delta = (poisoned(*rows, dtype=torch.float32) for _ in range(2))
    expected = reference(case, tensors, begins)
    dq, dk, dv = (poisoned(*tensors[name].shape, dtype=dtype) for name in ("q", "k", "v"))
    values = {
        **tensors,
        **own,
        "out": out,
        "lse": lse,
        "delta": delta,
        "dq": dq,
        "dk": dk,
        "dv": dv,
    }
    with interpreted():
        for kernel in (
            attention_forward.emit(case, tiles),
            attention_backward.emit_delta(case, tiles),
            attention_backward.emit_keys(case, tiles),
            attention_backward.emit_queries(case, tiles),
        ):
            launch(kernel, operands(kernel, values))
    for found, wanted in zip((out, lse, dq, dk, dv), expected, strict=True):
        assert error(found, wanted) <= TOLERANCE[case.dtype]


def documents_of(case: Attention) -> tuple[Tensor, Tensor]:
    """Where the document of each position begins and ends; samples are cut differently."""
    begins = torch.zeros(case.batch, case.length, dtype=torch.int32)
    ends = torch.full_like(begins, case.length)
    for sample in range(case.batch):
        cuts = [case.length * part // (5 + sample) for part in (0, 2, 3, 4)] + [case.length]
        for begin, end in itertools.pairwise(cuts):
            begins[sample, begin:end], ends[sample, begin:end] = begin, end
    return begins, ends


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"window": 5},
        {"window": 33},
        {"window": 100},
        {"soft_cap": 1.5},
        {"documents": True},
        {"documents": True, "length": 50},
        {"documents": True, "causal": False, "soft_cap": 2.0},
        {"window": 20, "documents": True, "soft_cap": 1.0, "groups": 2},
    ],
    ids=str,
)
def test_masks(changes: dict[str, Any]) -> None:
    check(attention(**changes))


@pytest.mark.parametrize("tiles", [Tiles(16, 16, 0), Tiles(32, 16, 0), Tiles(64, 64, 0)])
@pytest.mark.parametrize("window", [0, 24])
def test_blocks(tiles: Tiles, window: int) -> None:
    check(attention(window=window, groups=1, batch=1), tiles)


@pytest.mark.parametrize(
    "changes", [{"length": 50}, {"head_size": 24, "window": 9}, {"target": SM_80}, {"length": 7}]
)
def test_sizes_without_descriptors(changes: dict[str, Any]) -> None:
    case = attention(**changes)
    assert ".load([" not in attention_forward.emit(case, TILES).source
    check(case)


def test_bfloat16() -> None:
    check(attention(dtype="bfloat16"))
    check(attention(dtype="bfloat16", length=40, target=SM_80, window=12))


def test_what_documents_do_not_reach_is_skipped() -> None:
    text = attention_forward.emit(attention(documents=True, causal=False), TILES).source
    assert "lowest = tl.maximum(0, tl.load(begins + sample * LENGTH + first) // BN * BN)" in text
    assert "for start in range(lowest, beyond, BN):" in text


def test_blocks_that_all_queries_see_have_no_mask() -> None:
    text = attention_forward.emit(attention(window=20), TILES).source
    before, between, after = text.split("for start in range(")[1:]
    shown = (
        "shown = (queries[:, None] >= keys[None, :]) & (queries[:, None] - keys[None, :] < WINDOW)"
    )
    assert shown in before
    assert shown in after
    assert "tl.where" not in between


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 512}, "kernels take heads of 16 to 256 elements, not 512"),
        ({"groups": 3}, "2 heads do not share 3 evenly"),
        ({"causal": False, "window": 3}, "a sliding window needs causal=True"),
        ({"dtype": "float64"}, "attention: no kernel computes on float64"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        attention(**changes)
