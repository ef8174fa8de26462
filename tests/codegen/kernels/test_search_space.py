"""The tiles that may be tried: what never fits is not even compiled."""

from __future__ import annotations

import pytest

from msc.codegen.kernels.description import BYTES, SM_80, SM_90, Target
from msc.codegen.kernels.search_space import candidates


@pytest.mark.parametrize("target", [SM_80, SM_90], ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operand_blocks_fit(target: Target, dtype: str) -> None:
    found = list(candidates(target, dtype))
    assert len(found) == len(set(found)) > 50
    for tiles in found:
        blocks = (tiles.m + tiles.n) * tiles.k * tiles.stages * BYTES[dtype]
        assert blocks <= target.shared_limit
        assert tiles.m * tiles.n / (32 * tiles.warps) <= 128
    assert {tiles.parts for tiles in found} == ({1, 2} if target is SM_90 else {1})
