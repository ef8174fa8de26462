"""Which heads become one op with their loss, and what is said of those that do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.ir.ops.linear import LINEAR
from msc.ir.ops.linear_loss import LINEAR_NLL_TERMS, LINEAR_NLL_TERMS_BACKWARD
from msc.ir.ops.loss import NLL_TERMS
from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.printer import format_graph
from msc.passes.compilation import Compilation
from msc.passes.fuse_loss.apply import fuse_heads

N, S, K, V = 4, 6, 8, 52


class Head(nn.Module):
    """A layer, a head and a loss of its logits `[n, s, v]` and labels `[n, s]`."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.loss = loss
        self.up = nn.Linear(K, K)
        self.head = nn.Linear(K, V, **options)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.up(x))), labels)


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (N, S), generator=generator)
    labels[0, :3] = -100
    return torch.randn(N, S, K, generator=generator).to(dtype), labels


def compiled(
    loss: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype = torch.float64,
    bias: bool = False,
    **options: Any,
) -> msc.Program:
    torch.manual_seed(0)
    return msc.compile(Head(loss, bias=bias).to(dtype), batch(dtype), fuse_loss=True, **options)


def calls(program: msc.Program, target: Any) -> list[Any]:
    graphs = program.graphs(0).values()
    return [node for gm in graphs for node in gm.graph.nodes if node.target == target]


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, V), labels[..., 1:].reshape(-1)
    )


def classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), labels)


def last_position(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, -1], labels[:, -1])


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(2.5 * torch.tanh(logits / 2.5), labels)


def scaled(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(0.3 * logits, labels)


def divided_and_capped(logits: Tensor, labels: Tensor) -> Tensor:
    return capped(logits[:, 1:] / 8.0, labels[:, 1:])


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    logs = functional.log_softmax(logits.view(-1, V), -1)
    return functional.nll_loss(logs, labels.view(-1), reduction="sum")


def in_float32(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits.float(), labels)


@pytest.mark.parametrize(
    ("loss", "bias"),
    [
        (flat, False),
        (flat, True),
        (shifted, False),
        (classes_second, True),
        (last_position, False),
        (capped, True),
        (scaled, False),
        (divided_and_capped, False),
        (likelihood, False),
    ],
)
def test_what_is_fused(loss: Callable[[Tensor, Tensor], Tensor], bias: bool) -> None:
    program = compiled(loss, bias=bias, mesh="tp=2")
    (node,) = calls(program, LINEAR_NLL_TERMS)
    assert not calls(program, NLL_TERMS)
    assert not calls(program, LINEAR)[1:]  # that of `up` alone is left
    (line,) = program.report.fused_losses
    assert line.startswith("fuse-loss, head: one op with its cross entropy")
    assert program.report.notes == ()
    assert (node.args[2] is not None) == bias
    cap = node.args[6] if len(node.args) > 6 else 0.0
    assert cap == (2.5 if loss in (capped, divided_and_capped) else 0.0)
    positions: dict[Any, int] = {shifted: S - 1, divided_and_capped: S - 1, last_position: 1}
    rows = N * positions.get(loss, S)
    assert node.args[0].meta["val"].shape[:-1].numel() == rows
    torch.manual_seed(0)
    model = Head(loss, bias=bias).double()
    model(*batch()).backward()
    found = program.run_virtual(batch()).grads
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Local(UnitPass):
    """Keeps the text of the block of the loss, where a second run has nothing to do."""

    name: ClassVar[str] = "local"
    numerics: ClassVar[str] = BIT_EXACT
    texts: list[str] = field(default_factory=list, repr=False)

    def run(self, unit: Compilation) -> int:
        """Look only."""
        gm = unit.variants[0].local[unit.structure.instances[unit.structure.loss.instance].block].gm
        assert fuse_heads(gm, unit.fake_mode) == []
        self.texts.append(format_graph(gm))
        return 0


def test_rows_of_x_are_moved_as_those_of_logits_were() -> None:
    seen = Local()
    compiled(shifted, passes={"after:fuse-loss": seen})
    (text,) = seen.texts
    lines = [line.split("  #")[0] for line in text.splitlines()]
    (first,) = [number for number, line in enumerate(lines) if "aten.slice.Tensor" in line]
    assert lines[first : first + 3] == [
        "%slice_tensor_1: f64[4,5,8] = aten.slice.Tensor(%tanh_default, 1, 0, -1)",
        "%reshape_default_1: f64[20,8] = aten.reshape(%slice_tensor_1, [20, 8])",
        "%linear_nll_terms_default: (f64[20], f64[20]) = msc.linear_nll_terms("
        "%reshape_default_1, %head_weight, None, %reshape, None, False, 0.0)",
    ]


def test_a_conversion_of_half_types_is_what_the_op_does_anyway() -> None:
    (node,) = calls(compiled(in_float32, torch.bfloat16), LINEAR_NLL_TERMS)
    assert node.args[0].meta["val"].dtype == torch.bfloat16
    casts = calls(compiled(in_float32, torch.bfloat16), torch.ops.aten._to_copy.default)
    assert all(cast.meta["val"].numel() < N * S * V for cast in casts)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, V), labels.view(-1), label_smoothing=0.1)


def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) + 1e-4 * logits.logsumexp(-1).square().mean()


def scaled_behind_a_cap(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(0.5 * torch.tanh(logits), labels)


def capped_and_scaled(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(2.0 * (2.5 * torch.tanh(logits / 2.5)) / 4.0, labels)


def cut_vocabulary(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[..., :-2].reshape(-1, V - 2), labels.view(-1) % 8)


def regrouped(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, V // 2), labels.repeat(1, 2).view(-1) % 6)


def one_row(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[-1, -1], labels[-1, -1])


LEFT = [
    (one_row, torch.float64, "head: left alone: its logits are those of one row"),
    (
        smoothed,
        torch.float64,
        r"head: left alone: logits %\w+ have 2 readers, so they must be in memory",
    ),
    (with_z_loss, torch.float64, r"head: left alone: logits %\w+ have 2 readers"),
    (
        scaled_behind_a_cap,
        torch.float64,
        "head: left alone: aten.tanh makes its logits, and no linear layer",
    ),
    (capped_and_scaled, torch.float64, "head: left alone: its logits are scaled behind a soft cap"),
    (cut_vocabulary, torch.float64, "head: left alone: aten.slice.Tensor cuts or regroups the voc"),
    (regrouped, torch.float64, "head: left alone: aten.reshape cuts or regroups the vocabulary"),
    (
        in_float32,
        torch.float64,
        "head: left alone: its logits are converted from f64 to f32, in which the loss is",
    ),
]


@pytest.mark.parametrize(("loss", "dtype", "reason"), LEFT)
def test_what_is_left_alone(
    loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, reason: str
) -> None:
    program = compiled(loss, dtype)
    assert not calls(program, LINEAR_NLL_TERMS)
    (line,) = program.report.fused_losses
    assert re.search(reason, line)
    (note,) = program.report.notes
    assert note == (
        "fuse_loss=True has no effect: no linear layer could be fused with its loss, as "
        "report.fused_losses says."
    )


def test_scaled_logits_of_a_layer_with_a_bias_are_left_alone() -> None:
    (line,) = compiled(scaled, bias=True).report.fused_losses
    assert "head: left alone: its logits are scaled behind a bias" in line


def test_a_loss_that_is_no_cross_entropy_of_classes() -> None:
    program = compiled(lambda logits, labels: logits.square().mean())
    assert program.report.fused_losses == ()
    (note,) = program.report.notes
    assert note == "fuse_loss=True has no effect: the model has no cross entropy of class numbers."


class TwoHeads(nn.Module):
    """Both read one stream; the second head predicts a position further on, and is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(K, K)
        self.first = nn.Linear(K, V, bias=False)
        self.second = nn.Linear(K, V, bias=False)
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        return flat(self.first(x), labels) + shifted(self.second(x), labels)


def test_each_head_of_several() -> None:
    torch.manual_seed(0)
    model = TwoHeads().double()
    program = msc.compile(model, batch(), fuse_loss=True)
    assert [line.split(":")[0] for line in program.report.fused_losses] == [
        "fuse-loss, first",
        "fuse-loss, second",
    ]
    backward = calls(program, LINEAR_NLL_TERMS_BACKWARD)
    assert sorted(node.args[-1] for node in backward) == [[True, False, False], [True, True, False]]
    report = msc.verify(model, batch(), mesh="dp=2,tp=2", fuse_loss=True)
    assert report.ok, report.first_difference
    assert report.max_error < 1e-12


def test_a_head_that_is_all_that_trains() -> None:
    torch.manual_seed(0)
    model = Head(flat).double()
    model.up.requires_grad_(False)
    (node,) = calls(
        msc.compile(model, batch(), fuse_loss=True),
        LINEAR_NLL_TERMS_BACKWARD,
    )
    assert node.args[-1] == [False, True, True]
    assert msc.verify(model, batch(), fuse_loss=True).max_error < 1e-12


def test_parts_of_unequal_length_are_one_finding() -> None:
    """52 classes on 8 ranks: two classes of ranks, whose graphs differ in sizes."""
    program = compiled(flat, mesh="tp=8")
    assert len(program.rank_graphs) == 2
    (line,) = program.report.fused_losses
    assert "one op" in line
    for rank in (0, 7):
        nodes = [n for gm in program.graphs(rank).values() for n in gm.graph.nodes]
        assert sum(node.target == LINEAR_NLL_TERMS for node in nodes) == 1


def test_without_the_option_nothing_is_looked_at() -> None:
    torch.manual_seed(0)
    program = msc.compile(Head(flat).double(), batch())
    assert (
        calls(program, LINEAR_NLL_TERMS),
        program.report.fused_losses,
        program.report.notes,
    ) == ([], (), ())


@pytest.mark.parametrize("wrong", ["auto", 1, None])
def test_what_the_option_may_be(wrong: Any) -> None:
    with pytest.raises(msc.UserError, match=r"fuse_loss is .*; it is True or False"):
        msc.compile(Head(flat).double(), batch(), fuse_loss=wrong)
