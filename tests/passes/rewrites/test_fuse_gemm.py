"""The GEMMs that read one activation are one, over the same parameters."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import msc
from msc.cost import CostModel
from msc.ir.structure import output_nodes
from msc.passes.rewrites.fuse_gemm import fuse_gemms
from tests import zoo
from tests.passes.graphs import (
    ATEN,
    LINEAR,
    Forward,
    assert_text,
    evaluate,
    random_values,
)
from tests.passes.rewrites.block_models import BlockConfig, Model, batch
from tests.passes.rewrites.test_parallel_block import assert_is_parallel, rewritten
from tests.passes.sharding.placing import states_of
from tests.passes.test_merge_branches import ONE, differentiated, per_layer


def projections(
    transposed: bool = False, biases: tuple[bool, bool] = (True, True), flat: bool = False
) -> tuple[fx.GraphModule, fx.Node]:
    """A fused projection that is split, and another one of the same activation."""
    build = Forward()
    sizes = {"qkv": 6, "up": 10}
    shapes = {name: (6, size) if transposed else (size, 6) for name, size in sizes.items()}
    weights = {name: build.parameter(f"{name}.weight", *shape) for name, shape in shapes.items()}
    vectors = {name: build.parameter(f"{name}.bias", size) for name, size in sizes.items()}
    u = build.call(ATEN.sin.default, build.input("x", 4, 2, 6))
    read = {"qkv": u, "up": build.call(ATEN.reshape.default, u, [8, 6]) if flat else u}
    made = {}
    for (name, source), biased in zip(read.items(), biases, strict=True):
        made[name] = build.call(LINEAR, source, weights[name], None, transposed)
        if biased:
            made[name] = build.call(ATEN.add.Tensor, made[name], vectors[name])
    parts = build.call(ATEN.split.Tensor, made["qkv"], 2, 2)
    q, k, v = (build.call(operator.getitem, parts, index) for index in range(3))
    return build.done(q, k, v, made["up"]), u


def test_one_gemm_takes_the_parts_of_all() -> None:
    gm, u = projections()
    assert fuse_gemms(gm, u) == 2
    assert_text(
        gm,
        """
%qkv_weight: f64[6,6] = parameter "qkv.weight"
%up_weight: f64[10,6] = parameter "up.weight"
%qkv_bias: f64[6] = parameter "qkv.bias"
%up_bias: f64[10] = parameter "up.bias"
%x: f64[4,2,6] = input "x"
%sin_default: f64[4,2,6] = aten.sin(%x)
%split_with_sizes: (f64[2,6], f64[2,6], f64[2,6]) = aten.split_with_sizes(%qkv_weight, [2, 2, 2], 0)
%getitem_3: f64[2,6] = %split_with_sizes[0]
%getitem_4: f64[2,6] = %split_with_sizes[1]
%getitem_5: f64[2,6] = %split_with_sizes[2]
%cat: f64[16,6] = aten.cat([%getitem_3, %getitem_4, %getitem_5, %up_weight], 0)
%linear: f64[4,2,16] = msc.linear(%sin_default, %cat)
%split_with_sizes_1: (f64[2], f64[2], f64[2]) = aten.split_with_sizes(%qkv_bias, [2, 2, 2], 0)
%getitem_6: f64[2] = %split_with_sizes_1[0]
%getitem_7: f64[2] = %split_with_sizes_1[1]
%getitem_8: f64[2] = %split_with_sizes_1[2]
%cat_1: f64[16] = aten.cat([%getitem_6, %getitem_7, %getitem_8, %up_bias], 0)
%add: f64[4,2,16] = aten.add.Tensor(%linear, %cat_1)
%split_with_sizes_2: (f64[4,2,2], f64[4,2,2], f64[4,2,2], f64[4,2,10]) = \
aten.split_with_sizes(%add, [2, 2, 2, 10], 2)
%getitem_9: f64[4,2,2] = %split_with_sizes_2[0]
%getitem_10: f64[4,2,2] = %split_with_sizes_2[1]
%getitem_11: f64[4,2,2] = %split_with_sizes_2[2]
%getitem_12: f64[4,2,10] = %split_with_sizes_2[3]
return (%getitem_9, %getitem_10, %getitem_11, %getitem_12)
""",
    )


@given(st.booleans(), st.tuples(st.booleans(), st.booleans()), st.booleans())
@settings(deadline=None, max_examples=20)
def test_numbers_are_kept(transposed: bool, biases: tuple[bool, bool], flat: bool) -> None:
    gm, u = projections(transposed, biases, flat)
    values = random_values(gm)
    expected = evaluate(gm, values)
    assert fuse_gemms(gm, u) == 2
    gm.graph.lint()
    assert [tuple(n.meta["val"].shape) for n in output_nodes(gm)] == [e.shape for e in expected]
    torch.testing.assert_close(evaluate(gm, values), expected, rtol=1e-12, atol=1e-12)
    assert len(gm.graph.find_nodes(op="call_function", target=LINEAR)) == 1


def test_weights_that_are_stored_in_different_ways_stay_apart() -> None:
    build = Forward()
    weights = [build.parameter(name, 6, 6) for name in "ab"]
    x = build.call(ATEN.sin.default, build.input("x", 4, 6))
    calls = [build.call(LINEAR, x, w, None, w is weights[1]) for w in weights]
    gm = build.done(*calls)
    assert fuse_gemms(gm, x) == 0


@pytest.mark.parametrize(
    "config",
    [
        BlockConfig(layers=1, fused=True),
        BlockConfig(layers=1, gated=True, bias=False, norm="rms-pow", flatten=True),
    ],
    ids=["fused", "gated"],
)
def test_the_fused_model_is_the_one_written_as_parallel(config: BlockConfig) -> None:
    assert_is_parallel(config, msc.ParallelBlock(share_norm=True, fuse_gemm=True))


@pytest.mark.parametrize(
    ("changes", "share", "what"),
    [
        ({}, True, "; 4 GEMMs are one"),
        ({"fused": True, "gated": True}, True, "; 3 GEMMs are one"),
        ({"norm": "plain-layer"}, False, "; 4 GEMMs are one"),
        (
            {},
            False,
            "; no GEMM is fused, as the branches scale the norm apart: that needs share_norm",
        ),
    ],
)
def test_the_finding_says_what_is_fused(changes: dict[str, Any], share: bool, what: str) -> None:
    model = Model(BlockConfig(layers=1, **changes))
    rewrite = msc.ParallelBlock(share_norm=share, fuse_gemm=True)
    _, (finding,) = rewritten(model, batch(), rewrite)
    assert finding.what.endswith(what)


REWRITE = msc.ParallelBlock(share_norm=True, fuse_gemm=True)


def test_each_part_is_a_segment_of_its_own_on_tp() -> None:
    """q, k and v of GPT-2's fused projection are split as they are without the rewrite."""
    model, inputs = zoo.MODELS["gpt2"].build(), zoo.MODELS["gpt2"].batch(1)
    unit = differentiated(model, inputs, "tp=2", CostModel(), [REWRITE])
    assert per_layer(unit) == (ONE, ONE)
    assert unit.placed is not None
    found = states_of(unit.placed)
    names = ("attn.c_attn", "mlp.c_fc", "attn.c_proj", "mlp.c_proj")
    states = [found[f"transformer.h.0.{name}.weight"] for name in names]
    assert states == ["S1/3", "S1", "S0", "S0"]


@pytest.mark.parametrize(("mesh", "microbatches"), [("tp=2", 2), ("pp=2,tp=2", 1)])
def test_every_mesh_computes_the_fused_model(mesh: str, microbatches: int) -> None:
    config = BlockConfig(fused=True, gated=mesh == "tp=2")
    found = msc.verify(
        Model(config),
        batch(),
        mesh=mesh,
        microbatches=microbatches,
        dtype=torch.float64,
        rewrites=[REWRITE],
    )
    assert found.ok, found.first_difference
