from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn

from msc.capture.captured import Captured
from msc.capture.entry import capture
from msc.passes.normalize import normalize
from tests import zoo
from tests.passes.normalize.one_op import Function, normalized, random, targets

ATTENTION = "msc.attention.default"
LOWEST = torch.finfo(torch.float64).min


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def eager(weights_of: Callable[..., Tensor], *inputs: Tensor, parameters: int = 1) -> Captured:
    """The graph of `weights_of(scores, ..) @ v`, which `normalized` compares with eager."""
    torch.manual_seed(0)

    def function(*values: Tensor) -> Tensor:
        trained, (x, *rest) = values[:parameters], values[parameters:]
        scores = (x * trained[0]) @ (x + trained[0]).mT
        weights = weights_of(scores, *trained[1:], *rest)
        return ((weights @ (x * trained[0])) ** 2).sum()

    weights = [random(4), *(random(6, 6) for _ in range(parameters - 1))]
    return normalized(function, weights, [random(3, 2, 6, 4), *inputs])


def attributes(captured: Captured) -> tuple[object, ...]:
    """Mask, scale and what follows of the only attention."""
    (node,) = [n for n in captured.graph.graph.nodes if str(n.target) == ATTENTION]
    assert "aten.softmax.int" not in targets(captured)
    assert isinstance(node, fx.Node)
    return tuple(node.args[3:])


def causal(s: int = 6) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).tril()


def band(window: int) -> Tensor:
    return causal() & ~causal().tril(-window)


def test_scores_scaled_by_numbers() -> None:
    assert attributes(eager(lambda x: softmax(x * 0.5 / 4))) == (None, 0.125, False)


def test_masks_that_are_constants_become_attributes() -> None:
    filled = eager(lambda x: softmax((x * 0.5).masked_fill(~causal(), LOWEST)))
    assert attributes(filled) == (None, 0.5, True)
    chosen = eager(lambda x: softmax(torch.where(causal(), x, float("-inf"))))
    assert attributes(chosen) == (None, 1.0, True)
    added = eager(lambda x: softmax(torch.zeros(6, 6).double().masked_fill(~band(2), LOWEST) + x))
    assert attributes(added) == (None, 1.0, True, 2)


def test_a_soft_cap_with_a_window() -> None:
    def gemma(x: Tensor) -> Tensor:
        return softmax((torch.tanh(x * 0.5 / 5.0) * 5.0).masked_fill(~band(3), LOWEST))

    assert attributes(eager(gemma)) == (None, 0.5, True, 3, 5.0)


def test_slopes_of_heads_stay_a_mask_beside_causality() -> None:
    def alibi(x: Tensor) -> Tensor:
        slopes = 0.5 ** torch.arange(1, 3).double()[:, None, None]
        biased = x + slopes * torch.arange(-5, 1).double()
        return softmax(biased.masked_fill(~causal(), LOWEST))

    mask, *rest = attributes(eager(alibi))
    assert rest == [1.0, True]
    assert isinstance(mask, fx.Node)
    assert tuple(mask.meta["val"].shape) == (2, 1, 6)


def test_masks_that_may_hide_all_keys_of_a_query_stay() -> None:
    """A low number weighs them alike then, and 0 is what `msc.attention` gives."""
    padding = torch.ones(3, 6, dtype=torch.bool)
    padding[0, :2] = False

    def added(x: Tensor, seen: Tensor) -> Tensor:
        both = causal() & seen[:, None, None, :]
        return softmax(x + torch.where(both, torch.zeros(()).double(), LOWEST))

    def replaced(x: Tensor, seen: Tensor) -> Tensor:
        x = x.masked_fill(~causal(), LOWEST)
        return softmax(x.masked_fill(~seen[:, None, None, :], LOWEST))

    for weights_of in (added, replaced):
        assert ATTENTION not in targets(eager(weights_of, padding))


def test_equal_masks_of_two_layers_are_one() -> None:
    torch.manual_seed(0)

    def function(w: Tensor, x: Tensor) -> Tensor:
        slope = torch.arange(-5, 1).double()
        other = slope[:, None] * 0.5
        for _ in range(2):
            x = softmax(x * w @ x.mT + slope + other) @ x
        return (x**2).sum()

    captured = normalized(function, [random(4)], [random(3, 2, 6, 4)])
    one, two = (n for n in captured.graph.graph.nodes if str(n.target) == ATTENTION)
    assert one.args[3] is two.args[3] is not None


@pytest.mark.parametrize(
    "weights_of",
    [
        lambda x: softmax(x) * 2,  # something else reads the probabilities
        lambda x: x.softmax(-2),
        lambda x: softmax((x + 1.0 - causal().double()) * 2),  # masked before it is scaled
        lambda x: softmax(x * -1.0),
        lambda x: softmax(x.masked_fill(~causal(), -3.0)),  # hides nothing
        lambda x: softmax(x.abs()),
    ],
)
def test_what_is_something_else_stays(weights_of: Callable[[Tensor], Tensor]) -> None:
    assert ATTENTION not in targets(eager(weights_of))


def test_a_softmax_narrower_than_its_operands_stays() -> None:
    for weights_of in (
        lambda x: x.softmax(-1, dtype=torch.float32).double(),
        lambda x: softmax(x.float()).double(),
    ):
        model = Function(lambda w, x, f=weights_of: (f(x * w @ x.mT) @ x).sum(), [random(4)])
        captured = capture(model, (random(3, 2, 6, 4),))
        normalize(captured.graph)
        assert ATTENTION not in targets(captured)


def test_a_mask_with_a_gradient_stays() -> None:
    assert ATTENTION not in targets(eager(lambda x, bias: softmax(x + bias), parameters=2))


def test_probabilities_that_are_read_twice_stay() -> None:
    torch.manual_seed(0)

    def function(w: Tensor, x: Tensor) -> Tensor:
        weights = softmax(x * w @ x.mT)
        return ((weights @ x) ** 2).sum() + weights.square().sum()

    assert ATTENTION not in targets(normalized(function, [random(4)], [random(3, 2, 6, 4)]))


def windows(model: nn.Module) -> list[tuple[object, ...]]:
    """Causality, window and soft cap of each attention."""
    captured = capture(model, zoo.MODELS["llama"].batch(2))
    normalize(captured.graph)
    found = [n for n in captured.graph.graph.nodes if str(n.target) == ATTENTION]
    assert "aten.softmax.int" not in targets(captured)
    return [tuple(n.args[5:]) for n in found]


def test_windows_and_soft_caps_of_models() -> None:
    assert windows(zoo.build("gemma2").float()) == [
        (True, 4, 50.0),
        (True, 0, 50.0),
        (True, 4, 50.0),
    ]
    sizes: dict[str, Any] = {
        **zoo.LLAMA,
        **zoo.GROUPED,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    }
    qwen2 = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    assert windows(qwen2.train()) == [(True,), (True, 4), (True, 4)]
