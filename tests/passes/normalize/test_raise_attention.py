from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.nn import functional

from msc.capture.captured import Captured
from msc.capture.entry import capture
from msc.passes.normalize import normalize
from tests.passes.normalize.one_op import Function, normalized, random, targets

sdpa = functional.scaled_dot_product_attention
ATTENTION = "msc.attention.default"


def attention(captured: Captured) -> fx.Node:
    (node,) = [n for n in captured.graph.graph.nodes if str(n.target) == ATTENTION]
    assert isinstance(node, fx.Node)
    return node


def keys_shape(captured: Captured) -> tuple[int, ...]:
    """Shape of the key-value heads that are read."""
    keys = attention(captured).args[1]
    assert isinstance(keys, fx.Node)
    return tuple(keys.meta["val"].shape)


def square(x: Tensor) -> Tensor:
    return (x**2).sum()


def test_causal_and_scale() -> None:
    torch.manual_seed(0)
    captured = normalized(
        lambda w, x: square(sdpa(x * w, x, x + w, is_causal=True, scale=0.3)),
        [random(4)],
        [random(2, 3, 5, 4)],
    )
    assert attention(captured).args[3:] == (None, 0.3, True)


def test_grouped_heads() -> None:
    torch.manual_seed(0)

    def function(w: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return square(sdpa(q * w, k * w, k + w, enable_gqa=True))

    captured = normalized(function, [random(4)], [random(2, 6, 5, 4), random(2, 2, 5, 4)])
    assert keys_shape(captured) == (2, 2, 5, 4)


def test_repeated_heads_are_read_grouped() -> None:
    torch.manual_seed(0)

    def repeat(x: Tensor) -> Tensor:
        return x[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4)

    for spread in (repeat, lambda x: x.repeat_interleave(3, 1)):
        captured = normalized(
            lambda w, q, k, spread=spread: square(sdpa(q * w, spread(k * w), spread(k + w))),
            [random(4)],
            [random(2, 6, 5, 4), random(2, 2, 5, 4)],
        )
        assert keys_shape(captured) == (2, 2, 5, 4)


def test_tiled_heads_are_not_repeated_heads() -> None:
    torch.manual_seed(0)

    def tile(x: Tensor) -> Tensor:
        return x[:, None].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4)

    captured = normalized(
        lambda w, q, k: square(sdpa(q * w, tile(k * w), tile(k + w))),
        [random(4)],
        [random(2, 6, 5, 4), random(2, 2, 5, 4)],
    )
    assert keys_shape(captured) == (2, 6, 5, 4)


def test_one_head_of_three_dims() -> None:
    torch.manual_seed(0)
    normalized(
        lambda w, x: square(sdpa(x * w, x, x + w, is_causal=True)), [random(4)], [random(2, 5, 4)]
    )


def with_mask(mask_of: Callable[..., Tensor], *inputs: Tensor) -> Captured:
    torch.manual_seed(0)
    return normalized(
        lambda w, x, *rest: square(sdpa(x * w, x, x + w, attn_mask=mask_of(x, *rest))),
        [random(4)],
        [random(3, 2, 5, 4), *inputs],
    )


def test_constant_masks_become_attributes() -> None:
    def grid(x: Tensor) -> Tensor:
        # As large models write it: over the batch, from index grids.
        batch = torch.arange(x.shape[0])[:, None, None, None]
        rows, columns = torch.arange(5)[None, None, :, None], torch.arange(5)[None, None, None, :]
        return (columns <= rows) & (batch >= 0)

    assert attention(with_mask(grid)).args[3:6] == (None, 0.5, True)
    banded = with_mask(lambda x: grid(x) & ~grid(x).tril(-2))
    assert attention(banded).args[3:] == (None, 0.5, True, 2)
    everything = with_mask(lambda x: torch.ones(5, 5, dtype=torch.bool))
    assert attention(everything).args[3:6] == (None, 0.5, False)
    infinite = with_mask(lambda x: torch.full((5, 5), float("-inf")).double().triu(1))
    assert attention(infinite).args[3:6] == (None, 0.5, True)
    for captured in (banded, everything, infinite):
        assert "aten.arange.default" not in targets(captured)


def test_other_masks_stay_masks() -> None:
    anti = with_mask(lambda x: torch.ones(5, 5, dtype=torch.bool).triu())
    assert attention(anti).args[3] is not None
    first = with_mask(
        lambda x: (
            torch.arange(x.shape[0])[:, None, None, None].expand(-1, 1, 5, 5) > -1 - torch.eye(5)
        )
    )
    assert attention(first).args[3] is None
    padding = torch.ones(3, 5, dtype=torch.bool)
    padding[1, 3:] = False
    padded = with_mask(lambda x, p: p[:, None, None, :], padding)
    assert attention(padded).args[3] is not None
    alibi = with_mask(lambda x: -torch.arange(5.0, dtype=torch.float64).expand(5, 5))
    assert attention(alibi).args[3] is not None


def test_constant_parts_of_a_mask_become_attributes() -> None:
    """Also where padding hides every key of a query: the product is 0 then, as torch has it."""
    padding = torch.ones(3, 5, dtype=torch.bool)
    padding[0, :2] = False

    def banded(x: Tensor, seen: Tensor) -> Tensor:
        rows, columns = torch.arange(5)[:, None], torch.arange(5)[None]
        band = (columns > rows - 3) & (columns <= rows)
        return (torch.ones((), dtype=torch.bool) & band) & seen[:, None, None, :]

    mask, *rest = attention(with_mask(banded, padding)).args[3:]
    assert rest == [0.5, True, 3]
    assert isinstance(mask, fx.Node)
    assert tuple(mask.meta["val"].shape) == (3, 1, 1, 5)


def test_a_row_that_stands_for_all_is_no_causal_mask() -> None:
    first = with_mask(lambda x: (torch.arange(5) < 1).expand(1, 5))
    assert attention(first).args[3] is not None


def test_a_mask_that_differs_between_samples_stays() -> None:
    captured = with_mask(
        lambda x: (
            (torch.arange(x.shape[0])[:, None, None, None] > 0)
            | torch.ones(5, 5, dtype=torch.bool).tril()
        )
    )
    assert attention(captured).args[3] is not None


def test_a_mask_with_a_gradient_becomes_math() -> None:
    torch.manual_seed(0)
    captured = normalized(
        lambda w, bias, x: square(sdpa(x * w, x, x + w, attn_mask=bias)),
        [random(4), random(5, 5)],
        [random(3, 2, 5, 4)],
    )
    assert ATTENTION not in targets(captured)


def test_value_heads_of_another_size_become_math() -> None:
    torch.manual_seed(0)
    captured = normalized(
        lambda w, x, v: square(sdpa(x * w, x, v * w[:3], is_causal=True)),
        [random(4)],
        [random(3, 2, 5, 4), random(3, 2, 5, 3)],
    )
    assert ATTENTION not in targets(captured)


def test_math_gives_zero_where_no_key_is_visible() -> None:
    torch.manual_seed(0)
    mask = torch.ones(3, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 2] = False
    normalized(
        lambda w, x, v, m: square(sdpa(x * w, x, v * w[:3], attn_mask=m)),
        [random(4)],
        [random(3, 2, 5, 4), random(3, 2, 5, 3), mask],
    )


def test_dropout_of_the_probabilities() -> None:
    model = Function(lambda w, x: square(sdpa(x * w, x, x, dropout_p=0.5)), [random(4)])
    captured = capture(model, (random(3, 2, 5, 4),))
    normalize(captured.graph)
    (drop,) = [n for n in captured.graph.graph.nodes if str(n.target) == "msc.dropout.default"]
    assert drop.args[0].target is torch.ops.aten.softmax.int
    assert drop.args[4] == [3, 2, 5, 5]
