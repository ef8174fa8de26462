"""The GPT that the benchmarks measure: hand-written, with no distributed code in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a decoder-only transformer; the MLP is four times as wide as the model."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int


GPT3_175B = GPTConfig(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
"""Brown et al., NeurIPS 2020, with the vocabulary padded as in Megatron-LM."""


class Attention(nn.Module):
    """Causal self-attention: one linear each for queries, keys, values and the output."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.q = nn.Linear(config.hidden, config.hidden)
        self.k = nn.Linear(config.hidden, config.hidden)
        self.v = nn.Linear(config.hidden, config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [batch, sequence, hidden], as is the result.

        The number of heads follows from the width of the projections, so that the module runs
        unchanged where `parallelize_module` has left it a part of them.
        """
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], -1, self.head_dim)
        return heads.transpose(1, 2)


class MLP(nn.Module):
    """Two linears around a GELU, `expansion` times as wide as the model."""

    def __init__(self, config: GPTConfig, expansion: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, expansion * config.hidden)
        self.down = nn.Linear(expansion * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [batch, sequence, hidden], as is the result."""
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [batch, sequence, hidden], as is the result."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` is [batch, sequence]; the result [batch, sequence, hidden]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.token(tokens) + self.position(positions)
        return result


class GPT(nn.Module):
    """A decoder-only transformer with an output layer of its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` is [batch, sequence]; the logits [batch, sequence, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the tokens."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class GPTWithLoss(nn.Module):
    """A GPT whose forward returns the loss, as `msc.compile` and DDP take it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """`tokens` and `labels` are [batch, sequence]; the mean loss."""
        return token_loss(self.gpt(tokens), labels)


def random_batch(config: GPTConfig, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens and labels, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.sequence)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)
    labels = torch.randint(config.vocabulary, shape, generator=generator)
    return tokens, labels
