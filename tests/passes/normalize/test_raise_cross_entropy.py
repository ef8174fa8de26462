from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from msc.capture.entry import capture
from msc.ir.structure import output_nodes
from msc.passes.normalize import normalize
from tests.passes.normalize.one_op import Function, normalized, random, targets


def labels(*shape: int) -> Tensor:
    result = torch.randint(0, 5, shape)
    result.view(-1)[::3] = 2
    return result


@pytest.mark.parametrize(
    ("reduction", "weighted", "smoothing", "ignored"),
    list(itertools.product(["mean", "sum", "none"], [False, True], [0.0, 0.1], [-100, 2])),
)
def test_classes(reduction: str, weighted: bool, smoothing: float, ignored: int) -> None:
    torch.manual_seed(0)

    def function(w: Tensor, x: Tensor, class_weight: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(
            x * w,
            target,
            weight=class_weight if weighted else None,
            reduction=reduction,
            label_smoothing=smoothing,
            ignore_index=ignored,
        )
        return loss if reduction != "none" else (loss**2).sum()

    captured = normalized(function, [random(5)], [random(6, 5), random(5).abs(), labels(6)])
    assert "msc.nll_terms.default" in targets(captured)
    assert "aten.cross_entropy_loss.default" not in targets(captured)


def test_the_count_of_labels_depends_on_no_parameter() -> None:
    torch.manual_seed(0)
    captured = normalized(
        lambda w, x, t: functional.cross_entropy(x * w, t), [random(5)], [random(6, 5), labels(6)]
    )
    assert targets(captured) == [
        "aten.mul.Tensor",
        "aten.ne.Scalar",
        "msc.nll_terms.default",
        "getitem",
        "getitem",
        "aten.sub.Tensor",
        "aten.where.ScalarOther",
        "aten.lt.Scalar",
        "aten.ge.Scalar",
        "aten.bitwise_or.Tensor",
        "aten.bitwise_and.Tensor",
        "aten.masked_fill.Scalar",
        "aten.sum.default",
        "aten.sum.default",
        "aten.to.dtype",
        "aten.div.Tensor",
    ]
    (divide,) = [n for n in captured.graph.graph.nodes if str(n.target) == "aten.div.Tensor"]
    pending, kinds = [divide.args[1]], set()
    while pending:
        node = pending.pop()
        kinds.add(node.meta.get("kind"))
        pending.extend(node.all_input_nodes)
    assert "parameter" not in kinds


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_are_dim_one(smoothing: float) -> None:
    torch.manual_seed(0)
    normalized(
        lambda w, x, t: functional.cross_entropy(x * w, t, label_smoothing=smoothing),
        [random(3)],
        [random(4, 5, 3), labels(4, 3)],
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_probabilities(reduction: str, smoothing: float) -> None:
    torch.manual_seed(0)
    normalized(
        lambda w, x, p: functional.cross_entropy(
            x * w, p, reduction=reduction, label_smoothing=smoothing
        ),
        [random(5)],
        [random(6, 5), random(6, 5).softmax(-1)],
    )


def test_log_softmax_and_nll_loss() -> None:
    torch.manual_seed(0)
    captured = normalized(
        lambda w, x, t: functional.nll_loss(functional.log_softmax(x * w, -1), t),
        [random(5)],
        [random(6, 5), labels(6)],
    )
    assert "msc.nll_terms.default" in targets(captured)
    assert "aten.log_softmax.int" not in targets(captured)


def test_nll_loss_of_other_scores() -> None:
    torch.manual_seed(0)
    captured = normalized(
        lambda w, x, t: functional.nll_loss(x * w, t, ignore_index=2),
        [random(5)],
        [random(6, 5), labels(6)],
    )
    assert "aten.gather.default" in targets(captured)


def test_half_logits_give_a_half_loss() -> None:
    model = Function(lambda w, x, t: functional.cross_entropy(x * w, t), [torch.ones(5).bfloat16()])
    captured = capture(model, (torch.randn(6, 5).bfloat16(), labels(6)))
    normalize(captured.graph)
    (loss,) = output_nodes(captured.graph)
    assert loss.meta["val"].dtype == torch.bfloat16
    (total,) = [n for n in captured.graph.graph.nodes if str(n.target) == "aten.div.Tensor"]
    assert total.meta["val"].dtype == torch.float64
