"""Small transformers whose blocks are serial, parallel, or nearly serial, in many forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8
HEADS = 2
LENGTH = 4
VOCABULARY = 12

CAST_NORMS = ("layer-cast", "plain-layer-cast")
NORMS = (
    "layer",
    "plain-layer",
    "layer-written-out",
    "rms-op",
    "rms-pow",
    "rms-square",
    "rms-sqrt",
    "rms-gemma",
)
NEAR_MISSES = (
    "cross-attention",
    "two-attentions",
    "no-attention",
    "no-gemm",
    "sum-read",
    "norm-read",
    "branch-read",
    "stream-read-by-attention",
    "sum-read-by-mlp",
    "mlp-without-norm",
    "mlp-reads-embedding",
    "first-skip-scaled",
    "skip-scaled",
    "skip-dropped",
    "sum-scaled",
    "sum-dropped",
    "sum-normed",
    "alpha",
    "post-norm",
    "sandwich",
    "norm-over-length",
    "parallel-already",
    "parallel-in-two-sums",
)


@dataclass(frozen=True)
class BlockConfig:
    """How a block is built; parallel: y = x + attention(norm1(x)) + mlp(norm2(x)).

    twice: the attention is a difference of two. shared: both branches read norm1. scale: "vector"
        (LayerScale), "gate" (tanh of a number) or "".
    near_miss: of `NEAR_MISSES`, what keeps the blocks from being serial pre-norm blocks.
    """

    norm: str = "layer"
    second_eps: float = 1e-5
    fused: bool = False
    gated: bool = False
    bias: bool = True
    causal: bool = True
    math: bool = False
    twice: bool = False
    dropout: float = 0.0
    scale: str = ""
    flatten: bool = False
    swapped: bool = False
    layers: int = 2
    parallel: bool = False
    shared: bool = False
    near_miss: str = ""


class Norm(nn.Module):
    """A norm over the last dim, in one of the forms of `NORMS` or `CAST_NORMS`."""

    def __init__(self, kind: str, eps: float) -> None:
        super().__init__()
        self.kind = kind
        self.eps = eps
        if not kind.startswith("plain-layer"):
            self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        if kind in ("layer", "layer-cast"):
            self.bias = nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("layer", "plain-layer"):
            vectors = (getattr(self, "weight", None), getattr(self, "bias", None))
            return functional.layer_norm(x, (WIDTH,), *vectors, self.eps)
        if self.kind in CAST_NORMS:
            vectors = (getattr(self, "weight", None), getattr(self, "bias", None))
            scale, shift = (None if each is None else each.double() for each in vectors)
            wide = functional.layer_norm(x.double(), (WIDTH,), scale, shift, self.eps)
            return wide.to(x.dtype)
        if self.kind == "layer-written-out":
            mean = x.mean(-1, keepdim=True)
            variance = (x - mean).pow(2).mean(-1, keepdim=True)
            return self.weight * ((x - mean) * torch.rsqrt(variance + self.eps))
        if self.kind == "rms-op":
            return functional.rms_norm(x, (WIDTH,), self.weight, self.eps)
        if self.kind == "rms-pow":
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        if self.kind == "rms-square":
            return (
                x * torch.rsqrt(x.square().mean(x.dim() - 1, keepdim=True) + self.eps) * self.weight
            )
        if self.kind == "rms-sqrt":
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * (1.0 + self.weight)


class Attention(nn.Module):
    """Self-attention, or attention to `memory`."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        sizes = (3 * WIDTH,) if config.fused else (WIDTH, WIDTH, WIDTH)
        self.parts = nn.ModuleDict(
            {name: nn.Linear(WIDTH, n, config.bias) for name, n in zip("qkv", sizes, strict=False)}
        )
        self.out = nn.Linear(WIDTH, WIDTH, config.bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if self.config.fused:
            parts = self.parts["q"](x).split(WIDTH, dim=-1)
        else:
            other = x if memory is None else memory
            parts = (self.parts["q"](x), self.parts["k"](other), self.parts["v"](other))
        q, k, v = (part.view(*part.shape[:2], HEADS, -1).transpose(1, 2) for part in parts)
        if self.config.math:
            y = torch.softmax(q @ k.transpose(-1, -2) * 0.5, dim=-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.config.causal)
        if self.config.twice:
            y = y - functional.scaled_dot_product_attention(k, q, v)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return mixed


class MLP(nn.Module):
    """Two GEMMs, or three with a gate."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, config.bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, config.bias)
        if config.gated:
            self.gate = nn.Linear(WIDTH, 2 * WIDTH, config.bias)
        self.gated = config.gated

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.gelu(self.up(x))
        if self.gated:
            inner = inner * self.gate(x)
        result: Tensor = self.down(inner)
        return result


class Block(nn.Module):
    """A transformer block as its config says."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.norm1 = Norm(config.norm, 1e-5)
        self.norm2 = Norm(config.norm, config.second_eps)
        self.norm3 = Norm(config.norm, 1e-5)
        self.attention = Attention(config)
        self.other_attention = Attention(BlockConfig(bias=config.bias))
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)
        if config.scale == "vector":
            self.gamma = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        elif config.scale == "gate":
            self.gamma = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(2))

    def _end(self, branch: Tensor, number: int) -> Tensor:
        branch = self.drop(branch)
        if self.config.scale == "vector":
            branch = self.gamma[number] * branch
        return branch * self.gamma[number].tanh() if self.config.scale == "gate" else branch

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        return branch + x if self.config.swapped else x + branch

    def _mlp(self, x: Tensor) -> Tensor:
        """The MLP's branch; without a near miss that of its norm alone."""
        near = self.config.near_miss
        h = x if near == "mlp-without-norm" else self.norm2(x)
        if near == "norm-over-length":
            h = functional.layer_norm(x, x.shape[1:])
        if near == "no-gemm":
            return h.sin()
        if near == "two-attentions":
            return self._end(self.other_attention(h), 1)
        return self._end(self.mlp(h), 1)

    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """The next stream, and a number for the loss; `first` is the first layer's stream."""
        near, aside = self.config.near_miss, x.new_zeros(())
        normed = self.norm1(x)
        if self.config.parallel:
            attended = self._end(self.attention(normed), 0)
            beside = normed if self.config.shared else self.norm2(x)
            return self._add(self._add(x, attended), self._end(self.mlp(beside), 1)), aside
        if near == "post-norm":
            h = self.norm1(x + self.attention(x))
            return self.norm2(h + self.mlp(h)), aside
        if near == "parallel-already":
            return x + (self.attention(normed) + self.mlp(normed)), aside
        if near == "parallel-in-two-sums":
            return x + self.attention(normed) + self.mlp(normed), aside
        core = normed if near == "no-attention" else self.attention(normed)
        if near == "stream-read-by-attention":
            core = core * x.sigmoid()
        if near == "branch-read":
            aside = core.sum()
        if near == "sandwich":
            core = self.norm3(core)
        h = self._add(0.5 * x if near == "first-skip-scaled" else x, self._end(core, 0))
        if near == "cross-attention":
            h = h + self.other_attention(self.norm3(h), first)
        if near == "sum-scaled":
            h = h * 0.5
        if near == "sum-dropped":
            h = functional.dropout(h, 0.5)
        if near == "sum-normed":
            h = self.norm3(h)
        if near == "sum-read":
            aside = h.sum()
        seen = h.flatten(0, 1) if self.config.flatten else h
        branch = self._mlp(seen)
        if near == "norm-read":
            aside = self.norm2(h).sum()
        if near == "sum-read-by-mlp":
            branch = branch * seen.sigmoid()
        if near == "mlp-reads-embedding":
            branch = branch * first
        skip = {"skip-scaled": 0.5 * seen, "skip-dropped": functional.dropout(seen, 0.5)}
        if near == "alpha":
            y = torch.add(seen, branch, alpha=2)
        else:
            y = self._add(skip.get(near, seen), branch)
        return y.view(x.shape), aside


class Model(nn.Module):
    """Ids and targets `[b, s]` -> a mean square; its parameters are the same each time."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = first = self.embed(ids).sin()
        total = x.new_zeros(())
        for layer in self.layers:
            x, aside = layer(x, first)
            total = total + aside
        logits = self.head(self.norm(x))
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss = loss + total * 1e-3
        return loss


def batch(samples: int = 4) -> tuple[Tensor, Tensor]:
    """Ids and targets of a global batch."""
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(VOCABULARY, (2, samples, LENGTH), generator=generator)
    return ids, targets
