"""Every optimizer computes on every mesh what torch (of LAMB, the paper) computes on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import msc
from msc.ir.optimizer import Optimizer
from msc.program import Program
from msc.runtime.state import RankState
from msc.verification import Reference
from tests import models
from tests.lamb import PlainLAMB
from tests.parity.captures import capture_once as capture_once
from tests.parity.errors import parameter_errors
from tests.single import torch_optimizer

pytestmark = pytest.mark.usefixtures("capture_once")

STEPS = 4
MAX_NORM = 0.3
SCHEDULE = msc.LearningRate.cosine(2e-2, steps=5, warmup=2, final=1e-3)
GROUPS = (
    msc.ParameterGroup("lm_head.weight", lr=5e-3),  # an alias: the tied weight is wte.weight
    msc.ParameterGroup("*", max_dims=1, weight_decay=0.0),
)
LAMB: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SPECS: dict[str, Optimizer] = {
    "adamw": msc.AdamW(lr=SCHEDULE, weight_decay=0.1, groups=GROUPS, max_norm=MAX_NORM),
    "adam": msc.Adam(lr=1e-2, weight_decay=0.1),
    "sgd": msc.SGD(lr=SCHEDULE, momentum=0.9, dampening=0.2, weight_decay=0.1, groups=GROUPS),
    "nesterov": msc.SGD(lr=0.1, momentum=0.9, nesterov=True, max_norm=MAX_NORM),
    "lamb": msc.LAMB(**LAMB, max_norm=MAX_NORM),
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("adamw", "pp=2,dp=2,tp=2", {}),
    ("sgd", "pp=2,dp=2,tp=2", {}),
    ("lamb", "pp=2,dp=2,tp=2", {}),
    ("lamb", "tp=2", {}),
    ("lamb", "pp=2", {}),
    ("adamw", "dp=2,tp=2", {"zero": 1}),
    ("lamb", "pp=2,dp=2", {"zero": 2}),
    ("adamw", "dp=4", {"zero": 3, "microbatches": 1}),
    ("lamb", "dp=4", {"zero": 1, "shard_group": 2, "microbatches": 1}),
]


@functools.cache
def model() -> nn.Module:
    """Three heads, of which tp=2 has two and one; a tied weight; vectors; a frozen parameter."""
    torch.manual_seed(0)
    found = models.GPT(width=12, heads=3, layers=2)
    found.wpe.requires_grad_(False)
    return found


def compiled(spec: Optimizer, mesh: str = "", **options: Any) -> Program:
    settings = {"microbatches": 2, "precision": "float64", **options}
    return msc.compile(model(), models.tokens(), mesh=mesh, optimizer=spec, **settings)


def trained(program: Program) -> tuple[dict[str, Tensor], list[RankState]]:
    state = None
    for seed in range(STEPS):
        result = program.run_virtual(models.tokens(seed), state)
        state = result.state
    return result.params, result.state


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    """The parameters after all steps, by plain optimizers on the single-device program."""
    spec = SPECS[name]
    program = msc.compile(model(), models.tokens(), precision="float64")
    reference = Reference(program, model(), models.tokens(), {})
    values = {n: nn.Parameter(program.read_parameter(n).clone()) for n in program.parameters}
    own = {n: values[n] for n, layout in program.parameters.items() if layout.trainable}
    start: Any = replace(spec, lr=0.0) if isinstance(spec.lr, msc.LearningRate) else spec  # type: ignore[call-arg]
    optimizer = None if name == "lamb" else torch_optimizer(start, own, aliases(program))
    lamb = PlainLAMB(**LAMB)
    for seed in range(STEPS):
        _, grads = reference.run(models.tokens(seed), values)
        for each, value in own.items():
            value.grad = grads[each]
        if spec.max_norm is not None:
            nn.utils.clip_grad_norm_(list(own.values()), spec.max_norm)
        if optimizer is None:
            with torch.no_grad():
                lamb.step(own, {n: v.grad for n, v in own.items() if v.grad is not None})
            continue
        for group in optimizer.param_groups:
            if isinstance(spec.lr, msc.LearningRate) and group["lr"] != 5e-3:
                group["lr"] = rate(seed + 1)
        optimizer.step()
    return {n: value.detach() for n, value in values.items()}


def aliases(program: Program) -> dict[str, tuple[str, ...]]:
    return {n: (n, *layout.aliases) for n, layout in program.parameters.items()}


def rate(step: int) -> float:
    """`SCHEDULE`, which goes up by halves, and down along a cosine of three steps."""
    return (1e-2, 2e-2, 1.525e-2, 5.75e-3)[step - 1]


@pytest.mark.parametrize("name", SPECS)
def test_one_rank_equals_plain_optimizers(name: str) -> None:
    found, _ = trained(compiled(SPECS[name]))
    assert parameter_errors(found, expected(name), 1e-12) == {}
    assert torch.equal(found["wpe.weight"], expected(name)["wpe.weight"])


@pytest.mark.parametrize(("name", "mesh", "options"), CASES)
def test_a_mesh_equals_one_rank(name: str, mesh: str, options: dict[str, Any]) -> None:
    """Shards, what is replicated, and what is tied over two stages; every copy the same bits."""
    program = compiled(SPECS[name], mesh, **options)
    found, state = trained(program)
    # Adam divides by the root of the second moment, which magnifies the rounding of small gradients
    tolerance = 1e-10 if name in ("sgd", "nesterov") else 1e-8
    assert parameter_errors(found, expected(name), tolerance) == {}
    first: dict[Any, Tensor] = {}
    for rank, each in enumerate(state):
        coordinate = program.mesh.coordinate(rank)
        for parameter, value in each.parameters.items():
            layout = program.parameters[parameter]
            shard = [coordinate[axis] for axis in layout.shards]
            if layout.data is not None:
                assert layout.trainable or options["zero"] == 3
                shard.append(coordinate["dp"] % layout.data.parts)
            assert torch.equal(value, first.setdefault((parameter, *shard), value)), parameter


@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_master_weights(name: str) -> None:
    """bf16-mixed keeps parameters and states in float32, and follows the exact steps."""
    spec = replace(SPECS[name], skip_nonfinite=True)
    found, (state,) = trained(compiled(spec, precision="bf16-mixed"))
    kept = (*state.parameters.values(), *state.moments.values())
    assert {value.dtype for value in kept} == {torch.float32}
    start = compiled(spec).state_dict()
    for parameter in ("wte.weight", "h.0.up.weight", "h.1.attn.weight"):
        exact = expected(name)[parameter]
        moved = (exact - start[parameter]).norm()
        assert float((found[parameter] - exact).norm()) < 0.1 * float(moved), parameter


def test_a_saved_program_has_its_optimizer(tmp_path: Path) -> None:
    program = compiled(SPECS["adamw"], "tp=2")
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    assert loaded.optimizer == SPECS["adamw"]
    assert loaded.fingerprint == program.fingerprint
    (found, _), (same, _) = trained(loaded), trained(program)
    assert all(torch.equal(found[name], same[name]) for name in same)
    other = replace(SPECS["adamw"], groups=GROUPS[:1])
    assert compiled(other, "tp=2").fingerprint != program.fingerprint


def test_what_is_kept_of_a_parameter_depends_on_its_group(tmp_path: Path) -> None:
    groups = [msc.ParameterGroup("h.*", momentum=0.0)]
    program = compiled(msc.SGD(lr=0.1, momentum=0.9, groups=groups), microbatches=1)
    plain = compiled(msc.SGD(lr=0.1), microbatches=1)
    names = [n for n, p in program.parameters.items() if p.trainable and not n.startswith("h.")]
    assert program.optimizer_states() == {"momentum": names}
    assert plain.optimizer_states() == {}
    kept = sum(program.read_parameter(name).nbytes for name in names)
    assert program.memory_bytes()[0] == plain.memory_bytes()[0] + kept
    program.save(tmp_path)
    with msc.Trainer(msc.load(tmp_path), [models.tokens()], log=False) as trainer:
        trainer.fit(1)
        state = trainer.optimizer_state_dict()
    assert {name: list(values) for name, values in state.items() if name != "step"} == {
        "momentum": names
    }
    step = program.run_virtual(models.tokens())
    assert all(torch.equal(state["momentum"][name], step.grads[name]) for name in names)
