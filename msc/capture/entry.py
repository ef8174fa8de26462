"""`capture`: the one entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from msc.capture.build import Builder, Placeholders
from msc.capture.captured import BufferInfo, Captured, ParameterInfo, has_values
from msc.capture.export import export_loss
from msc.capture.fake_module import fake_like, fake_tensors
from msc.capture.inputs import InputSpec, describe_inputs
from msc.capture.loss import LossFunction, LossModule
from msc.capture.refusals import check_model
from msc.capture.sizes import Sizes, symbol_of
from msc.ir.errors import CaptureError
from msc.ir.structure import output_nodes
from msc.ir.torch_private import FakeTensorMode, is_persistent
from msc.ir.walks import ancestors
from msc.passes.normalize.dead_code import remove_dead_code
from msc.passes.normalize.decompose_batch_norm import decompose_batch_norm
from msc.passes.normalize.drop_asserts import drop_asserts
from msc.passes.normalize.functionalize import functionalize

_PREFIX = "model."


def capture(
    model: nn.Module,
    inputs: tuple[Any, ...] | dict[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dtype: torch.dtype | None = None,
) -> Captured:
    """The forward graph of `model` on the global batch `inputs`, down to the scalar loss.

    The loss is the output, `output["loss"]`, `output.loss`, or `loss_fn(output)`. Dim 0 of every
    tensor input that is as long as the first input's is the batch; `batch_dims` (name -> dim or
    None) says otherwise. `dtype` converts floating parameters, buffers and inputs; with float64,
    explicit casts to float32 in the model become float64 as well.

    The model may be on `meta`; no number is computed, and the model is left as it was. Raises
    `CaptureError` for what cannot be one graph, naming the user's line.
    """
    _refuse_autocast()
    check_model(model, loss_fn)
    spec, tensors, batch = describe_inputs(model, inputs, batch_dims)
    names = _parameter_names(model)
    mode = FakeTensorMode()
    wrapper = LossModule(model, spec, loss_fn)
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise CaptureError("loss_fn has parameters. Make it part of the model, so that they train.")
    examples = [fake_like(mode, tensor, dtype) for tensor in tensors]
    with fake_tensors(model, mode, dtype):
        program, note = export_loss(wrapper, examples, [info.batch_dim for info in spec.inputs])
    placeholders, constants = _placeholders(program, model, spec, names)
    builder = Builder(
        mode,
        Sizes(_batch_symbol(program, spec), batch),
        Sizes(_batch_symbol(program, spec), 2),
        lift_float32=dtype == torch.float64,
    )
    graph = builder.build(program, placeholders)
    captured = Captured(
        graph=graph,
        parameters=_parameters(model, names, graph),
        buffers=_buffers(model, graph, constants),
        inputs=spec.inputs,
        batch_size=batch,
        notes=[note] if note else [],
        module=model,
        input_spec=spec,
        constants=constants,
        dtype=dtype,
    )
    _finish(captured)
    return captured


def _refuse_autocast() -> None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise CaptureError(
                f"capture was called inside torch.autocast('{device}'). Leave autocast and convert "
                "the model instead, for example model.to(torch.bfloat16)."
            )


def _parameter_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of a parameter -> all names of the same tensor, the canonical one first."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def _placeholders(
    program: ExportedProgram, model: nn.Module, spec: InputSpec, names: dict[str, tuple[str, ...]]
) -> tuple[Placeholders, dict[str, torch.Tensor]]:
    """The placeholders of the forward graph, and the constant tensors among its buffers."""
    exported = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    parameters: dict[str, torch.Tensor] = {
        group[0]: model.get_parameter(group[0]) for group in names.values()
    }
    buffers: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    placeholders = Placeholders([], {}, {})
    inputs = iter(spec.inputs)
    for entry in program.graph_signature.input_specs:
        node = exported[entry.arg.name]
        target = entry.target or ""
        name = target.removeprefix(_PREFIX)
        kind = "buffer"
        if entry.kind is InputKind.PARAMETER:
            kind, name = "parameter", names[name][0]
            parameters[name] = node.meta["val"]
        elif entry.kind is InputKind.USER_INPUT:
            kind, name = "input", next(inputs).name
            tensors[name] = node.meta["val"]
        elif entry.kind is InputKind.BUFFER and target.startswith(_PREFIX):
            if node.users:
                buffers[name] = node.meta["val"]
        elif entry.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            constant = _constant(program, target)
            if constant.numel() <= 1 and has_values(constant):
                placeholders.scalars[node.name] = constant
                continue
            if node.users:
                buffers[name] = constants[name] = constant
        else:
            raise CaptureError(
                f"The model reads '{name}', a {entry.kind.name.lower()}. A captured program holds "
                "tensors only."
            )
        placeholders.sources[node.name] = f"{kind}:{name}"
    for kind, group in (("parameter", parameters), ("buffer", buffers), ("input", tensors)):
        placeholders.values.extend((name, kind, value) for name, value in group.items())
    return placeholders, constants


def _constant(program: ExportedProgram, target: str) -> torch.Tensor:
    value = program.constants.get(target, program.state_dict.get(target))
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"The model reads '{target}', a {type(value).__name__}, not a tensor.")
    return value


def _batch_symbol(program: ExportedProgram, spec: InputSpec) -> sympy.Symbol | None:
    """The symbol of the batch size in the exported program; None if the batch is a constant."""
    exported = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    names = [
        entry.arg.name
        for entry in program.graph_signature.input_specs
        if entry.kind is InputKind.USER_INPUT
    ]
    for name, info in zip(names, spec.inputs, strict=True):
        if info.batch_dim is not None:
            symbol = symbol_of(exported[name].meta["val"], info.batch_dim)
            if symbol is not None:
                return symbol
    return None


def _parameters(
    model: nn.Module, names: dict[str, tuple[str, ...]], graph: fx.GraphModule
) -> dict[str, ParameterInfo]:
    result = {}
    for node in graph.graph.nodes:
        if node.meta.get("kind") == "parameter":
            name = node.meta["name"]
            value = node.meta["val"]
            trains = model.get_parameter(name).requires_grad
            node.meta["requires_grad"] = trains
            result[name] = ParameterInfo(
                name, tuple(value.shape), value.dtype, trains, names[name][1:]
            )
    return result


def _buffers(
    model: nn.Module, graph: fx.GraphModule, constants: Mapping[str, torch.Tensor]
) -> dict[str, BufferInfo]:
    result = {}
    for node in graph.graph.nodes:
        if node.meta.get("kind") == "buffer":
            name, value = node.meta["name"], node.meta["val"]
            owner, _, own_name = name.rpartition(".")
            persistent = name not in constants and is_persistent(
                model.get_submodule(owner), own_name
            )
            result[name] = BufferInfo(name, tuple(value.shape), value.dtype, persistent)
    return result


def _finish(captured: Captured) -> None:
    """Remove dead nodes, and note what the user should know."""
    remove_dead_code(captured.graph)
    drop_asserts(captured.graph)
    decompose_batch_norm(captured.graph)
    functionalize(captured.graph)
    remove_dead_code(captured.graph)
    captured.graph.recompile()
    reached = reaching_parameters(captured.graph)
    unused = [
        name
        for name, info in captured.parameters.items()
        if info.requires_grad and name not in reached
    ]
    if unused:
        captured.notes.append(f"These parameters do not reach the loss: {', '.join(unused)}.")


def reaching_parameters(gm: fx.GraphModule) -> set[str]:
    """Names of the trainable parameters from which a gradient path leads to the loss."""
    live = ancestors(
        output_nodes(gm)[:1], lambda node: node.target is not torch.ops.aten.detach.default
    )
    return {node.meta["name"] for node in live if node.meta.get("kind") == "parameter"}
