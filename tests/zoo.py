"""Tiny random models of `transformers` and of torch.nn: one for each architecture that MSC names.

Three layers each, or three stages (Swin). Their sizes divide by 2, and nearly none by 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

VOCABULARY = 64
WIDTH = 32
HEADS = 4
LAYERS = 3
LENGTH = 8
IMAGE = 16
SAMPLES = 12

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """How to build a model, and a batch of so many samples for it.

    loss_fn: the loss of what the model returns; None if it returns its loss.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: Callable[[Any], Tensor] | None = None


def _tokens(samples: int) -> Batch:
    """Ids and labels; samples have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
    for row in range(samples):
        labels[row, : row % LENGTH] = -100
    return {"input_ids": ids, "labels": labels}


def _masked_tokens(samples: int) -> Batch:
    batch = _tokens(samples)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 5:] = 0
    mask[-1, 3:] = 0
    return {**batch, "attention_mask": mask}


def _images(samples: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(samples, 3, IMAGE, IMAGE, generator=generator)
    labels = torch.randint(0, 8, (samples,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def _pairs(samples: int) -> Batch:
    ids = _tokens(samples)["input_ids"]
    ids[:, -1] = VOCABULARY - 1  # where the text ends
    return {"input_ids": ids, "pixel_values": _images(samples)["pixel_values"]}


def _sequences(samples: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    shape = (samples, LENGTH, WIDTH)
    return {name: torch.randn(shape, generator=generator) for name in ("source", "target")}


def _of(model: str, config: str, sizes: dict[str, Any], **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        settings = getattr(transformers, config)(**sizes, **changes)
        built: nn.Module = getattr(transformers, model)(settings)
        return built

    return build


LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GPT2 = {
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
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_key_value_heads": 2, "head_dim": WIDTH // HEADS}
GEMMA3 = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MIXTRAL = {**LLAMA, **GROUPED, "num_local_experts": 4}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": 4,
}
NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "attention_types": [[["global", "local", "global"], 1]],
    "window_size": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "ffn_dim": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "word_embed_proj_dim": WIDTH,
    "dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MPT = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "max_seq_len": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 2 * WIDTH,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": LENGTH,
    "dropout": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
CLIP = {
    "text_config": {**LLAMA, "eos_token_id": VOCABULARY - 1, "projection_dim": WIDTH},
    "vision_config": {**VISION, "projection_dim": WIDTH},
    "projection_dim": WIDTH,
}
SWIN = {
    "image_size": IMAGE,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 1, 1],
    "num_heads": [2, 4, 8],
    "window_size": 2,
    "drop_path_rate": 0.0,
    "num_labels": 8,
    **NO_DROPOUT,
}


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder, to a mean square."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.head(self.encoder(source)), target)


class Seq2Seq(nn.Module):
    """torch.nn.Transformer with a causal decoder, to a mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, 2 * WIDTH, 0.0, batch_first=True
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=target.dtype)
        out = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        return functional.mse_loss(self.head(out), target)


class Contrastive(nn.Module):
    """CLIP, which compares every sample with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = _of("CLIPModel", "CLIPConfig", CLIP)()

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        loss: Tensor = self.clip(
            input_ids=input_ids, pixel_values=pixel_values, return_loss=True
        ).loss
        return loss


MODELS: dict[str, Entry] = {
    "gpt2": Entry(_of("GPT2LMHeadModel", "GPT2Config", GPT2), _tokens),
    "gpt-neo": Entry(_of("GPTNeoForCausalLM", "GPTNeoConfig", NEO), _tokens),
    "gpt-neox": Entry(_of("GPTNeoXForCausalLM", "GPTNeoXConfig", LLAMA), _tokens),
    "gpt-j": Entry(_of("GPTJForCausalLM", "GPTJConfig", GPT2, rotary_dim=4), _tokens),
    "llama": Entry(_of("LlamaForCausalLM", "LlamaConfig", LLAMA), _tokens),
    "mistral": Entry(
        _of("MistralForCausalLM", "MistralConfig", LLAMA, sliding_window=4, **GROUPED), _tokens
    ),
    "qwen2": Entry(_of("Qwen2ForCausalLM", "Qwen2Config", LLAMA, num_key_value_heads=2), _tokens),
    "qwen3": Entry(_of("Qwen3ForCausalLM", "Qwen3Config", LLAMA, **GROUPED), _tokens),
    "gemma": Entry(_of("GemmaForCausalLM", "GemmaConfig", LLAMA, **GROUPED), _tokens),
    "gemma2": Entry(
        _of("Gemma2ForCausalLM", "Gemma2Config", LLAMA, sliding_window=4, **GROUPED), _tokens
    ),
    "gemma3": Entry(
        _of("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA, **GEMMA3, **GROUPED), _tokens
    ),
    "phi": Entry(_of("PhiForCausalLM", "PhiConfig", LLAMA), _tokens),
    "opt": Entry(_of("OPTForCausalLM", "OPTConfig", OPT), _masked_tokens),
    "mpt": Entry(_of("MptForCausalLM", "MptConfig", MPT), _tokens),
    "falcon": Entry(_of("FalconForCausalLM", "FalconConfig", FALCON), _tokens),
    "falcon-alibi": Entry(
        _of("FalconForCausalLM", "FalconConfig", FALCON, alibi=True), _masked_tokens
    ),
    "bert": Entry(
        _of("BertForMaskedLM", "BertConfig", {**LLAMA, "pad_token_id": 0}, **NO_DROPOUT),
        _masked_tokens,
    ),
    "t5": Entry(_of("T5ForConditionalGeneration", "T5Config", T5), _tokens),
    "bart": Entry(_of("BartForConditionalGeneration", "BartConfig", BART), _tokens),
    "vit": Entry(
        _of("ViTForImageClassification", "ViTConfig", VISION, num_labels=8, **NO_DROPOUT), _images
    ),
    "clip": Entry(Contrastive, _pairs),
    "swin": Entry(_of("SwinForImageClassification", "SwinConfig", SWIN), _images),
    "mixtral": Entry(
        _of("MixtralForCausalLM", "MixtralConfig", MIXTRAL, experts_implementation="batched_mm"),
        _tokens,
    ),
    "encoder": Entry(Encoder, _sequences),
    "seq2seq": Entry(Seq2Seq, _sequences),
}


def build(name: str) -> nn.Module:
    """A model in float64, with the same random parameters each time."""
    torch.manual_seed(0)
    return MODELS[name].build().double().train()


def batch(name: str, samples: int = SAMPLES) -> Batch:
    """A batch for the model of that name, in float64."""
    made = MODELS[name].batch(samples)
    return {key: x.double() if x.is_floating_point() else x for key, x in made.items()}
