"""A captured graph, before and after normalization, computes what the model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from msc.capture.captured import Captured
from msc.capture.entry import capture
from msc.ir.structure import output_nodes
from msc.ir.verifier import structure
from msc.passes.normalize import normalize
from tests.capture.models import GPT, Llama, token_batch
from tests.capture.parity import assert_parity


def count(captured: Captured, *names: str) -> list[int]:
    targets = [str(node.target) for node in captured.graph.graph.nodes]
    return [targets.count(name) for name in names]


def assert_normal(captured: Captured) -> None:
    """What every captured graph promises."""
    graph: fx.Graph = captured.graph.graph
    assert structure(captured.graph) is None
    order = [node.meta["kind"] for node in graph.nodes if node.op == "placeholder"]
    ranks = {"parameter": 0, "buffer": 1, "input": 2, "rng": 3}
    assert order == sorted(order, key=ranks.__getitem__)
    assert len(output_nodes(captured.graph)) == 1
    for node in graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if node.op == "call_function":
            assert node.users
            assert node.meta.keys() >= {"module_path", "phase"}


def check(
    model: nn.Module,
    batch: Any,
    loss_of: Callable[[Any], Tensor],
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> Captured:
    captured = capture(model, batch, loss_fn=loss_fn, dtype=torch.float64)
    model.double()
    assert_normal(captured)
    assert_parity(captured, model, batch, loss_of)
    assert normalize(captured.graph) > 0
    assert_normal(captured)
    assert_parity(captured, model, batch, loss_of)
    assert normalize(captured.graph) == 0
    return captured


def test_gpt() -> None:
    torch.manual_seed(0)
    captured = check(GPT(), token_batch(), lambda out: out[1], lambda out: out[1])
    assert count(captured, "msc.linear.default", "msc.attention.default") == [9, 2]
    assert count(captured, "msc.embedding.default", "msc.nll_terms.default") == [2, 1]
    paths = {n.meta.get("module_path") for n in captured.graph.graph.nodes if n.op != "output"}
    assert {"wte", "h.0.attn", "h.1.down", "ln_f", "lm_head", ""} <= paths
    (head,) = [n for n in captured.graph.graph.nodes if n.meta.get("module_path") == "lm_head"]
    assert head.meta["source"].startswith("tests/capture/models.py:")


def test_llama() -> None:
    torch.manual_seed(0)
    captured = check(Llama(), token_batch(), lambda out: out["loss"])
    assert count(captured, "msc.linear.default", "msc.attention.default") == [15, 2]


def transformers_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "vocab_size": 32,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    options: dict[str, dict[str, Any]] = {
        "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "Llama": {"num_key_value_heads": 2},
        "Mistral": {"num_key_value_heads": 2, "sliding_window": 4},
        "Qwen2": {"num_key_value_heads": 2},
        "GPTNeoX": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    }
    config = getattr(transformers, f"{name}Config")(**(sizes | options[name]))
    kind = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM"}.get(name, "ForCausalLM")
    model: nn.Module = getattr(transformers, name + kind)(config)
    return model.train()


@pytest.mark.filterwarnings("ignore")  # what transformers warns about at import is its own
@pytest.mark.parametrize(
    ("name", "linears", "window"),
    [
        ("GPT2", 9, 0),
        ("Llama", 15, 0),
        ("Mistral", 15, 4),
        ("Qwen2", 15, 0),
        ("GPTNeoX", 9, 0),
    ],
)
def test_transformers_decoders(name: str, linears: int, window: int) -> None:
    torch.manual_seed(0)
    model = transformers_model(name)
    ids, labels = token_batch(length=12)
    captured = check(model, {"input_ids": ids, "labels": labels}, lambda out: out.loss)
    assert count(captured, "msc.linear.default", "msc.attention.default") == [linears, 2]
    for node in captured.graph.graph.nodes:
        if str(node.target) == "msc.attention.default":
            _, k, _, mask, _, causal, *rest = node.args
            assert mask is None
            assert causal
            assert rest == ([window] if window else [])
            assert k.meta["val"].shape[1] == (2 if name in ("Llama", "Mistral", "Qwen2") else 4)


@pytest.mark.filterwarnings("ignore")
def test_transformers_bert_with_padding() -> None:
    torch.manual_seed(0)
    ids, labels = token_batch(length=12)
    padding = torch.ones_like(ids)
    padding[1, 8:] = 0
    batch = {"input_ids": ids, "attention_mask": padding, "labels": labels}
    captured = check(transformers_model("Bert"), batch, lambda out: out.loss)
    assert count(captured, "msc.linear.default", "msc.attention.default") == [14, 2]
    assert count(captured, "aten.index.Tensor") == [0]  # the padding mask is a view


def test_the_global_batch_may_be_one() -> None:
    torch.manual_seed(0)
    captured = check(GPT(), token_batch(batch=1), lambda out: out[1], lambda out: out[1])
    assert captured.batch_size == 1
    assert captured.notes == []


def test_other_numbers_than_those_captured() -> None:
    torch.manual_seed(0)
    model = Llama().double()
    captured = capture(model, token_batch())
    assert_parity(captured, model, token_batch(), lambda out: out["loss"])
