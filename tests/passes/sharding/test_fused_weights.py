"""Fused weights of models from transformers are split by their segments, as Megatron-LM would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import msc
from msc.capture.entry import capture
from msc.compiler import new_unit
from msc.ir.mesh import Mesh
from msc.ir.pipeline import Pipeline
from msc.passes.compilation import Compilation, Settings
from msc.passes.pipelines import TRAIN
from tests.passes.sharding.placing import ops_of, states_of

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
Names = dict[str, str]
WEIGHTS: dict[str, tuple[str, dict[str, Any], Names]] = {
    "GPT2": (
        "GPT2LMHeadModel",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {
            "transformer.h.0.attn.c_attn": "S1/3",
            "transformer.h.0.attn.c_proj": "S0",
            "transformer.h.0.mlp.c_fc": "S1",
            "transformer.h.0.mlp.c_proj": "S0",
        },
    ),
    "GPTNeoX": (
        "GPTNeoXForCausalLM",
        {"intermediate_size": 128},
        {
            "gpt_neox.layers.0.attention.query_key_value": "S0",  # interleaved, head by head
            "gpt_neox.layers.0.attention.dense": "S1",
            "gpt_neox.layers.0.mlp.dense_h_to_4h": "S0",
            "gpt_neox.layers.0.mlp.dense_4h_to_h": "S1",
        },
    ),
    "Phi3": (
        "Phi3ForCausalLM",
        {"intermediate_size": 128, "num_key_value_heads": 8},
        {
            "model.layers.0.self_attn.qkv_proj": "S0/3",
            "model.layers.0.self_attn.o_proj": "S1",
            "model.layers.0.mlp.gate_up_proj": "S0/2",
            "model.layers.0.mlp.down_proj": "S1",
        },
    ),
}
GATHERS = {"GPT2": 2, "GPTNeoX": 1, "Phi3": 2}
"""NeoX runs attention and MLP side by side: one gather and one scatter serve both."""


def model_and_batch(name: str, samples: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    kind, extra, _ = {**WEIGHTS, **OTHERS}[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra)
    model: nn.Module = getattr(transformers, kind)(config).train()
    ids = torch.randint(1, 96, (samples, 16))
    return model, {"input_ids": ids, "labels": ids}


OTHERS: dict[str, tuple[str, dict[str, Any], Names]] = {
    "Falcon": (
        "FalconForCausalLM",
        {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
        {},
    )
}


def differentiated(name: str, mesh: str) -> Compilation:
    model, batch = model_and_batch(name)
    unit = new_unit(capture(model, batch), Settings(Mesh.parse(mesh)))
    Pipeline(TRAIN.passes).run(unit, stop_after="differentiate", skip=())
    return unit


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_fused_weights_are_split_by_segments(name: str, size: int) -> None:
    unit = differentiated(name, f"dp=2,tp={size}")
    assert unit.placed is not None
    found = states_of(unit.placed)
    expected = WEIGHTS[name][2]
    assert {key: found[f"{key}.weight"] for key in expected} == expected
    layer = unit.variants[0].differentiated["block1"]
    assert layer.backward is not None
    count = GATHERS[name]
    sent = {"all_gather": count, "reduce_scatter": count, "all_reduce": 0}
    assert ops_of(layer.forward, *sent) == sent
    assert ops_of(layer.backward, *sent) == sent


def test_one_key_head_for_all_queries() -> None:
    """Falcon: query heads are more than the ranks, the one key head is less."""
    unit = differentiated("Falcon", "dp=2,tp=2")
    assert unit.placed is not None
    found = states_of(unit.placed)
    layer = "transformer.h.0"
    rows = [found[f"{layer}.{key}.weight"] for key in ("self_attention.dense", "mlp.dense_4h_to_h")]
    assert rows == ["S1", "S1"]
    assert found[f"{layer}.mlp.dense_h_to_4h.weight"] == "S0"
    assert found[f"{layer}.self_attention.query_key_value.weight"].startswith("S0")
    forward = unit.variants[0].differentiated["block1"].forward
    assert ops_of(forward, "reduce_scatter", "all_reduce") == {"reduce_scatter": 1, "all_reduce": 0}


@pytest.mark.parametrize("name", ["Phi3", "Falcon"])
def test_numbers_are_kept(name: str) -> None:
    model, batch = model_and_batch(name)
    found = msc.verify(model, batch, mesh="dp=2,tp=2", dtype=torch.float64)
    assert found.ok, found
