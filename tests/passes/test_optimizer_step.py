"""The optimizer in the rank graph: one reduction of norms, groups, nothing for the host to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from msc.ir import actions
from msc.ir.optimizer import LAMB, SGD, AdamW, LearningRate, Optimizer
from msc.runtime import adam, sgd
from msc.runtime.actions import LocalActions
from tests.passes.graphs import compilation, layers, through

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
NAMES = ["layers.0.up.weight", "layers.0.down.weight"]
RATE = LearningRate.cosine(0.1, steps=10, warmup=2)


def built(spec: Optimizer, mesh: str = "", groups: Any = ()) -> list[fx.GraphModule]:
    names = [*NAMES, "layers.1.up.weight", "layers.1.down.weight", "head.weight"]
    optimizers = {name: own for name, own in groups if name in names}
    unit = compilation(layers(2), mesh, 2, optimizer=spec, optimizers=optimizers)
    return through("check-communication", unit).rank_graphs


def calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize(("mesh", "axes"), [("", []), ("dp=2", []), ("pp=2", []), ("tp=2", ["tp"])])
def test_one_all_reduce_gives_all_norms(mesh: str, axes: list[str]) -> None:
    """Over the axes that shard parameters alone; of all sets of hyperparameters at once."""
    groups = [(name, LAMB(weight_decay=0.0)) for name in NAMES]
    for gm in built(LAMB(), mesh, groups):
        first = calls(gm, actions.lamb_sums)
        assert len(first) == len(calls(gm, actions.lamb)) == (1 if mesh == "pp=2" else 2)
        found = [
            node.args[2]
            for node in calls(gm, ALL_REDUCE)
            if isinstance(node.args[0], fx.Node)
            and node.args[0].target is torch.ops.aten.cat.default
        ]
        assert found == axes
        assert {count for node in first for count in node.args[7]} == {1}  # type: ignore[union-attr]


def test_a_node_for_each_set_of_hyperparameters() -> None:
    (gm,) = built(AdamW(), groups=[(NAMES[0], AdamW(lr=RATE, betas=(0.5, 0.6)))])
    rest, own = sorted(calls(gm, actions.adam), key=lambda node: len(node.args[0]), reverse=True)  # type: ignore[arg-type]
    (rate,) = calls(gm, actions.learning_rate)
    assert own.args[4:] == (rate, (0.5, 0.6), 1e-8, 1e-2, True)
    assert rest.args[4:] == (1e-3, (0.9, 0.999), 1e-8, 1e-2, True)
    assert [node.meta["name"] for node in own.args[0]] == [NAMES[0]]  # type: ignore[union-attr]
    assert sorted(gm.meta["parameters"]) == sorted(gm.meta["gradients"])
    assert len(gm.meta["optimizer"]) == 2 * len(gm.meta["gradients"])


def test_no_momentum_keeps_no_state() -> None:
    (gm,) = built(SGD(momentum=0.9), groups=[(NAMES[0], SGD())])
    kinds = [n.meta["name"] for n in gm.graph.find_nodes(op="placeholder")]
    assert f"momentum.{NAMES[0]}" not in kinds
    assert f"momentum.{NAMES[1]}" in kinds


def test_every_rank_tells_the_same() -> None:
    """Also a stage that trains nothing has the norm, the count and the rate."""
    outputs: list[Any] = [
        gm.graph.output_node().args[0] for gm in built(AdamW(lr=RATE, max_norm=1.0), "pp=2")
    ]
    for each in outputs:
        assert {"grad_norm", "skipped", "learning_rate"} <= each.keys()


@pytest.mark.parametrize("kind", ["adam", "sgd", "lamb"])
def test_the_host_reads_no_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without numbers stand for those of a device: whoever read one would fail."""
    # torch's fused kernels have no form for them
    monkeypatch.setattr(adam, "fused_adam_", lambda *tensors, **options: None)
    monkeypatch.setattr(sgd, "fused_sgd_", lambda *tensors, **options: None)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rt = LocalActions
    parameters, gradients, first, second = ([some(3, 2), some(4)] for _ in range(4))
    norm = rt.squared_norm(gradients, [1, 1]).sqrt()
    skip = ~norm.isfinite()
    step = torch.tensor(3) - some(dtype=torch.int64)
    lr = rt.learning_rate(step, RATE.phases, RATE.held)
    given = (parameters, gradients, (first, second), step)
    if kind == "sgd":
        found, _ = rt.sgd(*given[:2], (first,), step, lr, 0.9, 0.1, 0.1, False, norm, skip)
    elif kind == "lamb":
        rest = ((0.9, 0.99), 1e-8, 0.1)
        sums, states = rt.lamb_sums(*given, *rest, [1, 1], norm, skip)
        found, _ = rt.lamb(parameters, sums, states, step, lr, *rest, skip)
    else:
        found, _ = rt.adam(*given, lr, (0.9, 0.99), 1e-8, 0.1, True, norm, skip)
    assert {lr.device.type, *(value.device.type for value in found)} == {"meta"}
