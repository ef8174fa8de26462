"""`msc.verify`: does the parallel program compute what the single-device program computes?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from msc.capture.captured import Captured, has_values
from msc.capture.entry import capture
from msc.capture.loss import LossFunction, LossModule
from msc.compiler import as_rewrites, per_micro_batch
from msc.compiler import compile as compile_program
from msc.ir.errors import InputError, UserError
from msc.passes.normalize import NORMALIZE
from msc.passes.rewrites.apply import apply_rewrites
from msc.program import Program

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FLOOR = 1e-6
_FLOORS = {torch.float64: _FLOOR, torch.float32: 1e-2}  # what is smaller is rounding of larger ones
_HALF_FLOOR = 0.05
_ROUNDINGS = 4.0


@dataclass(frozen=True)
class VerifyReport:
    """Both programs side by side; errors as `relative_error` defines them.

    ok: loss and every gradient agree within `tolerance`, and the captured graph with eager.
    loss_error, grad_errors: parallel program against the single-device graph.
    eager_errors: single-device graph before normalization against the module itself, by name
        ("loss" and parameters); empty where random numbers make the two incomparable.
    sharded: as `Program.report.sharded`.
    first_difference: "" or the first value that differs: name, error, placement.
    """

    ok: bool
    loss: float
    reference_loss: float
    loss_error: float
    grad_errors: dict[str, float]
    eager_errors: dict[str, float]
    sharded: Mapping[str, Mapping[str, float]]
    notes: tuple[str, ...]
    fallbacks: tuple[str, ...]
    tolerance: float
    first_difference: str = ""

    @property
    def max_error(self) -> float:
        """The largest error of the parallel program: of its loss and its gradients."""
        return max([self.loss_error, *self.grad_errors.values()])


def verify(
    model: nn.Module,
    inputs: tuple[Any, ...] | dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    **options: Any,
) -> VerifyReport:
    """Compile `model` with `options` (those of `msc.compile`), run it and compare.

    The reference is the single-device captured graph with the same rewrites; that graph before
    rewrites is compared with the module itself, unless it draws random numbers. `dtype`
    converts model and inputs; gradients smaller than a part of the largest (1e-6 in float64, 1% in
    float32, 5% in half types) are measured against that part, since they are rounding of larger
    ones, and one that is zero but for four roundings of the largest agrees within as many. With
    float64, explicit casts to float32 inside the model become float64 on both sides, so that the
    comparison is exact.
    """
    if dtype is not None:
        if options.get("precision") is not None:
            raise UserError("verify takes dtype or precision, not both: they mean the same.")
        options["precision"] = dtype
    program = compile_program(model, inputs, **options)
    result = program.run_virtual(inputs, seed=seed)
    reference = Reference(program, model, inputs, options)
    loss, grads = reference.run(inputs, seed=seed)
    scale = largest(grads.values())
    names = [n for n, layout in program.parameters.items() if layout.trainable]
    dtypes = {loss.dtype, *(program.parameters[name].dtype for name in names)}
    tolerance = max(TOLERANCE.get(dtype, 1e-5) for dtype in dtypes)
    floor = max(_FLOORS.get(dtype, _HALF_FLOOR) for dtype in dtypes)
    grad_errors = {
        n: _gradient_error(result.grads.get(n), grads.get(n), scale, floor, tolerance)
        for n in names
    }
    loss_error = relative_error(result.loss, loss, scale)
    eager = eager_errors(model, inputs, options.get("loss_fn"), options.get("batch_dims"))
    first = _first_difference(program, loss_error, grad_errors, eager, tolerance)
    return VerifyReport(
        ok=not first,
        loss=float(result.loss),
        reference_loss=float(loss),
        loss_error=loss_error,
        grad_errors=grad_errors,
        eager_errors=eager,
        sharded=program.report.sharded,
        notes=program.report.notes,
        fallbacks=program.report.fallbacks,
        tolerance=tolerance,
        first_difference=first,
    )


def relative_error(
    value: Tensor | None, reference: Tensor | None, scale: float, floor: float = _FLOOR
) -> float:
    """max|value - reference| / max(max|reference|, floor * scale).

    Both absent is 0; absent on one side, or NaN on one side only, is infinite. Values that are NaN
    or infinite alike on both sides agree.
    """
    if value is None and reference is None:
        return 0.0
    if value is None:
        return 0.0 if reference is not None and not reference.any() else float("inf")
    if reference is None:
        return float("inf") if value.any() else 0.0
    value, reference = value.double(), reference.double()
    if value.shape != reference.shape:
        return float("inf")
    same = (value == reference) | (value.isnan() & reference.isnan())
    if bool(same.all()):
        return 0.0
    difference = torch.where(same, 0.0, (value - reference).abs())
    finite = reference[reference.isfinite()]
    base = max(float(finite.abs().max()) if finite.numel() else 0.0, floor * scale)
    error = float(difference.max()) / base if base else float("inf")
    return error if error == error else float("inf")


def _gradient_error(
    value: Tensor | None, reference: Tensor | None, scale: float, floor: float, tolerance: float
) -> float:
    """`relative_error` of a gradient, `scale` being the largest of all.

    One that is zero but for rounding, as of a bias before a batch norm, has no digits to agree in:
    it agrees within a few roundings of the largest.
    """
    if reference is not None:
        rounding = _ROUNDINGS * torch.finfo(reference.dtype).eps
        if largest([reference]) <= rounding * scale:
            floor = max(floor, rounding / tolerance)
    return relative_error(value, reference, scale, floor)


def largest(values: Any) -> float:
    """The largest finite magnitude among tensors."""
    found = 0.0
    for value in values:
        finite = value[value.isfinite()]
        if finite.numel():
            found = max(found, float(finite.abs().max()))
    return found


class Reference:
    """The single-device program: the captured graph, normalized, run with autograd.

    A loss that is not separable over micro-batches is taken per micro-batch and averaged.
    """

    def __init__(
        self, program: Program, model: nn.Module, inputs: Any, options: Mapping[str, Any]
    ) -> None:
        self.program = program
        self.model = model
        known = {k: options.get(k) for k in ("loss_fn", "batch_dims")}
        whole = capture(model, inputs, dtype=program.dtype, **known)
        self.parts = 1 if program.separable else program.micro_batches
        if self.parts > 1:
            part = per_micro_batch(whole, inputs, self.parts)
            whole = capture(model, part, dtype=program.dtype, **known)
        for each in NORMALIZE:
            each.run(whole.graph, None)
        apply_rewrites(whole.graph, as_rewrites(options.get("rewrites", ())))
        whole.graph.recompile()
        self.graph = whole.graph
        self.buffers: dict[str, Tensor] = {}

    def run(
        self,
        batch: Any,
        parameters: Mapping[str, Tensor] | None = None,
        step: int = 0,
        seed: int = 0,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of a global batch, at the model's values or those given.

        Afterwards `buffers` holds the buffers as the forward has left them.
        """
        tensors = self.program.flatten(batch)
        values = self._parameters(parameters)
        if buffers is None:
            buffers = {name: self.program.read_buffer(name) for name in self.program.buffers}
        self.buffers = {**buffers}
        total: Tensor | None = None
        for part in range(self.parts):
            loss = self._loss(self.graph, values, self._rows(tensors, part), step, seed)
            total = loss if total is None else total + loss
        assert total is not None
        loss = total / self.parts
        return loss.detach(), _gradients(loss, values)

    def _parameters(self, given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        values = {}
        for name, layout in self.program.parameters.items():
            value = given[name] if given is not None else self.program.read_parameter(name)
            (value,) = self.program.cast([value])  # what the chunks compute with
            values[name] = value.detach().clone().requires_grad_(layout.trainable)
        return values

    def _rows(self, tensors: list[Tensor], part: int) -> list[Tensor]:
        """The rows of micro-batch `part`."""
        dims = [layout.batch_dim for layout in self.program.inputs]
        return [
            tensor if dim is None else tensor.chunk(self.parts, dim)[part]
            for tensor, dim in zip(tensors, dims, strict=True)
        ]

    def _loss(
        self,
        graph: fx.GraphModule,
        values: Mapping[str, Tensor],
        tensors: list[Tensor],
        step: int,
        seed: int,
    ) -> Tensor:
        inputs = {layout.name: t for layout, t in zip(self.program.inputs, tensors, strict=True)}
        arguments = []
        for node in graph.graph.find_nodes(op="placeholder"):
            kind, name = node.meta["kind"], node.meta["name"]
            if kind == "parameter":
                arguments.append(values[name])
            elif kind == "buffer":
                arguments.append(self.buffers[name])
            elif kind == "input":
                arguments.append(inputs[name])
            else:
                arguments.append(torch.tensor([seed, step], dtype=torch.int64))
        loss, *written = fx.Interpreter(graph).run(*arguments)
        assert isinstance(loss, Tensor)
        self.buffers.update(zip(graph.meta["buffers"], written, strict=True))
        return loss


def eager_errors(
    model: nn.Module, inputs: Any, loss_fn: LossFunction | None, batch_dims: Any
) -> dict[str, float]:
    """The captured graph before normalization against the module, in the module's own dtype.

    A model that drops out is compared in eval mode; nothing is compared of a model on `meta`.
    """
    if not all(map(has_values, (*model.parameters(), *model.buffers()))):
        return {}
    modes = {module: module.training for module in model.modules()}
    try:
        captured = capture(model, inputs, loss_fn=loss_fn, batch_dims=batch_dims)
        if any(map(_drops_out, captured.graph.graph.nodes)):
            model.eval()
            captured = capture(model, inputs, loss_fn=loss_fn, batch_dims=batch_dims)
        return _compare_with_eager(captured, model, inputs, loss_fn)
    finally:
        for module, training in modes.items():
            module.training = training


def _drops_out(node: fx.Node) -> bool:
    """Whether a node of a captured graph zeroes elements at random."""
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        dropout_p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(dropout_p != 0.0)
    return "dropout" in str(node.target)


def _compare_with_eager(
    captured: Captured, model: nn.Module, inputs: Any, loss_fn: LossFunction | None
) -> dict[str, float]:
    tensors = captured.flatten(inputs)
    values = {
        name: model.get_parameter(name).detach().clone().requires_grad_(info.requires_grad)
        for name, info in captured.parameters.items()
    }
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        eager = LossModule(model, captured.input_spec, loss_fn)(*tensors)
    except Exception as error:
        given = ", ".join(f"{i.name}: {i.dtype} {list(i.shape)}" for i in captured.inputs)
        raise InputError(
            "The model itself fails on these inputs in eager PyTorch, with "
            f"{type(error).__name__}: {error}. It was given {given}; its parameters are of "
            f"{', '.join(sorted({str(p.dtype) for p in values.values()}))}. dtype= converts both "
            "for the comparison on ranks, not for this one."
        ) from error
    try:
        expected = _gradients(eager, {name: model.get_parameter(name) for name in values})
    except Exception as error:
        raise InputError(
            "The model itself fails in its backward in eager PyTorch, with "
            f"{type(error).__name__}: {error}. torch.autograd.set_detect_anomaly(True) shows the "
            "line of its forward that is the cause."
        ) from error
    with torch.no_grad():
        for name, buffer in before.items():
            model.get_buffer(name).copy_(buffer)
    found = dict(zip((i.name for i in captured.inputs), tensors, strict=True))
    arguments: list[Tensor | None] = []
    for node in captured.graph.graph.find_nodes(op="placeholder"):
        kind, name = node.meta["kind"], node.meta["name"]
        sources = {"parameter": values.get, "input": found.get}
        arguments.append(sources.get(kind, captured.read_buffer)(name))
    loss, *_ = fx.Interpreter(captured.graph).run(*arguments)
    grads = _gradients(loss, values)
    scale = largest(expected.values())
    floor = max(_FLOORS.get(value.dtype, _HALF_FLOOR) for value in (eager, *expected.values()))
    errors = {"loss": relative_error(loss.detach(), eager.detach(), scale)}
    for name in grads | expected:
        errors[name] = _gradient_error(
            grads.get(name), expected.get(name), scale, floor, TOLERANCE[torch.float32]
        )
    return errors


def _gradients(loss: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    wanted = {name: value for name, value in values.items() if value.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        name: g.to_dense() if g.is_sparse else g
        for name, g in zip(wanted, found, strict=True)
        if g is not None
    }


def _first_difference(
    program: Program,
    loss_error: float,
    grad_errors: Mapping[str, float],
    eager_errors: Mapping[str, float],
    tolerance: float,
) -> str:
    if not loss_error <= tolerance:
        return f"loss: error {loss_error:.3g}"
    for name, error in grad_errors.items():
        if not error <= tolerance:
            layout = program.parameters[name]
            shards = {axis: str(p) for axis, p in layout.shards.items()} or "replicated"
            module = name.rpartition(".")[0] or "the model"
            return (
                f"gradient of {name} (module {module}, placement {shards}, stages "
                f"{list(layout.stages)}): error {error:.3g}"
            )
    for name, error in eager_errors.items():
        if not error <= max(tolerance, TOLERANCE[torch.float32]):
            return f"captured graph against eager, {name}: error {error:.3g}"
    return ""
