"""Models for tests of the whole path: two hand-written ones, and tiny ones of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

VOCABULARY = 96
WIDTH = 64
HEADS = 4
LAYERS = 4
LENGTH = 16
SAMPLES = 8
IGNORED = -100


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
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attn(self.ln_1(x)).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.drop(self.proj(y.transpose(1, 2).contiguous().view(batch, length, width)))
        y = self.down(functional.gelu(self.up(self.ln_2(x))))
        result: Tensor = x + self.drop(y)
        return result


class GPT(nn.Module):
    """In the style of nanoGPT: learned positions, LayerNorm, fused qkv, tied head."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        heads: int = HEADS,
        layers: int = LAYERS,
        length: int = LENGTH,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=IGNORED
        )


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `[b, h, s, d]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        size = width // heads
        self.attention_norm = RMSNorm(width)
        self.wq = nn.Linear(width, heads * size, bias=False)
        self.wk = nn.Linear(width, kv_heads * size, bias=False)
        self.wv = nn.Linear(width, kv_heads * size, bias=False)
        self.wo = nn.Linear(heads * size, width, bias=False)
        self.ffn_norm = RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.attention_norm(x)
        q = self.wq(h).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.wk(h).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        v = self.wv(h).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        y = functional.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.wo(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return result


class Llama(nn.Module):
    """In the style of Llama: rotary positions as buffers, RMSNorm, gated MLP, grouped heads."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        heads: int = HEADS,
        kv_heads: int = HEADS,
        layers: int = LAYERS,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, kv_heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length), torch.cat((rates, rates)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )


def _sizes(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    } | changes


_GPT2_SIZES = {
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _of(model: str, config: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        settings = getattr(transformers, config)(**sizes)
        built: nn.Module = getattr(transformers, model)(settings)
        return built

    return build


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "nanogpt": GPT,
    "llama-like": Llama,
    "gpt2": _of("GPT2LMHeadModel", "GPT2Config", _GPT2_SIZES),
    "llama": _of("LlamaForCausalLM", "LlamaConfig", _sizes()),
    "neox": _of("GPTNeoXForCausalLM", "GPTNeoXConfig", _sizes()),
    "mistral": _of(
        "MistralForCausalLM", "MistralConfig", _sizes(num_key_value_heads=4, sliding_window=8)
    ),
    "qwen2": _of("Qwen2ForCausalLM", "Qwen2Config", _sizes(num_key_value_heads=4)),
    "bert": _of(
        "BertForMaskedLM",
        "BertConfig",
        _sizes(pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    ),
}
"""Every model that the parity matrix runs; dims divide by 4."""

HAND_WRITTEN = ("nanogpt", "llama-like")


def build(name: str) -> nn.Module:
    """A model with the same random parameters each time."""
    torch.manual_seed(0)
    model = BUILDERS[name]()
    return model.train()


def tokens(seed: int = 0, samples: int = SAMPLES, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Ids and labels; samples have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=generator)
    labels = torch.randint(1, VOCABULARY, (samples, length), generator=generator)
    for row in range(samples):
        labels[row, : (5 * row + seed) % length] = IGNORED
    return ids, labels


def batch(name: str, seed: int = 0) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """A global batch for the model of that name."""
    ids, labels = tokens(seed)
    if name in HAND_WRITTEN:
        return ids, labels
    inputs = {"input_ids": ids, "labels": labels}
    if name == "bert":
        mask = torch.ones_like(ids)
        mask[0, 10:] = 0
        mask[5, 3 + seed % 4 :] = 0
        inputs["attention_mask"] = mask
    return inputs
