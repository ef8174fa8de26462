from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from msc.capture.entry import capture
from msc.ir.errors import CaptureError
from msc.passes.normalize import NORMALIZE, normalize
from msc.passes.normalize.dead_code import remove_dead_code
from tests.passes.normalize.one_op import Function, normalized, random, targets


def test_passes_have_distinct_names_and_say_what_they_do_to_numbers() -> None:
    assert len({each.name for each in NORMALIZE}) == len(NORMALIZE)
    assert all(each.numerics for each in NORMALIZE)


def test_no_ops_are_dropped() -> None:
    torch.manual_seed(0)

    def function(w: Tensor, x: Tensor) -> Tensor:
        y = (x * w).contiguous().clone().to(torch.float64)
        y = functional.dropout(y, 0.5, training=False)[:, :].expand(3, 4).view(3, 4)
        y = torch.cat([torch.empty(0, 4, dtype=torch.float64), y])
        return (y * x.detach()).sum()

    captured = normalized(function, [random(4)], [random(3, 4)])
    assert targets(captured) == ["aten.mul.Tensor", "aten.mul.Tensor", "aten.sum.default"]


def test_conversions_have_one_form() -> None:
    model = Function(
        lambda w, x: ((x * w).float() * x.to(dtype=torch.float32, copy=True)).sum().double(),
        [random(4)],
    )
    captured = capture(model, (random(3, 4),))
    normalize(captured.graph)
    conversions = [n for n in captured.graph.graph.nodes if str(n.target) == "aten.to.dtype"]
    assert [n.args[1] for n in conversions] == [torch.float32, torch.float32, torch.float64]
    assert all(not n.kwargs for n in conversions)


def test_views_have_plain_sizes() -> None:
    captured = normalized(
        lambda w, x: (x * w).flatten().view(-1, 2).unflatten(0, (3, -1)).sum(),
        [random(4)],
        [random(3, 4)],
    )
    sizes = [n.args[1] for n in captured.graph.graph.nodes if "reshape" in str(n.target)]
    assert sizes == [[12], [6, 2], [3, 2, 2]]


def test_padding_mask_lookup_is_a_view() -> None:
    def function(w: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        batch = torch.arange(x.shape[0])[:, None, None, None]
        columns = torch.arange(4)[None, None, None, :]
        visible = mask[batch, columns].expand(-1, 1, 4, 4)
        return ((x * w)[:, None, None] * visible).sum()

    mask = torch.rand(3, 4) > 0.5
    captured = normalized(function, [random(4)], [random(3, 4), mask])
    assert "aten.index.Tensor" not in targets(captured)
    assert "aten.arange.default" not in targets(captured)


def test_picking_one_element_of_each_row_is_a_gather() -> None:
    """The last token of each sample, counted from either end."""

    def function(w: Tensor, x: Tensor, last: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])
        return ((x * w)[rows, last] ** 2).sum() + (x * w)[:, :, 0][rows, last].sum()

    last = torch.tensor([2, -1, 0])
    captured = normalized(function, [random(5)], [random(3, 4, 5), last])
    assert "aten.index.Tensor" not in targets(captured)
    assert targets(captured).count("aten.gather.default") == 2


def test_other_indices_stay() -> None:
    def function(w: Tensor, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])
        return (
            (x * w)[rows.flip(0)[:, None], torch.arange(2)[None]] * x[rows, rows][:, None]
        ).sum()

    captured = normalized(function, [random(4)], [random(3, 4)])
    assert targets(captured).count("aten.index.Tensor") == 2


def test_embedding_padding() -> None:
    ids = torch.tensor([[0, 1], [2, 0], [3, 3]])
    captured = normalized(
        lambda w, i: (functional.embedding(i, w, padding_idx=3) ** 2).sum(), [random(5, 4)], [ids]
    )
    (node,) = [n for n in captured.graph.graph.nodes if "embedding" in str(n.target)]
    assert node.args[2:] == (None, 3)


def test_embedding_with_batch_counts_is_refused() -> None:
    model = Function(
        lambda w, i: functional.embedding(i, w, scale_grad_by_freq=True).sum(), [random(5, 4)]
    )
    captured = capture(model, (torch.tensor([[0, 1], [2, 0]]),))
    with pytest.raises(CaptureError, match="scale_grad_by_freq") as error:
        normalize(captured.graph)
    assert "one_op.py:" in str(error.value)  # the line in forward


def test_dead_code() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("unused")
    dead = graph.call_function(torch.ops.aten.cos.default, (x,))
    graph.call_function(torch.ops.aten.sin.default, (dead,))
    graph.output((graph.call_function(torch.ops.aten.sum.default, (x,)),))
    gm = fx.GraphModule({}, graph)
    assert remove_dead_code(gm) == 2
    assert [n.op for n in graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]
    assert remove_dead_code(gm) == 0


def test_assertions_are_dropped() -> None:
    def function(w: Tensor, x: Tensor) -> Tensor:
        torch.ops.aten._assert_async.msg((x < 100).all(), "large")
        return (x * w).sum()

    captured = normalized(function, [random(4)], [random(3, 4)])
    assert targets(captured) == ["aten.mul.Tensor", "aten.sum.default"]
