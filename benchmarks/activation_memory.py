"""What a transformer layer saves for its backward, against the formulas of Korthikanti et al.

    python benchmarks/activation_memory.py       # a table; results/activation_memory.json

"Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023, table 2): with s the
sequence, b the micro-batch, h the hidden size, a the heads and t the tensor-parallel ranks, a layer
in 16 bits takes on each rank

    one device                  sbh (34 + 5as/h)
    tensor + sequence parallel  sbh/t (34 + 5as/h)
    ... selective               34 sbh/t
    ... full                    2 sbh/t    (2 sbh where the input of a layer is not sharded)

The sizes are those of its table 3. Compiled are three layers on the meta device; what the middle
one saves is read off MSC's graphs. The paper counts a byte for each element of a dropout mask;
MSC has keyed masks that nothing stores: they are added as an item of their own. Without
recomputation MSC keeps the two gathered inputs of a layer's linears whole, where the paper keeps
shards: that is the other item. MSC's statistics of the norms, 8sb/t, are in what it saves.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/activation_memory.py`

import msc  # noqa: E402
from msc.cost.flops import nbytes  # noqa: E402
from msc.ir.communication import subgraph  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SEQUENCE, VOCABULARY, TENSOR_PARALLEL, LAYERS = 2048, 51200, 8, 3
POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class Size:
    """A model of the paper's table 3; `batch` is the micro-batch."""

    name: str
    heads: int
    hidden: int
    batch: int


SIZES = (
    Size("22B", 64, 6144, 4),
    Size("175B", 96, 12288, 1),
    Size("530B", 128, 20480, 1),
    Size("1T", 160, 25600, 1),
)


class Layer(nn.Module):
    """The paper's figure 2: dropout behind the softmax, the projection and the MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.ln_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [batch, sequence, hidden], as is the result."""
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).split(hidden, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.projection(y.transpose(1, 2).reshape(batch, length, hidden)))
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.ln_2(x)))))
        return result


class GPT(nn.Module):
    """Embeddings with dropout, layers and the loss."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(SEQUENCE, hidden)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # as in Megatron-LM

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of [batch, sequence] tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Row:
    """Bytes of one layer on one rank.

    paper: the formula. saved: read off MSC's graphs. masks: of dropout, a byte an element.
    whole: what gathered inputs that are kept whole take beyond their shards.
    """

    size: str
    tensor_parallel: int
    policy: str
    paper: float
    saved: int
    masks: float
    whole: float

    @property
    def accounted(self) -> float:
        """MSC's saved bytes by the paper's accounting."""
        return self.saved + self.masks - self.whole


def measure(size: Size, tensor_parallel: int, policy: str) -> Row:
    """Compile, and compare what the middle layer saves with the paper's formula."""
    with torch.device("meta"):
        model = GPT(size.hidden, size.heads).to(torch.bfloat16)
    tokens = torch.empty(size.batch, SEQUENCE, dtype=torch.int64, device="meta")
    program = msc.compile(model, (tokens, tokens), mesh={"tp": tensor_parallel}, recompute=policy)
    sbh = SEQUENCE * size.batch * size.hidden
    scores = size.heads * SEQUENCE**2 * size.batch
    t = tensor_parallel
    paper, masks = {
        "none": ((34 * sbh + 5 * scores) / t, (2 * sbh + scores) / t),
        "selective": (34 * sbh / t, 2 * sbh / t),
        "full": (2 * sbh / t, 0.0),
    }[policy]
    whole = 4 * sbh * (1 - 1 / t) if policy == "none" else 0.0
    saved = saved_bytes(program.rank_graph(0), f"layers.{LAYERS // 2}")
    return Row(size.name, t, policy, paper, saved, masks, whole)


def saved_bytes(rank_graph: fx.GraphModule, path: str) -> int:
    """Bytes that the forward saves for the backward of the block at `path`."""
    (call,) = [n for n in rank_graph.graph.nodes if str(n.target).endswith("_forward")]
    chunk = subgraph(rank_graph, call)
    outputs: Any = chunk.graph.output_node().args[0]
    saved = set(outputs[2])
    (layer,) = [n for n in chunk.graph.nodes if n.op == "call_module" and _is(n, path)]
    results = [user for user in layer.users if user.target is operator.getitem]
    own = [node for node in results if node in saved and not _is_output(node)]
    received = [node for node in layer.all_input_nodes if node in saved and _is_output(node)]
    return sum(nbytes(node.meta["val"]) for node in own + received)


def _is(node: fx.Node, path: str) -> bool:
    return node.meta.get("module_path") == path


def _is_output(node: fx.Node) -> bool:
    """Whether a value is what a layer hands to the next one."""
    call: Any = node.args[0] if node.target is operator.getitem else None
    return isinstance(call, fx.Node) and "module_path" in call.meta and bool(node.args[1] == 0)


def main() -> None:
    """Measure all sizes, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=RESULTS / "activation_memory.json")
    args = parser.parse_args()
    rows = []
    print("MiB per layer and rank")
    names = ("paper", "MSC saves", "+ masks", "- whole", "=", "MSC / paper")
    print(f"{'':6}{'t':>3} {'policy':10}" + "".join(f"{name:>12}" for name in names))
    for size in SIZES:
        cases = [(TENSOR_PARALLEL, policy) for policy in POLICIES] + [(1, "none")]
        for tensor_parallel, policy in cases:
            row = measure(size, tensor_parallel, policy)
            rows.append(row)
            values = (row.paper, row.saved, row.masks, row.whole, row.accounted)
            numbers = "".join(f"{value / 2**20:12.1f}" for value in values)
            ratio = row.accounted / row.paper
            print(f"{row.size:6}{tensor_parallel:>3} {policy:10}{numbers}{ratio:12.4f}", flush=True)
    found = [{**asdict(row), "accounted": row.accounted} for row in rows]
    args.json.write_text(json.dumps({"sizes": [asdict(s) for s in SIZES], "rows": found}, indent=1))


if __name__ == "__main__":
    main()
