"""A small decoder whose every dimension and choice is a field: what the model strategies draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
}


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a `Transformer`; `kv_heads` divides `heads`.

    norm: "layer" or "rms"; activation: a key of `ACTIVATIONS`; gated: two up-projections
    multiplied; fused: one projection for q, k and v; tied: the head is the embedding; positions: a
    learned embedding of positions.
    """

    vocabulary: int = 16
    heads: int = 2
    kv_heads: int = 2
    head_width: int = 4
    inner: int = 16
    layers: int = 2
    length: int = 6
    norm: str = "layer"
    activation: str = "gelu"
    gated: bool = False
    fused: bool = False
    bias: bool = True
    tied: bool = False
    positions: bool = True
    dropout: float = 0.0

    @property
    def width(self) -> int:
        """The length of the hidden dimension."""
        return self.heads * self.head_width


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def _norm(config: TransformerConfig) -> nn.Module:
    if config.norm == "rms":
        return _RMSNorm(config.width)
    return nn.LayerNorm(config.width, bias=config.bias)


class _Block(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_width
        self.attention_norm = _norm(config)
        if config.fused:
            self.qkv = nn.Linear(config.width, config.width + 2 * kv_width, bias=config.bias)
        else:
            self.q = nn.Linear(config.width, config.width, bias=config.bias)
            self.k = nn.Linear(config.width, kv_width, bias=config.bias)
            self.v = nn.Linear(config.width, kv_width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.mlp_norm = _norm(config)
        self.up = nn.Linear(config.width, config.inner, bias=config.bias)
        if config.gated:
            self.gate = nn.Linear(config.width, config.inner, bias=config.bias)
        self.down = nn.Linear(config.inner, config.width, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.out(self._attend(self.attention_norm(x))))
        h = self.mlp_norm(x)
        inner = ACTIVATIONS[self.config.activation](self.up(h))
        if self.config.gated:
            inner = inner * self.gate(h)
        result: Tensor = x + self.drop(self.down(inner))
        return result

    def _attend(self, h: Tensor) -> Tensor:
        config = self.config
        batch, length, width = h.shape
        kv_width = config.kv_heads * config.head_width
        if config.fused:
            parts = self.qkv(h).split([width, kv_width, kv_width], dim=-1)
        else:
            parts = (self.q(h), self.k(h), self.v(h))
        q, k, v = (p.view(batch, length, -1, config.head_width).transpose(1, 2) for p in parts)
        dropout = config.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=config.kv_heads != config.heads
        )
        return y.transpose(1, 2).reshape(batch, length, width)


class Transformer(nn.Module):
    """Ids and targets `[b, s]` -> the mean cross entropy of the targets that are not `IGNORED`.

    Its parameters are the same each time for the same config.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(config.vocabulary, config.width)
            if config.positions:
                self.position = nn.Embedding(config.length, config.width)
            self.layers = nn.ModuleList(_Block(config) for _ in range(config.layers))
            self.norm = _norm(config)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
            if config.tied:
                self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.config.positions:
            x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )


def transformer_batch(
    config: TransformerConfig, samples: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids and targets of a global batch; samples have different numbers of targets that count."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, config.length)
    ids = torch.randint(config.vocabulary, shape, generator=generator)
    targets = torch.randint(config.vocabulary, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < 0.3
    ignored[0, 0] = False
    return ids, targets.masked_fill(ignored, IGNORED)
