from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from msc.passes.normalize.masks import MaskPattern, recognize

LENGTHS = st.integers(1, 6)


def mask_of(pattern: MaskPattern, s: int, t: int) -> torch.Tensor:
    """The definition, element by element."""
    return torch.tensor(
        [
            [
                (j <= i or not pattern.causal) and (i - pattern.window < j or not pattern.window)
                for j in range(t)
            ]
            for i in range(s)
        ]
    )


@given(LENGTHS, LENGTHS, st.booleans(), st.integers(0, 6))
def test_every_pattern_is_recognized_as_one_that_says_the_same(
    s: int, t: int, causal: bool, window: int
) -> None:
    pattern = MaskPattern(causal, window if causal else 0)
    mask = mask_of(pattern, s, t)
    if not mask.any(-1).all():
        return  # a window that has left the keys: no model writes it
    found = recognize(mask.expand(2, 3, s, t))
    assert found is not None
    assert torch.equal(mask_of(found, s, t), mask)


@given(LENGTHS, LENGTHS, st.data())
def test_what_is_recognized_is_right(s: int, t: int, data: st.DataObject) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=s * t, max_size=s * t))
    mask = torch.tensor(bits).view(s, t)
    found = recognize(mask)
    if found is not None:
        assert torch.equal(mask_of(found, s, t), mask)
    added = torch.zeros(s, t).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert recognize(added) == found


def test_masks_without_a_pattern() -> None:
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    assert recognize(torch.stack([causal, ~causal])) is None
    assert recognize(causal.float()) is None  # adds 1 to the scores
    assert recognize(causal.long()) is None
    assert recognize(torch.zeros(4, 4, dtype=torch.bool)) is None
