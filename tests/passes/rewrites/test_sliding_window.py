"""Sliding windows: the rewritten model, on any mesh, and why some attention is left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import msc
from msc.capture.entry import capture
from msc.ir.ops.attention import ATTENTION
from msc.passes.normalize import normalize
from msc.passes.rewrites.apply import apply_rewrites
from msc.testing import copy_graph
from tests import models, zoo
from tests.parity.captures import capture_once as capture_once

pytestmark = pytest.mark.usefixtures("capture_once")

WINDOW = 3
OWN: dict[str, Callable[[], nn.Module]] = {
    "gpt": functools.partial(models.GPT, width=32, layers=2),
    "gpt-dropout": functools.partial(models.GPT, width=32, layers=2, dropout=0.1),
    "llama-grouped": functools.partial(models.Llama, width=32, layers=2, kv_heads=2),
}
"""Models of `tests.models`; all others are of the zoo."""


@functools.cache
def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return OWN[name]() if name in OWN else zoo.build(name)


def batch(name: str) -> Any:
    return models.tokens() if name in OWN else zoo.batch(name, 8)


@functools.cache
def normalized(name: str) -> fx.GraphModule:
    captured = capture(built(name), batch(name))
    normalize(captured.graph)
    return captured.graph


def findings(name: str, rewrite: msc.SlidingWindow) -> list[str]:
    """What is said of each attention, without the name of the rewrite."""
    found = apply_rewrites(copy_graph(normalized(name)), [rewrite])
    return [str(each).removeprefix("SlidingWindow, ") for each in found]


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [
        ("gpt", "pp=2,dp=2", 2),
        ("gpt-dropout", "tp=2", 2),
        ("llama-grouped", "pp=2,tp=2", 2),
        ("mistral", "dp=2,tp=2", 1),
        ("gemma2", "tp=2", 2),
        ("mpt", "dp=2,tp=2", 2),
    ],
)
def test_parity(name: str, mesh: str, microbatches: int) -> None:
    report = msc.verify(
        built(name),
        batch(name),
        mesh=mesh,
        microbatches=microbatches,
        dtype=torch.float64,
        rewrites=[msc.SlidingWindow(WINDOW)],
    )
    assert report.ok, report.first_difference
    assert report.fallbacks == ()


class Layer(nn.Module):
    """Attention with a window of its own (0: none), as many models write it."""

    def __init__(self, window: int, soft_cap: float, slopes: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.window, self.soft_cap, self.slopes = window, soft_cap, slopes

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        rows, columns = torch.arange(s).unsqueeze(1), torch.arange(s)
        q, k, v = (y.view(b, s, 4, 4).transpose(1, 2) for y in self.qkv(x).split(16, -1))
        scores = 0.5 * q @ k.mT
        if self.soft_cap:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        if self.slopes:
            scores = scores + 0.5 ** torch.arange(1, 5)[:, None, None] * (columns - rows)
        hidden = columns > rows
        if self.window:
            hidden = hidden | (columns <= rows - self.window)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        y: Tensor = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, 16)
        return y


class Windowed(nn.Module):
    """What the rewrite of layer 0 has to make of a model without a window."""

    def __init__(self, window: int = 0, soft_cap: float = 0.0, slopes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(own, soft_cap, slopes) for own in (window, 0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("options", [{}, {"soft_cap": 0.5}, {"slopes": True}])
def test_the_rewritten_model_is_the_one_that_has_the_window(options: dict[str, Any]) -> None:
    x = torch.randn(4, 11, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewrites = [msc.SlidingWindow(WINDOW, layers=[0])]
    program = msc.compile(
        Windowed(**options), (x,), mesh="tp=2", precision="float64", rewrites=rewrites
    )
    found = program.run_virtual((x,))
    model = Windowed(WINDOW, **options).double()
    loss = model(x)
    loss.backward()
    assert float(found.loss) == pytest.approx(loss.item(), abs=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad, rtol=1e-10, atol=1e-13)
    targets = [str(n.target) for gm in program.graphs(0).values() for n in gm.graph.nodes]
    assert "aten.softmax.int" not in targets


def test_dropout_of_probabilities_keeps_its_scores_and_says_so() -> None:
    class Dropout(nn.Module):
        def __init__(self, window: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(8, 24)])
            self.window = window

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unsqueeze(1) for y in self.layers[0](x).split(8, -1))
            rows, columns = torch.arange(6).unsqueeze(1), torch.arange(6)
            seen = (columns <= rows) & (columns > rows - self.window)
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=0.5)
            return y.square().mean()

    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    rewritten = msc.compile(Dropout(6), (x,), rewrites=[msc.SlidingWindow(2)])
    expected = msc.compile(Dropout(2), (x,))
    (line,) = rewritten.report.rewrites
    assert line.endswith("each query sees 2 of 6 keys, and the scores of all are still computed")
    one, other = rewritten.run_virtual((x,), seed=3), expected.run_virtual((x,), seed=3)
    assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-6)
    assert float(one.loss) != pytest.approx(float(rewritten.run_virtual((x,), seed=4).loss))


def test_causality_beside_padding_is_found() -> None:
    """Also in the mask of Falcon's slopes, and in scores that GPT-Neo's buffers hide."""
    assert findings("falcon-alibi", msc.SlidingWindow(3))[0].endswith("sees 3 of 8 keys")
    assert findings("gpt-neo", msc.SlidingWindow(3))[0].endswith("of all are still computed")


def test_every_other_layer() -> None:
    lines = findings("gpt", msc.SlidingWindow(5, layers=range(0, 2, 2)))
    assert lines == [
        "h.0: each query sees 5 of 16 keys",
        "h.1: left alone: layer 1 is not among those asked for",
    ]


def test_what_has_a_window_as_short_is_left_alone() -> None:
    lines = findings("gemma3", msc.SlidingWindow(4))
    assert [line.partition(": ")[2] for line in lines] == [
        "left alone: it has a window of 4 already",
        "each query sees 4 of 8 keys",
        "left alone: it has a window of 4 already",
    ]
    shorter = findings("gemma3", msc.SlidingWindow(2))
    assert shorter[0].endswith("each query sees 2 of 8 keys, instead of 4")


def test_what_is_not_causal_is_left_alone() -> None:
    lines = [line for line in findings("bart", msc.SlidingWindow(3)) if "layers.0" in line]
    not_causal = "left alone: it is not causal: queries see keys after them"
    assert lines == [
        f"model.encoder.layers.0.self_attn: {not_causal}",
        "model.decoder.layers.0.self_attn: each query sees 3 of 8 keys",
        f"model.decoder.layers.0.encoder_attn: {not_causal}",
    ]


class Masked(nn.Module):
    """One attention whose mask is of one of many kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(8, 24)])
        self.bias: Tensor
        self.register_buffer("bias", torch.ones(9, 9).tril())
        self.constant = torch.ones(6, 6).tril()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unsqueeze(1) for y in self.layers[0](x).split(8, -1))
        lower = torch.ones(6, 6).tril()
        scores = q @ k.mT
        if self.kind == "buffer":
            scores = scores.masked_fill(self.bias[:6, :6] == 0, float("-inf"))
        elif self.kind == "constant":
            scores = scores.masked_fill(self.constant == 0, float("-inf"))
        elif self.kind == "soft":
            scores = scores + (1 - lower) * -1e9
        elif self.kind == "filled":
            scores = scores.masked_fill(lower == 0, -1e9)
        elif self.kind == "clamped":
            scores = scores.masked_fill(lower == 0, float("-inf"))
            scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
            scores = scores.view(-1, 6, 6).view(-1, 1, 6, 6)
        weights = scores.softmax(-1)
        if self.kind == "behind":
            weights = weights * lower
        y: Tensor = (weights @ v).square().mean()
        return y


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("buffer", "its mask comes from the buffer 'bias', whose values may change"),
        ("constant", "its mask comes from the buffer 'constant', whose values may change"),
        ("soft", "its mask adds finite numbers"),
        ("filled", "its mask adds finite numbers"),
        ("behind", "it could not be shown to be causal: its mask stands behind the softmax"),
        ("none", "it is not causal: queries see keys after them"),
        ("clamped", "each query sees 3 of 6 keys, and the scores of all are still computed"),
    ],
)
def test_each_mask_has_its_reason(kind: str, what: str) -> None:
    captured = capture(Masked(kind), (torch.zeros(4, 6, 8),))
    normalize(captured.graph)
    (finding,) = msc.SlidingWindow(3).apply(captured.graph)
    assert finding.what.startswith(what)
    assert finding.changed == (kind == "clamped")


@pytest.mark.parametrize("layers", [[], range(0)])
def test_no_layers_are_refused(layers: Any) -> None:
    with pytest.raises(msc.UserError, match="names no layer"):
        msc.SlidingWindow(4, layers)


def test_a_window_that_hides_nothing_is_refused() -> None:
    with pytest.raises(msc.UserError, match=r"h\.0: left alone: a window of 16 hides none of 16"):
        findings("gpt", msc.SlidingWindow(16))


def test_layers_without_attention_are_refused() -> None:
    with pytest.raises(msc.UserError, match=r"names \[2, 7\].*with attention are \[0, 1\]"):
        findings("gpt", msc.SlidingWindow(5, layers=[0, 2, 7]))


@pytest.mark.parametrize("window", [0, -1, 2.0, True, None])
def test_what_is_no_window_is_refused(window: Any) -> None:
    with pytest.raises(msc.UserError, match=r"window=.*at least 1"):
        msc.SlidingWindow(window)


@pytest.mark.parametrize("layers", [3, "0", [-1], [0.5], {0: 1}])
def test_what_is_no_list_of_layers_is_refused(layers: Any) -> None:
    with pytest.raises(msc.UserError, match=r"layers=.*range"):
        msc.SlidingWindow(4, layers)


def test_a_program_with_windows_is_saved_and_loaded(tmp_path: Any) -> None:
    program = msc.compile(built("gpt"), batch("gpt"), rewrites=[msc.SlidingWindow(5)])
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    windows = {
        n.args[6]
        for gm in loaded.graphs(0).values()
        for n in gm.graph.nodes
        if n.target is ATTENTION
    }
    assert windows == {5}
    assert float(loaded.run_virtual(batch("gpt")).loss) == float(
        program.run_virtual(batch("gpt")).loss
    )
