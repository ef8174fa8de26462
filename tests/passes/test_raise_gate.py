"""An activation that gates another value becomes one op, which saves less for the backward."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import msc
from msc.ir.ops.gate import GATED
from msc.passes.raise_gate import RaiseGate
from tests import models
from tests.passes.graphs import ATEN, Forward, evaluate, random_values


def gate(name: str, swapped: bool = False, kept: bool = False, rows: int = 6) -> fx.GraphModule:
    b = Forward()
    active = b.call(getattr(ATEN, name).default, b.input("gate", 6, 4), path="act")
    up = b.input("up", rows, 4)
    y = b.call(ATEN.mul.Tensor, *((up, active) if swapped else (active, up)), path="mlp")
    return b.done(y, *[active] * kept)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_gate_is_raised(name: str, swapped: bool) -> None:
    gm = gate(name, swapped)
    assert RaiseGate().run(gm, None) == 1
    gm.recompile()
    (node,) = gm.graph.find_nodes(op="call_function", target=GATED)
    assert node.args[2] == name
    assert node.meta["module_path"] == "mlp"
    values = random_values(gm)
    assert torch.equal(evaluate(gm, values)[0], evaluate(gate(name, swapped), values)[0])
    assert RaiseGate().run(gm, None) == 0


def test_what_is_left_alone() -> None:
    assert RaiseGate().run(gate("silu", kept=True), None) == 0
    assert RaiseGate().run(gate("silu", rows=1), None) == 0
    assert RaiseGate().run(gate("tanh"), None) == 0


def test_the_result_of_the_activation_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer, bytes of one value of the width of the MLP."""
    batch = models.tokens(samples=4)
    found = []
    for skipped in ("raise-gate", ""):
        monkeypatch.setenv("MSC_SKIP", skipped)
        torch.manual_seed(0)
        program = msc.compile(models.Llama(layers=3, width=32), batch, precision="float32")
        found.append(program.memory_bytes()[0])
    saved = 4 * batch[0].shape[1] * 64 * 4
    assert found[0] - found[1] == pytest.approx(3 * saved, rel=0.34)
