"""The other road to the same gradients: differentiate the whole model, then shard both halves.

MSC shards the forward and differentiates what one rank computes. Here AOTAutograd differentiates
the model on global shapes, and an interpreter that shares no rule and no collective with MSC runs
forward and backward on simulated ranks, from the parameter placements that MSC chose.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import msc
from msc.ir.placement import shard_of
from msc.program import Program
from msc.verification import largest, relative_error
from tests import models
from tests.oracle.joint import Ranks, sharded_gradients
from tests.oracle.shapes import groups, view
from tests.oracle.values import Value, everywhere, take, whole

MODELS: dict[str, Any] = {
    "nanogpt": functools.partial(models.GPT, layers=2),
    "llama-like": functools.partial(models.Llama, layers=2),
    "grouped": functools.partial(models.Llama, layers=2, heads=8, kv_heads=4),
}
PRODUCTS = ("msc.linear.default", "msc.linear_dgrad.default", "msc.linear_wgrad.default")
ATTENTION = ("msc.attention.default", "msc.attention_backward.default")


@functools.cache
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()  # type: ignore[no-any-return]


def parameter_shards(program: Program, size: int) -> dict[str, tuple[int, list[Tensor]]]:
    """Of each sharded parameter: the dim, and the global indices that each rank holds."""
    found = {}
    for name, layout in program.parameters.items():
        placement = layout.shards.get("tp")
        if placement is not None:
            index = torch.arange(layout.shape[placement.dim])
            flat = type(placement)(0, placement.segments)
            rows = [shard_of(index, flat, size, rank) for rank in range(size)]
            found[name] = (placement.dim, rows)
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_other_road(name: str, size: int) -> None:
    batch = models.tokens()
    program = msc.compile(model(name), batch, mesh={"tp": size}, precision="float64")
    result = program.run_virtual(batch)
    forward = msc.testing.forward_graph(model(name), batch)
    values = {n: program.read_parameter(n) for n in program.parameters}
    values |= {n: program.read_buffer(n) for n in program.buffers}
    values |= {i.name: t for i, t in zip(program.inputs, batch, strict=True)}
    ranks = Ranks(size)
    shards = parameter_shards(program, size)
    loss, grads, local = sharded_gradients(forward, values, shards, ranks)
    scale = largest(grads.values())
    assert relative_error(result.loss, loss, scale) <= 1e-10
    assert result.grads.keys() == grads.keys()
    errors = {n: relative_error(result.grads[n], grads[n], scale) for n in grads}
    assert {n: error for n, error in errors.items() if not error <= 1e-10} == {}
    # The ranks really worked in parallel: no product and no attention ran on whole values.
    calls = 2 * (4 if name == "nanogpt" else 7) + 1
    assert [ranks.parallel[op] for op in PRODUCTS] == [calls] * 3
    assert [ranks.parallel[op] for op in ATTENTION] == [2, 2]
    assert not set(ranks.gathered) & {*PRODUCTS, *ATTENTION}
    # The gradient of every matrix of a layer comes out sharded, without communication.
    assert sum(value.dim is not None for value in local.values()) >= calls - 1


def test_the_oracle_sees_a_wrong_gradient() -> None:
    """A rank that forgets a term of a sum makes a difference far above the tolerance."""
    batch = models.tokens()
    program = msc.compile(model("nanogpt"), batch, mesh="tp=2", precision="float64")
    forward = msc.testing.forward_graph(model("nanogpt"), batch)
    values = {n: program.read_parameter(n) for n in program.parameters}
    values |= {i.name: t for i, t in zip(program.inputs, batch, strict=True)}
    shards = parameter_shards(program, 2)
    broken = Ranks(2)
    original = broken.call

    def forgetful(node: Any, args: Any, kwargs: Any) -> Any:
        found = original(node, args, kwargs)
        if isinstance(found, Value) and found.partial:
            return Value((found.parts[0], torch.zeros_like(found.parts[1])), partial=True)
        return found

    broken.call = forgetful  # type: ignore[method-assign]
    _, wrong, _ = sharded_gradients(forward, values, shards, broken)
    result = program.run_virtual(batch)
    name = "h.0.attn.weight"
    assert relative_error(wrong[name], result.grads[name], largest(wrong.values())) > 1e-3


def rows(*indices: list[int]) -> list[Tensor]:
    return [torch.tensor(index) for index in indices]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((8, 16, 32), (128, 32), [([0, 1], [0]), ([2], [1])]),
        ((6,), (2, 3), [([0], [0, 1])]),
        ((4, 6), (8, 3), [([0, 1], [0, 1])]),
        ((1, 1, 5), (5,), [([0], [0]), ([1], []), ([2], [])]),
    ],
)
def test_groups_cover_all_dims(old: Any, new: Any, expected: Any) -> None:
    found = groups(old, new)
    assert sorted(d for left, _ in found for d in left) == list(range(len(old)))
    assert sorted(d for _, right in found for d in right) == list(range(len(new)))
    if 1 not in old:
        assert found == expected


@pytest.mark.parametrize(
    ("old", "dim", "indices", "new"),
    [
        ((3, 8), 1, rows([0, 1, 4, 5], [2, 3, 6, 7]), (3, 4, 2)),
        ((3, 4, 2), 1, rows([0, 2], [1, 3]), (3, 8)),
        ((3, 4), 1, rows([0, 2], [1, 3]), (12,)),
        ((4, 3), 0, rows([0, 1], [2, 3]), (12,)),
        ((1, 1, 4), 2, rows([0, 1], [2, 3]), (4,)),
        ((4,), 0, rows([0, 1], [2, 3]), (1, 4, 1)),
    ],
)
def test_views_of_parts(old: Any, dim: int, indices: list[Tensor], new: Any) -> None:
    data = torch.randn(old)
    found = view(take(everywhere(data, 2), dim, indices), new)
    assert found is not None
    assert found.dim is not None
    assert torch.equal(whole(found).parts[0], data.reshape(new))


def test_a_view_that_cuts_heads_apart_is_refused() -> None:
    value = take(everywhere(torch.randn(3, 8), 2), 1, rows([0, 1, 2, 4], [3, 5, 6, 7]))
    assert view(value, (3, 2, 4)) is None
