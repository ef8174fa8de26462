"""The two halves of a block's backward, where it is split."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Halves:
    """Input gradients, and weight gradients that can wait.

    inputs: the placeholders of the backward -> a gradient per entry of `input_gradients` (numbers
        of the block's placeholders), then the values that are kept.
    weights: the placeholders of the backward that `given` numbers, then what is kept -> a gradient
        per entry of `weight_gradients`.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule
    input_gradients: tuple[int, ...]
    weight_gradients: tuple[int, ...]
    given: tuple[int, ...]
