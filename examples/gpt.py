"""A small GPT, written for one device: nothing in it knows of other processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a model: 10.9 million parameters by default."""

    vocabulary: int = 256
    layers: int = 6
    hidden: int = 384
    heads: int = 6
    sequence: int = 256


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(hidden, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return result


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """Token and position embeddings, layers, and a head tied to the token embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        layers = [Layer(config) for _ in range(config.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialize)
        for layer in layers:
            for linear in (layer.attention.out, layer.down):
                nn.init.normal_(linear.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of `labels`; both are [batch, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A small model and a batch of 8, for the command line: `msc verify examples.gpt:build`."""
    torch.manual_seed(0)
    config = Config(layers=4, hidden=64, heads=4, sequence=32)
    tokens, labels = torch.randint(config.vocabulary, (2, 8, config.sequence))
    return GPT(config), (tokens, labels)
