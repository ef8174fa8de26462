"""Make explanations: of a program that was compiled here, or of one that was loaded."""

from __future__ import annotations

import dataclasses

from torch import nn

from msc.explanation.communication import totals
from msc.explanation.facts import Explanation, Module, Part, Value
from msc.explanation.overview import Overview, depth, relative, top_modules
from msc.explanation.why import Why
from msc.ir.errors import UserError
from msc.ir.layout import class_names
from msc.ir.placement import Partial, Replicate
from msc.ir.plan import PlannedBlock, PlannedPlaceholder
from msc.ir.rewrites import LEFT_ALONE
from msc.ir.structure import layer_names, layer_of
from msc.ir.values import DTYPE_NAMES
from msc.passes.compilation import Compilation
from msc.program import Program
from msc.report import CompileReport


class Explainer:
    """What `program.explain` asks: a finished compilation, and the user's module."""

    def __init__(self, unit: Compilation, module: nn.Module, report: CompileReport) -> None:
        self._unit = unit
        self._report = report
        self._overview = Overview(unit, module)

    def overview(self) -> Explanation:
        """Every module with its placements and collectives."""
        settings = self._unit.settings
        stages = class_names(settings.mesh.axis_size("pp"), self._unit.tp_bounds)
        cluster = settings.cost.cluster
        return Explanation(
            mesh=str(settings.mesh),
            cluster=cluster.name if cluster is not None else "",
            micro_batches=settings.micro_batches,
            parts=self._overview.parts(),
            totals=totals(self._unit.rank_graphs, stages, self._overview.cost, settings.mesh),
            fallbacks=self._report.fallbacks,
            notes=self._report.notes,
        )

    def why(self, path: str) -> Explanation:
        """One module: what else its values could be, and what that would cost."""
        settings = self._unit.settings
        cluster = settings.cost.cluster
        missing = ""
        if self._unit.placing is None:
            missing = f"The mesh {settings.mesh} has one rank of tp: there was nothing to choose."
        return Explanation(
            mesh=str(settings.mesh),
            cluster=cluster.name if cluster is not None else "",
            micro_batches=settings.micro_batches,
            reasons=Why(self._overview).reasons(path),
            missing=missing,
        )


def explain(program: Program, explainer: Explainer | None, module: str | None) -> Explanation:
    """Explain a program; it has no explainer if it was loaded."""
    if module is not None and not isinstance(module, str):
        raise UserError(f"module is {module!r}; it is the name of a module, layer or parameter.")
    if explainer is None:
        return _explain_loaded(program, module)
    if module is not None:
        return explainer.why(module)
    fused, kernels = _fused(program.report), program.kernels().lines
    return dataclasses.replace(explainer.overview(), fused=fused, kernels=kernels)


def _fused(report: CompileReport) -> tuple[str, ...]:
    """What the passes have made one op; the report has what they left alone, too."""
    found = (*report.fused_losses, *report.epilogues, *report.fused_collectives)
    return tuple(line for line in found if LEFT_ALONE not in line)


_LOADED = (
    "This program was loaded: it has its graphs and its plan, but neither the model nor the "
    "search. Activations, the collectives of each module and the alternatives are explained by the "
    "program that msc.compile returns: msc.compile(..., plan=program.plan).explain()."
)


def _explain_loaded(program: Program, module: str | None) -> Explanation:
    """What a loaded program can say: where parameters lie, and what is sent in a step."""
    if module is not None:
        raise UserError(f"Why '{module}' lies as it does cannot be said. {_LOADED}")
    return Explanation(
        mesh=str(program.mesh),
        cluster="",
        micro_batches=program.micro_batches,
        parts=tuple(_planned(program, block) for block in program.plan.blocks),
        totals=totals(program.rank_graphs, program.class_names, None, program.mesh),
        fallbacks=program.report.fallbacks,
        notes=program.report.notes,
        fused=_fused(program.report),
        kernels=program.kernels().lines,
        missing=_LOADED,
    )


def _planned(program: Program, block: PlannedBlock) -> Part:
    """The parameters of a distinct block."""
    first = block.instances[0]
    base = first if layer_of(first) is not None else ""
    modules: dict[str, list[Value]] = {}
    for each in block.placeholders:
        if each.kind == "parameter":
            home = each.name.rpartition(".")[0]
            modules.setdefault(home, []).append(_parameter(program, each, home))
    listed = [
        Module(relative(path, base), depth(path, list(modules), base), "", tuple(values), ())
        for path, values in modules.items()
    ]
    title = layer_names(block.instances) if base else top_modules(c.module for c in block.calls)
    return Part(title, len(block.instances), tuple(listed))


def _parameter(program: Program, planned: PlannedPlaceholder, home: str) -> Value:
    layout = program.parameters[planned.name]
    state = program.plan.parameters[planned.name]
    over = ["dp"] if program.mesh.axis_size("dp") > 1 else []
    over += ["tp"] if isinstance(state.grad, Partial) else []
    shape = ",".join(map(str, planned.shape))
    return Value(
        relative(planned.name, home),
        "parameter",
        "",
        f"{DTYPE_NAMES[program.dtype_of(layout)]}[{shape}]",
        {} if isinstance(state.value, Replicate) else {"tp": str(state)},
        tuple(over) if layout.trainable else (),
    )
