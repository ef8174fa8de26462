"""Which kernels a fused collective gets, why another gets none, and that a device takes them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import msc
from msc.codegen.emit import emit
from msc.codegen.kernel_calls.choice import choose
from msc.codegen.kernel_calls.device import kernels_for
from msc.codegen.kernel_calls.fused_collectives import gather_plan, scatter_plan
from msc.ir.communication import fused_nodes
from msc.ir.errors import PlanError

SM_90 = kernels_for("sm_90")
M, K = 2048, 1024


def like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gather(kernels: Any = SM_90, x: Tensor | None = None, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "dim": 1, "weights": [like(512, K)], "biases": [None], "transposed": [False],
        "others": [], "is_first": [], "keep": False, "size": 4, "group": "tp",
    }  # fmt: skip
    shard = like(1, M // 4, K) if x is None else x
    return gather_plan(kernels, shard, *(given | changes).values())


def scatter(kernels: Any = SM_90, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "x": like(1, M, K), "weight": like(512, K), "add": None, "transposed": False,
        "dim": 1, "size": 4, "group": "tp",
    }  # fmt: skip
    return scatter_plan(kernels, *(given | changes).values())


def test_weights_of_one_form_share_a_kernel() -> None:
    plan = gather(
        weights=[like(512, K), like(K, 64), like(256, K), like(256, K)],
        biases=[None, None, None, like(256)],
        transposed=[False, True, False, False],
    )
    assert [numbers for _, numbers in plan.products] == [(0, 2), (1,), (3,)]
    names = [kernel.name for kernel in plan.kernels]
    assert names == [
        "gather_gemm_nk_tp4_2048x1024_to_512_256_bf16",
        "gather_gemm_kn_tp4_2048x1024_to_64_bf16",
        "gather_gemm_nk_tp4_2048x1024_to_256_bias_bf16",
    ]


def test_the_library_multiplies_over_rows_behind_a_product() -> None:
    """It is as fast once all rows are there; alone, the kernel starts with those that are."""
    others: dict[str, Any] = {"others": [like(1, M, 64)], "is_first": [False]}
    assert [kernel.entry for kernel in gather(**others).kernels] == ["gather_gemm"]
    alone = gather(weights=[], biases=[], transposed=[], **others)
    assert [kernel.name for kernel in alone.kernels] == [
        "gather_x_weight_gradient_tp4_2048x64x1024_bf16"
    ]
    everywhere = dataclasses.replace(SM_90, everywhere=True)
    both = [kernel.entry for kernel in gather(everywhere, **others).kernels]
    assert both == ["gather_gemm", "gather_weight_gradient"]


SHARED = dataclasses.replace(SM_90, shared=True)


def test_ranks_on_one_device_leave_each_other_room() -> None:
    for plan in (gather(SHARED, weights=[like(16384, K)]), scatter(SHARED)):
        assert max(kernel.grid[0] for kernel in plan.kernels) <= (132 - 36) // 4
    # of processes each has a device; but a sum leaves half of it to what runs beside it
    assert gather(weights=[like(16384, K)]).kernels[0].grid == (132,)
    makes, adds = scatter(weight=like(16384, K)).kernels
    assert (makes.grid[0], adds.grid[0]) == (132, 66)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: gather(x=like(1, 8, K, dtype=torch.float64)), "bfloat16 and float64"),
    (
        lambda: scatter(x=like(1, M, K).double(), weight=like(8, K).double()),
        "no kernel computes on float64",
    ),
    (lambda: scatter(add=like(512, dtype=torch.float32)), "one dtype, not bfloat16 and float32"),
    (lambda: scatter(x=like(1, 0, K)), "a product with sizes 0, 512, 1024 is empty"),
    (lambda: scatter(x=like(1, 2050, K)), "2050 rows do not divide over 4 ranks"),
    (lambda: gather(size=1), "a group of one rank moves nothing that could be hidden"),
    (
        lambda: scatter(SHARED, x=like(1, 1024, K), size=128),
        "the kernels of 128 ranks, which wait for each other, do not fit on 132 processors",
    ),
    (lambda: gather(dataclasses.replace(SM_90, unfused="not here")), "^not here$"),
]


@pytest.mark.parametrize(("call", "reason"), REFUSED)
def test_refusals(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        call()


def program() -> msc.Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    options: dict[str, Any] = {"mesh": "tp=2", "fuse_collectives": True}
    return msc.compile(
        model,
        (torch.randn(4, 8, 16),),
        precision="float32",
        loss_fn=lambda y: y.square().mean(),
        **options,
    )


def test_a_program_shows_and_calls_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSC_TRITON", "interpret")
    made = program()
    choice = made.kernels()
    text = str(made.explain())
    assert (
        "msc.matmul_reduce_scatter in 2: Triton, gemm_scatter_nk_tp2_32x16x16_fp32, "
        "scatter_sum_tp2_32x16_fp32: a tile goes to the rank that owns it when it is made; between "
        "processes on the CPU in ATen, which multiplies in shared memory"
    ) in text.replace("\n", " ")
    made.dump(tmp_path)
    written = {path.read_text() for path in (tmp_path / "kernels").glob("*.py")}
    nodes = fused_nodes(made.rank_graph(0))
    calls = [call for node in nodes if (call := choice.fused(node)) is not None]
    assert len(calls) == len(nodes)
    own = {kernel.source for call in calls for kernel in call.kernels}
    assert own
    assert own <= written
    emitted = emit(made.rank_graph(0), "virtual", choice=choice)
    assert emitted.source.count("kernel=msc_matmul_reduce_scatter_kernel") == 1
    assert emitted.source.count("kernel=msc_all_gather_matmul_kernel") == 1
    assert all("msc.all_gather_matmul" not in str(d) for d in choice.decisions if not d.kernels)


def test_between_processes_on_the_cpu_the_reason_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSC_TRITON", "interpret")
    made = program()
    with pytest.warns(RuntimeWarning, match="multiply in shared memory"):
        choice = choose(torch.device("cpu"), made.rank_graphs, unfused="multiply in shared memory")
    assert not choice.has_fused
    assert "kernel=msc_matmul" not in emit(made.rank_graph(0), "process", None, choice).source


COMPILED = """
import json
from msc.codegen.kernels.ahead_of_time import compile_kernel
from tests.codegen.kernel_calls.test_fused_collectives import gather, like, scatter, K, M

plans = [
    gather(weights=[like(512, K), like(256, K)], biases=[None] * 2, transposed=[False] * 2),
    scatter(add=like(512)),
    scatter(weight=like(K, 520), add=like(1, M, 520), transposed=True),
]
rows = [compile_kernel(kernel) for plan in plans for kernel in plan.kernels]
print(json.dumps([[row.name, row.faults()] for row in rows]))
"""


def test_a_device_takes_them() -> None:
    """Without a spill, within shared memory, in order: the gate of `make kernels`."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=environment | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 5
    assert [row for row in rows if row[1]] == []
