"""Rules that users give their own ops: what they may say, what they may not, and what follows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import msc
from msc.ir.errors import PlanError, UserError
from msc.passes.sharding.rule import LocalCall, Localized
from msc.passes.sharding.rules import custom
from msc.testing.shards import RuleError

ops = torch.ops.msc_test


@torch.library.custom_op("msc_test::gate", mutates_args=())
def gate(x: Tensor, weight: Tensor) -> Tensor:
    """`[..., d], [d] -> [..., d]`, nowhere near plain torch ops in the graph."""
    return x * torch.sigmoid(weight)


@torch.library.custom_op("msc_test::gate_backward", mutates_args=())
def gate_backward(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(weight)
    return g * s, (g * x * s * (1 - s)).flatten(0, -2).sum(0)


@torch.library.custom_op("msc_test::project", mutates_args=())
def project(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """`[b, s, k], [n, k], [n] -> [b, s, n]`."""
    return torch.nn.functional.linear(x, weight, bias) * scale


@torch.library.custom_op("msc_test::spread", mutates_args=())
def spread(x: Tensor, size: int) -> Tensor:
    """`[b] -> [b, size]`."""
    return x[:, None].repeat(1, size)


@torch.library.custom_op("msc_test::moments", mutates_args=())
def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[b, n] -> [b], [b, n]`."""
    return x.amax(1), x.exp()


@torch.library.custom_op("msc_test::total", mutates_args=())
def total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


for _op in (gate, gate_backward, project, spread, moments, total):
    _op.register_fake(_op._init_fn)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))


def _project_gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, *bias = ctx.saved_tensors
    flat = g.flatten(0, 1) * ctx.scale
    gradient = flat.sum(0) if bias else None
    return g @ weight * ctx.scale, flat.T @ x.flatten(0, 1), gradient, None


def _save_with_scale(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save(ctx, inputs, output)
    ctx.scale = inputs[3]


def _moments_gradient(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return g[:, None] * (x == x.amax(1, keepdim=True)) + h * x.exp()  # type: ignore[no-any-return]


project.register_autograd(_project_gradient, setup_context=_save_with_scale)
moments.register_autograd(_moments_gradient, setup_context=_save)
spread.register_autograd(lambda ctx, g: (g.sum(1), None), setup_context=_save)
gate.register_autograd(lambda ctx, g: ops.gate_backward(g, *ctx.saved_tensors), setup_context=_save)


@pytest.fixture(autouse=True)
def forget_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "_RULES", {})


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def test_each_shared_factor_is_a_way_to_shard() -> None:
    msc.sharding_rule("msc_test::gate", "b s d, d -> b s d")
    found = msc.testing.check_sharding_rule(ops.gate, normal(6, 6, 12), normal(12))
    assert found[2:] == ["b: S0, R~ -> S0", "s: S1, R~ -> S1", "d: S2, S0 -> S2"]


def test_any_dims() -> None:
    msc.sharding_rule("msc_test::gate", "...d, d -> ...d", linear="x")
    found = msc.testing.check_sharding_rule(ops.gate, normal(6, 12), normal(12))
    assert found[2:] == ["-: P, R~ -> P", "e_0: S0, R~ -> S0", "d: S1, S0 -> S1"]


def test_a_factor_is_contracted_only_if_the_user_says_so() -> None:
    call = (ops.project, normal(2, 6, 12), normal(6, 12), None, 2.0)
    msc.sharding_rule("msc_test::project", "bsk, nk, n -> bsn")
    assert not any(way.startswith("k") for way in msc.testing.check_sharding_rule(*call))
    msc.sharding_rule("msc_test::project", "bsk, nk, n -> bsn", contracted={"k": "sum"})
    assert "k: S2, S1 -> P" in msc.testing.check_sharding_rule(*call)


def test_whole_factors() -> None:
    msc.sharding_rule("msc_test::gate", "b s d, d -> b s d", whole="sd")
    found = msc.testing.check_sharding_rule(ops.gate, normal(6, 6, 12), normal(12))
    assert found[2:] == ["b: S0, R~ -> S0"]


def test_a_reduction_for_each_result() -> None:
    msc.sharding_rule("msc_test::moments", "b n -> b, b n", contracted={"n": ("max", "sum")})
    found = msc.testing.check_sharding_rule(ops.moments, normal(6, 12))
    assert "n: S1 -> Pmax, S1" in found


def test_products_of_factors() -> None:
    msc.sharding_rule("msc_test::gate", "b (g d), (g d) -> b (g d)", lengths={"d": 2})
    found = msc.testing.check_sharding_rule(ops.gate, normal(6, 12), normal(12))
    assert found[2:] == [
        "b: S0, R~ -> S0",
        "g: S1, S0 -> S1",
        "d: S1/6, S0/6 -> S1/6",
    ]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({}, r"leaves the lengths of g, d open: give one of them by lengths="),
        ({"d": 5}, r"makes 10 of \(gd\), which in argument 'x' \[6, 12\] has length 12"),
    ],
)
def test_products_whose_factors_do_not_fit(lengths: dict[str, int], message: str) -> None:
    msc.sharding_rule("msc_test::gate", "b (g d), (g d) -> b (g d)", lengths=lengths)
    with pytest.raises(PlanError, match=message):
        msc.testing.check_sharding_rule(ops.gate, normal(6, 12), normal(12))


def test_localize_makes_sizes_local() -> None:
    def localize(local: LocalCall) -> Localized:
        return local.target, (local.args[0], local.result_shapes[0][1]), {}

    msc.sharding_rule("msc_test::spread", "b -> b n")
    assert msc.testing.check_sharding_rule(ops.spread, normal(6), 12)[2:] == ["b: S0 -> S0"]
    msc.sharding_rule("msc_test::spread", "b -> b n", localize=localize)
    assert msc.testing.check_sharding_rule(ops.spread, normal(6), 12)[2:] == [
        "b: S0 -> S0",
        "n: R~ -> S1",
    ]


def test_a_wrong_rule_is_found_on_shards() -> None:
    msc.sharding_rule("msc_test::moments", "b n -> b, b n", contracted={"n": "sum"})
    with pytest.raises(RuleError, match="result 0 is wrong"):
        msc.testing.check_sharding_rule(ops.moments, normal(6, 12))


def test_an_op_without_rule_is_no_check() -> None:
    with pytest.raises(RuleError, match="has no sharding rule"):
        msc.testing.check_sharding_rule(ops.gate, normal(6, 12), normal(12))


@pytest.mark.parametrize(
    ("op", "notation", "options", "message"),
    [
        ("gate", "b -> b", {}, "'gate' is no name of an op"),
        ("msc_test::gate", "b d, d", {}, "has to hold one '->'"),
        ("msc_test::gate", "b d, d -> b -> d", {}, "has to hold one '->'"),
        ("msc_test::gate", "b [d], d -> b d", {}, r"has the term 'b \[d\]'"),
        ("msc_test::gate", "... b ..., d -> b", {}, r"at most one '\.\.\.'"),
        ("msc_test::gate", "b b, d -> b d", {}, "names a factor twice in the term 'b b'"),
        ("msc_test::gate", "b d -> b d", {}, r"has 1 operands, but the op takes 2 tensors \(x, w"),
        ("msc_test::gate", "b d, d -> b d, d", {}, "has 2 results, but the op returns 1"),
        ("msc_test::gate", "b d, d -> b d", {"whole": "k"}, "has no factor 'k', which whole="),
        ("msc_test::gate", "b d, d -> b d", {"contracted": {"d": "sum"}}, "every result has it"),
        ("msc_test::gate", "b d, d -> b", {"contracted": {"d": "min"}}, "contracts 'd' by 'min'"),
        ("msc_test::gate", "b d, d -> b d", {"linear": "y"}, "has no tensor argument 'y'"),
        (
            "msc_test::moments",
            "b n -> b, b n",
            {"contracted": {"n": ("sum", "sum", "sum")}},
            "gives 'n' 3 reductions for 2 results",
        ),
        ("msc_test::total", "b -> b", {}, r"argument 'parts', which is a List\[Tensor\]"),
    ],
)
def test_refusals(op: str, notation: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        msc.sharding_rule(op, notation, **options)


def test_a_rule_given_before_its_op_is_checked_when_it_is_used() -> None:
    msc.sharding_rule("msc_test::later", "b -> b")

    @torch.library.custom_op("msc_test::later", mutates_args=())
    def later(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    with pytest.raises(UserError, match=r"msc_test::later has 1 operands, but the op takes 2"):
        msc.testing.check_sharding_rule(ops.later, normal(4), normal(4))


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("b d, d -> b d", r"says 'b d' of argument 'x', which has 3 dims \[2, 6, 12\]"),
        (
            "b d ..., d -> b d ...",
            r"gives factor 'd' length 6 and, in argument 'weight' \[12\], 12",
        ),
    ],
)
def test_shapes_that_a_rule_does_not_describe(notation: str, message: str) -> None:
    msc.sharding_rule("msc_test::gate", notation)
    with pytest.raises(PlanError, match=message):
        msc.testing.check_sharding_rule(ops.gate, normal(2, 6, 12), normal(12))


class Gated(nn.Module):
    """Linear layers with the user's op between them; labels that do not count vary by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.weight = nn.Parameter(torch.randn(24))
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.down(ops.gate(self.up(x), self.weight))
        return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())


def batch() -> tuple[Tensor, Tensor]:
    labels = torch.arange(48).reshape(8, 6) % 12
    labels[0, :4] = -100
    return normal(8, 6, 12), labels


def verified(mesh: str, microbatches: int = 1) -> Any:
    torch.manual_seed(0)
    report = msc.verify(
        Gated().double(), batch(), mesh=mesh, dtype=torch.float64, microbatches=microbatches
    )
    assert report.ok, report.first_difference
    return report


@pytest.mark.parametrize(("mesh", "microbatches"), [("tp=2", 1), ("dp=2,tp=2", 2), ("tp=3", 1)])
def test_a_model_with_a_ruled_op(mesh: str, microbatches: int) -> None:
    msc.sharding_rule("msc_test::gate", "b s d, d -> b s d")
    report = verified(mesh, microbatches)
    assert (report.fallbacks, report.notes) == ((), ())
    assert report.sharded["tp"]["flops"] > 0.95


def test_a_model_with_an_op_without_rule_runs_it_whole() -> None:
    said = "msc_test.gate has no sharding rule; it runs whole on every"
    cost = "(1,152 FLOPs of a step's forward, 2.0%; 18,624 bytes, 19.2%)"
    for axis in ("tp", "dp"):
        (line,) = verified(f"{axis}=2").fallbacks
        assert f"{said} {axis} rank" in line
        assert cost in line


def test_over_micro_batches_an_op_without_rule_is_no_sum() -> None:
    (note,) = verified("dp=2", 2).notes
    assert "(msc_test.gate.default) has no sharding rule, so that it may combine samples" in note


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(gate(x, self.weight)).square().mean()
        return result


def test_a_program_with_an_op_of_a_user_is_saved_by_its_name(tmp_path: Path) -> None:
    msc.sharding_rule("msc_test::gate", "... d, d -> ... d")
    batch = (torch.randn(4, 3, 4),)
    program = msc.compile(Small(), batch, mesh="tp=2", optimizer=msc.AdamW())
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    assert loaded.fingerprint == program.fingerprint
    assert torch.equal(loaded.run_virtual(batch).loss, program.run_virtual(batch).loss)
    code = f"import msc; msc.load({str(tmp_path)!r}, 0)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "calls msc_test.gate.default, which is not registered in this process" in found.stderr


def test_a_rule_with_two_letters_for_one_length_is_named() -> None:
    msc.sharding_rule("msc_test::gate", "b s d, e -> b s d")
    pins = {"head.weight": {"tp": msc.Shard(1)}}
    with pytest.raises(PlanError, match=r"rule 'b s d, e -> b s d' of msc_test::gate is wrong"):
        msc.compile(Small(), (torch.randn(1, 1, 4),), mesh="tp=2", pins=pins)
    with pytest.raises(RuleError, match="it does not run"):
        msc.testing.check_sharding_rule(ops.gate, torch.randn(6, 6, 6), torch.randn(6))
