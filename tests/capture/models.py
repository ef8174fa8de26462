"""Small models for the tests of capture, each with its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.attn(self.ln_1(x)).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.drop(self.proj(y.transpose(1, 2).contiguous().view(batch, length, width)))
        change: Tensor = self.drop(self.down(functional.gelu(self.up(self.ln_2(x)))))
        return x + change


class GPT(nn.Module):
    """In the style of nanoGPT: learned positions, tied head."""

    def __init__(
        self,
        vocab: int = 32,
        width: int = 16,
        heads: int = 2,
        layers: int = 2,
        length: int = 8,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * size, bias=False)
        self.v = nn.Linear(width, groups * size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm_1(x)
        q = rotate(self.q(h).view(batch, length, self.heads, -1).transpose(1, 2), cos, sin)
        k = rotate(self.k(h).view(batch, length, self.groups, -1).transpose(1, 2), cos, sin)
        v = self.v(h).view(batch, length, self.groups, -1).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm_2(x)
        change: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + change


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Rotary positions, grouped heads, gated MLP, untied head."""

    inv_freq: Tensor

    def __init__(self, vocab: int = 32, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        heads, groups = 4, 2
        size = width // heads
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, groups, 24) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        inverse = 1.0 / (100.0 ** (torch.arange(0, size, 2) / size))
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        angles = torch.outer(torch.arange(ids.shape[1], dtype=self.inv_freq.dtype), self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        logits = self.head(self.norm(x))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def token_batch(vocab: int = 32, batch: int = 4, length: int = 8) -> tuple[Tensor, Tensor]:
    """ids and labels, some of the labels ignored."""
    ids = torch.randint(0, vocab, (batch, length))
    labels = torch.randint(0, vocab, (batch, length))
    labels[0, :3] = -100
    labels[-1, -1] = -100
    return ids, labels
