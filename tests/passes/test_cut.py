"""Cutting: which nodes form a block, what the blocks read, and when two blocks are one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import msc
from msc.ir.structure import Source, Structure, placeholders
from msc.passes.cut import cut, structural_hash
from tests.passes.graphs import (
    ATEN,
    GPT,
    Forward,
    assert_text,
    captured,
    evaluate,
    layers,
    random_values,
    text,
    through,
    token_batch,
)


def described(structure: Structure) -> list[str]:
    """An instance per line: its block, its path, and where its placeholders come from."""
    return [
        f"{instance.block} {instance.path}: " + ", ".join(map(str, instance.sources))
        for instance in structure.instances
    ]


def recombined(structure: Structure, parameters: dict[str, Tensor], others: list[Tensor]) -> Tensor:
    """The loss, computed instance by instance."""
    names = structure.prelude_outputs
    prelude = dict(zip(names, evaluate(structure.prelude, others), strict=True))
    results: list[tuple[Tensor, ...]] = []
    for instance in structure.instances:
        values = []
        for source in instance.sources:
            if source.kind == "block":
                values.append(results[source.instance][source.output])
            else:
                table = parameters if source.kind == "parameter" else prelude
                values.append(table[source.name])
        results.append(evaluate(structure.blocks[instance.block], values))
    loss: Tensor = results[structure.loss.instance][structure.loss.output]
    return loss


def assert_same_numbers(gm: fx.GraphModule, structure: Structure) -> None:
    values = random_values(gm)
    nodes = placeholders(gm)
    (expected,) = evaluate(gm, values)
    parameters = {
        node.meta["name"]: value
        for node, value in zip(nodes, values, strict=True)
        if node.meta["kind"] == "parameter"
    }
    others = [v for n, v in zip(nodes, values, strict=True) if n.meta["kind"] != "parameter"]
    assert torch.equal(recombined(structure, parameters, others), expected)


def test_equal_layers_share_a_block() -> None:
    gm = layers(4, tied=True)
    structure = cut(gm)
    assert described(structure) == [
        'block0 embed: parameter "head.weight", prelude "x"',
        *(
            f'block1 layers.{i}: parameter "layers.{i}.up.weight", '
            f'parameter "layers.{i}.down.weight", instance {i}[0]'
            for i in range(4)
        ),
        'block2 head: parameter "head.weight", instance 4[0]',
    ]
    assert structure.counts == {"block0": 1, "block1": 4, "block2": 1}
    assert structure.loss == Source("block", "", 5, 0)
    assert_text(
        structure.blocks["block1"],
        """
%layers_0_up_weight: f64[16,8] = parameter "layers.0.up.weight"
%layers_0_down_weight: f64[8,16] = parameter "layers.0.down.weight"
%linear_default: f64[4,8] = value "linear_default"  # embed
%linear_default_1: f64[4,16] = msc.linear(%linear_default, %layers_0_up_weight)  # layers.0.up
%relu_default: f64[4,16] = aten.relu(%linear_default_1)  # layers.0.act
%linear_default_2: f64[4,8] = msc.linear(%relu_default, %layers_0_down_weight)  # layers.0.down
%add_tensor: f64[4,8] = aten.add.Tensor(%linear_default, %linear_default_2)  # layers.0
return (%add_tensor,)
""",
    )


@given(st.integers(1, 5), st.booleans(), st.sampled_from(["layers", "transformer.h", ""]))
@settings(max_examples=12, deadline=None)
def test_numbers_are_kept(num_layers: int, tied: bool, container: str) -> None:
    gm = layers(num_layers, container, tied)
    before = text(gm)
    structure = cut(gm)
    assert_same_numbers(gm, structure)
    assert text(gm) == before  # the forward graph stays as it is
    middle = {i.block for i in structure.instances if i.path.split(".")[-1].isdigit()}
    # the first layer reads the input, which has no gradient, unless something stands before it
    assert len(middle) == min(num_layers, 1 if tied else 2)


def test_one_numbered_module_is_no_layer() -> None:
    structure = cut(layers(1))
    assert described(structure) == [
        'block0 layers.0: parameter "layers.0.up.weight", parameter "layers.0.down.weight", '
        'parameter "head.weight", prelude "x"'
    ]


def test_for_several_stages_the_outermost_modules_are_the_layers() -> None:
    structure = cut(layers(1), stages=2)
    assert described(structure) == [
        'block0 layers.0: parameter "layers.0.up.weight", parameter "layers.0.down.weight", '
        'prelude "x"',
        'block1 head: parameter "head.weight", instance 0[0]',
        "block2 : instance 1[0]",
    ]


def test_parameters_come_first_then_buffers_then_what_is_computed() -> None:
    build = Forward()
    first, second = build.parameter("b", 8), build.parameter("a", 8)
    buffer, x = build.buffer("scale", 8), build.input("x", 4, 8)
    mask = build.call(ATEN.relu.default, x)
    y = build.call(ATEN.mul.Tensor, mask, buffer, path="layers.0")
    y = build.call(ATEN.mul.Tensor, y, first, path="layers.0")
    y = build.call(ATEN.mul.Tensor, x, y, path="layers.1")
    y = build.call(ATEN.mul.Tensor, y, buffer, path="layers.1")
    y = build.call(ATEN.mul.Tensor, y, second, path="layers.1")
    structure = cut(build.done(build.call(ATEN.sum.default, y)))
    assert described(structure) == [
        'block0 layers.0: parameter "b", prelude "mul_tensor"',
        'block1 layers.1: parameter "a", prelude "scale", prelude "x", instance 0[0]',
        "block2 : instance 1[0]",
    ]
    kinds = [node.meta["kind"] for node in placeholders(structure.blocks["block1"])]
    assert kinds == ["parameter", "buffer", "input", "value"]


def test_prelude_holds_what_depends_on_no_parameter() -> None:
    build = Forward()
    w, x = build.parameter("w", 8), build.input("x", 4, 8)
    mask = build.call(ATEN.gt.Scalar, x, 0, path="layers.0")
    count = build.call(ATEN.sum.default, mask, path="loss")
    y = build.call(ATEN.mul.Tensor, x, w, path="layers.0")
    y = build.call(ATEN.mul.Tensor, y, mask, path="layers.0")
    y = build.call(ATEN.mul.Tensor, y, mask, path="layers.1")
    loss = build.call(ATEN.div.Tensor, build.call(ATEN.sum.default, y), count)
    gm = build.done(loss)
    structure = cut(gm)
    assert_text(
        structure.prelude,
        """
%x: f64[4,8] = input "x"
%gt_scalar: bool[4,8] = aten.gt.Scalar(%x, 0)  # layers.0
%sum_default: i64[] = aten.sum(%gt_scalar)  # loss
return (%x, %gt_scalar, %sum_default)
""",
    )
    assert structure.prelude_outputs == ["x", "gt_scalar", "sum_default"]
    assert_same_numbers(gm, structure)


def test_random_ops_stay_in_their_layer() -> None:
    unit = through("cut", captured(GPT(dropout=0.1), "", token_batch()))
    names = [str(node.target) for node in unit.structure.prelude.graph.nodes]
    assert not any("dropout" in name for name in names)
    (layer,) = {i.block for i in unit.structure.instances if i.path.startswith("h.")}
    targets = [str(node.target) for node in unit.structure.blocks[layer].graph.nodes]
    # of the attention's scores, of its result and of the MLP's
    assert sum("msc.dropout" in name for name in targets) == 3


def between(path: str) -> Structure:
    """Two layers with an op between them, which stands at `path`."""
    build = Forward()
    weights = [build.parameter(f"layers.{i}.weight", 8, 8) for i in range(2)]
    scale = build.parameter("scale", 8)
    x = build.linear(build.input("x", 4, 8), weights[0], "layers.0")
    x = build.call(ATEN.mul.Tensor, x, scale, path=path)
    x = build.linear(x, weights[1], "layers.1")
    return cut(build.done(build.call(ATEN.sum.default, x, path="loss")))


def test_code_between_layers_goes_with_the_layer_before() -> None:
    assert [i.path for i in between("norm").instances] == ["layers.0", "layers.1", "loss"]
    assert described(between("norm"))[0] == (
        'block0 layers.0: parameter "layers.0.weight", parameter "scale", prelude "x"'
    )


def test_a_value_used_in_a_later_layer_is_an_output() -> None:
    build = Forward()
    weights = [build.parameter(f"layers.{i}.weight", 8, 8) for i in range(3)]
    x = build.input("x", 4, 8)
    first = build.linear(x, weights[0], "layers.0")
    second = build.linear(first, weights[1], "layers.1")
    third = build.linear(second, weights[2], "layers.2")
    skip = build.call(ATEN.add.Tensor, third, first, path="layers.2")
    structure = cut(build.done(build.call(ATEN.sum.default, skip, path="loss")))
    assert described(structure)[2] == (
        'block2 layers.2: parameter "layers.2.weight", instance 1[0], instance 0[0]'
    )


class Sequential(torch.nn.Module):
    def __init__(self, container: Callable[..., torch.nn.Module], num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [torch.nn.Linear(8, 8) for _ in range(num_layers)]
        ordered = container is torch.nn.Sequential
        self.layers = container(*parts) if ordered else container(parts)
        self.calls_container = ordered

    def forward(self, x: Tensor) -> tuple[Tensor]:
        if self.calls_container:
            x = self.layers(x)
        else:
            for layer in self.layers:  # type: ignore[attr-defined]
                x = layer(x)
        return (x.relu().sum(),)


def test_a_module_list_and_a_sequential_are_cut_alike() -> None:
    found = []
    for container in (torch.nn.ModuleList, torch.nn.Sequential):
        unit = captured(Sequential(container, 4), "", (torch.randn(4, 8),))
        found.append(described(through("cut", unit).structure))
    assert found[0] == found[1]
    assert [line.split(":")[0] for line in found[0]] == [
        "block0 layers.0",
        "block1 layers.1",
        "block1 layers.2",
        "block1 layers.3",
        "block2 ",
    ]


def test_encoder_and_decoder_are_two_kinds_of_layer() -> None:
    build = Forward()
    names = ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]
    weights = [build.parameter(f"{name}.weight", 8, 8) for name in names]
    embed = build.parameter("embed.weight", 8, 8)
    x, y = build.input("x", 4, 8), build.input("y", 4, 8)
    x, y = build.linear(x, embed, "embed"), build.linear(y, embed, "embed")
    for name, weight in zip(names[:2], weights[:2], strict=True):
        x = build.linear(x, weight, name)
    for name, weight in zip(names[2:], weights[2:], strict=True):
        y = build.call(ATEN.add.Tensor, build.linear(y, weight, name), x, path=name)
    gm = build.done(build.call(ATEN.sum.default, y, path="loss"))
    structure = cut(gm)
    assert_same_numbers(gm, structure)
    assert described(structure) == [
        'block0 embed: parameter "embed.weight", prelude "x", prelude "y"',
        'block1 encoder.layers.0: parameter "encoder.layers.0.weight", instance 0[0]',
        'block1 encoder.layers.1: parameter "encoder.layers.1.weight", instance 1[0]',
        'block2 decoder.layers.0: parameter "decoder.layers.0.weight", instance 0[1], '
        "instance 2[0]",
        'block2 decoder.layers.1: parameter "decoder.layers.1.weight", instance 3[0], '
        "instance 2[0]",
        "block3 loss: instance 4[0]",
    ]


def test_tied_weights_keep_one_name() -> None:
    structure = through("cut", captured(GPT(), "", token_batch())).structure
    users = [
        instance.path
        for instance in structure.instances
        for source in instance.sources
        if source == Source("parameter", "wte.weight")
    ]
    # one name in the instance that looks tokens up, and in the one that makes the logits
    assert len(users) == 2
    assert {s.name for i in structure.instances for s in i.sources if "head" in s.name} == set()


def small(
    factor: float = 2.0, width: int = 8, dtype: torch.dtype = torch.float64, trains: bool = True
) -> fx.GraphModule:
    build = Forward(dtype)
    w, x = build.parameter("w", width, trains=trains), build.input("x", 4, width)
    y = build.call(ATEN.mul.Tensor, x, w, path="layers.0")
    y = build.call(ATEN.mul.Tensor, y, factor, path="layers.0")
    gm = build.done(build.call(ATEN.sum.default, y))
    cut(gm)  # marks what is differentiable
    return gm


def test_structural_hash_sees_all_but_names() -> None:
    same = small()
    for node in same.graph.nodes:
        node.meta["module_path"] = "layers.7"
        if node.op == "placeholder":
            node.meta["name"] = f"other.{node.name}"
        node._rename(f"other_{node.name}")
    assert structural_hash(same) == structural_hash(small())
    different = [
        small(),
        small(factor=3.0),
        small(width=16),
        small(dtype=torch.float32),
        small(trains=False),
        layers(1),
    ]
    assert len({structural_hash(gm) for gm in different}) == len(different)


def test_structural_hash_sees_the_order_of_operands() -> None:
    hashes = set()
    for swapped in (False, True):
        build = Forward()
        w, x = build.parameter("w", 4, 8), build.input("x", 4, 8)
        pair = (w, x) if swapped else (x, w)
        gm = build.done(build.call(ATEN.sum.default, build.call(ATEN.sub.Tensor, *pair)))
        cut(gm)
        hashes.add(structural_hash(gm))
    assert len(hashes) == 2


def test_cut_structure_stays_true_to_the_model() -> None:
    """The whole path on one rank, against the forward graph."""
    torch.manual_seed(0)
    model = GPT().double()
    batch = token_batch()
    program = msc.compile(model, batch, loss_fn=lambda output: output[1])
    expected = model(*batch)[1]
    assert abs(program.run_virtual(batch).loss - expected) < 1e-12
