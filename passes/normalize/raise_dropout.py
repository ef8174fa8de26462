"""Raise dropout to `msc.dropout`, whose mask depends on the seed, the step and the element's place.

    %d: f32[8,4] = aten.dropout(%x, 0.1, True)
        ->   %rng_key: i64[] = msc.rng_key(%rng, 3)
             %d: f32[8,4] = msc.dropout(%x, 0.1, %rng_key, [None, None], [8, 4])

The placeholder `rng` (seed, step) is added after the inputs. Other random ops are refused: their
numbers would differ with the way in which the program is sharded.

Numerics: other random numbers than torch's, from the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.errors import CaptureError
from msc.ir.passes import GraphPass
from msc.ir.torch_private import OpOverload, new_fake
from msc.ir.values import where
from msc.passes.normalize.rewrite import (
    Emitter,
    aten,
    calls,
    mode_of,
    named_arguments,
    replace,
    shape_of,
)


def raise_dropout(gm: fx.GraphModule) -> int:
    """Raise every dropout; returns their number. `CaptureError` for any other random op."""
    found = calls(gm, aten.dropout.default)
    rng = _rng_placeholder(gm) if found else None
    first = len(calls(gm, torch.ops.msc.rng_key.default))
    for instance, node in enumerate(found, first):
        args = named_arguments(node, {})
        x, shape = args["input"], shape_of(node)
        emit = Emitter(gm, node)
        key = emit(torch.ops.msc.rng_key.default, rng, instance, shape=())
        new = emit(
            torch.ops.msc.dropout.default,
            x,
            float(args["p"]),
            key,
            [None] * len(shape),
            list(shape),
            shape=shape,
        )
        replace(node, new)
    _refuse_other_random(gm)
    return len(found)


def _rng_placeholder(gm: fx.GraphModule) -> fx.Node:
    placeholders: list[fx.Node] = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if node.meta.get("kind") == "rng":
            return node
    with gm.graph.inserting_after(placeholders[-1]):
        rng = gm.graph.placeholder("rng")
    rng.meta.update(kind="rng", name="rng", val=new_fake(mode_of(gm), (2,), torch.int64))
    return rng


def _refuse_other_random(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and (
            torch.Tag.nondeterministic_seeded in node.target.tags
        ):
            raise CaptureError(
                f"{node.target} at {where(node)} draws random numbers, or may (a recurrent layer "
                "has dropout of its own). Of random ops, only dropout gives the same numbers "
                "however the program is sharded: use torch.nn.Dropout and plain ops, or pass the "
                "random numbers as an input."
            )


@dataclass(frozen=True)
class RaiseDropout(GraphPass):
    """`raise_dropout` as a pass."""

    name: ClassVar[str] = "raise-dropout"
    numerics: ClassVar[str] = "other random numbers than torch's, from the same distribution"

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        """Raise every dropout."""
        return raise_dropout(gm)
