"""Equal inputs compile to byte-equal dumps, also where sets are ordered otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.ir import flags

ROOT = Path(__file__).parents[1]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        heads = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        result: Tensor = x + self.drop(self.down(functional.gelu(self.up(x))))
        return result


class Tied(nn.Module):
    """A transformer with dropout and one weight for embedding and output, at both ends of pp."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer(16, 2) for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def write_dumps(folder: Path, times: int) -> None:
    """Compile `times` times; write dump, passes' dump and fingerprint of each to a folder."""
    for number in range(times):
        out = folder / str(number)
        os.environ[flags.DUMP.name] = str(out / "passes")
        tokens = torch.zeros(8, 6, dtype=torch.int64)
        program = msc.compile(
            Tied(),
            (tokens, tokens),
            mesh="pp=2,dp=2,tp=2",
            microbatches=2,
            optimizer=msc.AdamW(lr=1e-3),
        )
        program.dump(out / "program")
        (out / "fingerprint.txt").write_text(program.fingerprint)
        (out / "report.txt").write_text(str(program.report.to_json()))


def run_apart(folder: Path, hash_seed: str, times: int) -> None:
    code = f"from tests.test_determinism import *; write_dumps(Path({str(folder)!r}), {times})"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_equal_inputs_give_byte_equal_dumps(tmp_path: Path) -> None:
    run_apart(tmp_path / "first", "0", times=2)
    run_apart(tmp_path / "other", "12345", times=1)
    first = contents(tmp_path / "first" / "0")
    assert {"fingerprint.txt", "report.txt", "passes/index.txt", "program/index.txt"} <= set(first)
    assert contents(tmp_path / "first" / "1") == first  # again in one process
    assert contents(tmp_path / "other" / "0") == first  # in another, with another order of sets
