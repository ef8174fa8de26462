"""What a step of GPT-3 175B takes on simulated A100 nodes, for more and more ranks.

    python benchmarks/simulated_step.py          # a table; results/simulated_step.json

The global batch is 6144 sequences, as in the strong scaling of MegaScale (Jiang et al., NSDI 2024,
section 6), on `tp=8` inside each node and `pp=8`, with GEMMs at the peak: a lower bound of time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/simulated_step.py`

import msc  # noqa: E402
from benchmarks.compile_time import gpt  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402
from benchmarks.models import GPT3_175B  # noqa: E402

BATCH = 6144
REPLICAS = (48, 96, 128, 192)
CLUSTER = "a100"
RESULT = Path(__file__).parent / "results" / "simulated_step.json"

_COLUMNS = {
    "ranks": "{:d}",
    "step_seconds": "{:.2f}",
    "mfu": "{:.1%}",
    "bubble": "{:.1%}",
    "exposed tp": "{:.2f}",
    "exposed pp": "{:.2f}",
    "exposed dp": "{:.2f}",
    "gibibytes": "{:.1f}",
    "cpu_seconds": "{:.2f}",
}


def simulated(replicas: int) -> dict[str, Any]:
    """One configuration: compile, simulate, and say what came out."""
    tokens = torch.empty(BATCH, GPT3_175B.sequence, dtype=torch.int64, device="meta")
    program = msc.compile(
        gpt(GPT3_175B.layers, 1),
        (tokens, tokens),
        mesh=f"pp=8,dp={replicas},tp=8",
        microbatches=BATCH // replicas,
        optimizer=msc.AdamW(),
    )
    start = time.process_time()
    result = program.simulate(CLUSTER)
    seconds = time.process_time() - start
    return {
        "ranks": result.mesh.size,
        "step_seconds": result.step_seconds,
        "mfu": result.mfu,
        "bubble": result.bubble,
        **{f"exposed {axis}": result.exposed[axis] for axis in ("tp", "pp", "dp")},
        "gibibytes": max(each.peak_memory_bytes for each in result.classes) / 2**30,
        "cpu_seconds": seconds,
    }


def main() -> None:
    """Simulate, print, write."""
    results = []
    print("".join(f"{name:>14}" for name in _COLUMNS))
    for replicas in REPLICAS:
        results.append(simulated(replicas))
        cells = [form.format(results[-1][name]) for name, form in _COLUMNS.items()]
        print("".join(f"{cell:>14}" for cell in cells), flush=True)
    facts = {"cluster": CLUSTER, "batch": BATCH, "hardware": hardware(), "results": results}
    RESULT.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
