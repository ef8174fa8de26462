"""`msc.compile`: from an ordinary model to a parallel training program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from msc.capture import Captured, capture
from msc.cost import Cluster, CostModel
from msc.ir import flags
from msc.ir.errors import PlanError, UserError
from msc.ir.layout import BufferLayout, InputLayout, ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.optimizer import AdamW
from msc.ir.passes import Pass
from msc.ir.placement import Shard
from msc.ir.structure import output_nodes
from msc.passes.compilation import Compilation, Settings
from msc.passes.pipelines import TRAIN
from msc.passes.schedules import schedule_of
from msc.passes.sharding.batch import NotSeparableError
from msc.program import BACKENDS, Program
from msc.report import make_report

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def compile(
    model: nn.Module,
    inputs: tuple[Any, ...] | dict[str, Any],
    *,
    mesh: str | Mapping[str, int] | Mesh = "",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: AdamW | None = None,
    microbatches: int = 1,
    schedule: str = "1f1b",
    cluster: Cluster | str | Path | Mapping[str, Any] | None = None,
    memory: int | None = None,
    precision: str | torch.dtype | None = None,
    passes: Mapping[str, Pass | Sequence[Pass]] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    backend: str = "aten",
) -> Program:
    """Compile a single-device model into one program per rank of `mesh`.

    Args:
        model: any trainable module, with no distributed code in it; may be on `meta`.
        inputs: the global batch of one step, a tuple (positional) or dict (keywords); real, fake or
            meta tensors. The program takes batches of exactly these shapes.
        mesh: `"pp=2,dp=2,tp=2"`, a dict, or `msc.Mesh`; one rank if left out.
        loss_fn: maps the model's output to the scalar loss; without it the model returns the loss,
            or an object or dict with `.loss`.
        optimizer: `msc.AdamW(...)`, or None for loss and gradients only.
        microbatches: parts of each dp rank's batch that run one after the other.
        schedule: "1f1b" or "gpipe".
        cluster: an `msc.Cluster`, a mapping or a JSON file; costs are then seconds on it.
        memory: bytes per rank that parameters, gradients, optimizer state and activations may take.
        precision: "float32", "float64" or "bfloat16": the dtype of parameters and floating inputs;
            None keeps the model's own.
        passes: `{"before:cut": MyPass()}`: the user's own passes, with their place in the pipeline.
        batch_dims: input name -> batch dim or None, where dim 0 of equal length is not it.
        backend: "aten", or "inductor" to compile the chunk graphs with torch's Inductor.

    Raises:
        CaptureError: the model is not one graph; names the user's line.
        PlanError: mesh, batch, schedule or memory do not fit; says which number to change.
    """
    settings = _settings(mesh, microbatches, schedule, optimizer, cluster)
    _check_backend(backend)
    dtype = _dtype(precision)
    pipeline = TRAIN.with_user_passes(passes or {})
    started = time.process_time()
    captured = capture(model, inputs, loss_fn=loss_fn, batch_dims=batch_dims, dtype=dtype)
    seconds = time.process_time() - started
    check_batch(captured, settings)
    notes = list(captured.notes)
    unit = new_unit(captured, settings)
    try:
        pipeline.run(unit)
    except NotSeparableError as error:
        notes.append(_not_separable(error))
        settings = replace_separable(settings)
        part = per_micro_batch(captured, inputs, microbatches)
        again = capture(model, part, loss_fn=loss_fn, batch_dims=batch_dims, dtype=dtype)
        unit = new_unit(again, settings, captured)
        scale_loss(unit.graphs["forward"], microbatches)
        pipeline.run(unit)
    if not unit.rank_graphs:
        raise UserError(
            f"Compilation stopped after pass '{unit.log[-1].name}', as {flags.STOP_AFTER.name} "
            f"asks: no program was made. {flags.DUMP.name}=<folder> writes what the passes made."
        )
    report = make_report(unit, seconds, notes)
    program = Program(
        mesh=settings.mesh,
        rank_graphs=unit.rank_graphs,
        chunk_graphs=unit.chunk_graphs,
        parameters=_parameters(captured, unit),
        buffers={n: BufferLayout(n, b.shape, b.dtype) for n, b in captured.buffers.items()},
        tp_bounds=unit.tp_bounds,
        inputs=tuple(InputLayout(i.name, i.shape, i.dtype, i.batch_dim) for i in captured.inputs),
        input_spec=captured.input_spec,
        dtype=dtype,
        optimizer=optimizer,
        micro_batches=microbatches,
        separable=settings.separable,
        backend=backend,
        report=report,
        source=captured,
        pass_results=unit.dump,
    )
    _check_memory(program, memory)
    return program


def _settings(
    mesh: Any, microbatches: int, schedule: str, optimizer: AdamW | None, cluster: Any
) -> Settings:
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise PlanError(f"microbatches is {microbatches!r}; it is a whole number of at least 1.")
    if optimizer is not None and not isinstance(optimizer, AdamW):
        raise PlanError(
            f"optimizer is a {type(optimizer).__name__}; pass msc.AdamW(...), or None for loss and "
            "gradients only."
        )
    schedule_of(schedule)
    cost = CostModel(None if cluster is None else Cluster.load(cluster))
    return Settings(
        Mesh.parse(mesh),
        micro_batches=microbatches,
        schedule=schedule,
        optimizer=optimizer,
        cost=cost,
    )


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise UserError(f"Backend '{backend}' is unknown. The backends are {', '.join(BACKENDS)}.")


def _dtype(precision: str | torch.dtype | None) -> torch.dtype | None:
    if precision is None or precision in DTYPES.values():
        return precision  # type: ignore[return-value]
    if not isinstance(precision, str) or precision not in DTYPES:
        raise PlanError(f"precision is {precision!r}; it is one of {', '.join(DTYPES)}, or None.")
    return DTYPES[precision]


def check_batch(captured: Captured, settings: Settings) -> None:
    """Raise `PlanError` unless the batch splits evenly over dp and the micro-batches."""
    dp = settings.mesh.axis_size("dp")
    parts = dp * settings.micro_batches
    if captured.batch_size % parts:
        raise PlanError(
            f"The global batch of {captured.batch_size} samples does not split evenly over "
            f"dp={dp} ranks times {settings.micro_batches} micro-batches = {parts} parts. "
            f"Use a batch that is a multiple of {parts}, or fewer micro-batches."
        )


def new_unit(captured: Captured, settings: Settings, whole: Captured | None = None) -> Compilation:
    """The compilation that starts from a capture; `whole` is the capture of the global batch."""
    for node in captured.graph.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] == "parameter":
            node.meta["requires_grad"] = captured.parameters[node.meta["name"]].requires_grad
    dims = {info.name: info.batch_dim for info in captured.inputs}
    unit = Compilation(
        captured.graph,
        Settings(**{**settings.__dict__, "batch_dims": dims}),
        captured.graph.meta["fake_mode"],
    )
    unit.input_shapes = {info.name: info.shape for info in (whole or captured).inputs}
    return unit


def replace_separable(settings: Settings) -> Settings:
    """The same settings for a model whose loss is taken per micro-batch."""
    return Settings(**{**settings.__dict__, "separable": False})


def per_micro_batch(captured: Captured, inputs: Any, microbatches: int) -> Any:
    """The first of `microbatches` equal parts of the example batch."""
    tensors = captured.input_spec.flatten(inputs)
    parts = []
    for info, tensor in zip(captured.inputs, tensors, strict=True):
        if info.batch_dim is not None:
            rows = tensor.shape[info.batch_dim] // microbatches
            tensor = tensor.narrow(info.batch_dim, 0, rows)
        parts.append(tensor)
    return captured.input_spec.rebuild(parts)


def scale_loss(gm: fx.GraphModule, microbatches: int) -> None:
    """Divide the loss by the number of micro-batches: their mean is the loss of the step."""
    (loss,) = output_nodes(gm)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        scaled = gm.graph.call_function(torch.ops.aten.div.Tensor, (loss, microbatches))
    scaled.meta = dict(loss.meta)
    output.args = ((scaled,),)
    gm.recompile()


def _not_separable(error: NotSeparableError) -> str:
    node = error.node
    where = node.meta.get("module_path") or node.meta.get("source") or node.name
    return (
        f"The loss is not a sum over samples: {where} ({node.target}) {error.reason}. It is "
        "computed per micro-batch and averaged, as gradient accumulation on one device does."
    )


def _parameters(captured: Captured, unit: Compilation) -> dict[str, ParameterLayout]:
    layouts: dict[str, ParameterLayout] = {}
    for name, info in captured.parameters.items():
        states = unit.parameter_states.get(name, {})
        shards = {a: s.value for a, s in states.items() if isinstance(s.value, Shard)}
        layouts[name] = ParameterLayout(
            name,
            tuple(info.shape),
            info.dtype,
            info.requires_grad,
            info.aliases,
            shards,
            tuple(unit.stages_of.get(name, ())),
        )
    return layouts


def _check_memory(program: Program, memory: int | None) -> None:
    if memory is None:
        return
    if not isinstance(memory, (int, float)) or isinstance(memory, bool) or memory <= 0:
        raise PlanError(f"memory is {memory!r}; it is a positive number of bytes per rank.")
    needed = program.memory_bytes()
    worst = max(range(len(needed)), key=needed.__getitem__)
    if needed[worst] > memory:
        raise PlanError(
            f"Pipeline {program.class_names[worst]} needs {needed[worst]:,} bytes per rank "
            "(parameters, gradients, optimizer state and saved activations), but memory is "
            f"{memory:,}. "
            "Use more tp or pp ranks, or more micro-batches."
        )
