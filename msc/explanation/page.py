"""An explanation as one HTML page: style and content inside, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from msc.explanation.facts import (
    LEGEND,
    Choice,
    Communication,
    Explanation,
    Module,
    Part,
    Reasons,
    Total,
    Value,
    cost_text,
    cost_unit,
)
from msc.explanation.style import STYLE
from msc.explanation.text import NO_FALLBACK, bytes_text, facts, gradient, part_title
from msc.ir.words import counted


def to_html(explanation: Explanation) -> str:
    """The page as text."""
    title = f"Placements on {explanation.mesh}"
    sections = [
        f"<header><h1>{escape(title)}</h1><p>{escape(facts(explanation))}</p></header>",
        _legend(),
        _paragraph("missing", explanation.missing),
        _per_axis(explanation),
        *(_part(part, explanation) for part in explanation.parts),
        _reasons(explanation.reasons, explanation) if explanation.reasons is not None else "",
        _totals(explanation),
        _lines("One op in place of several", explanation.fused),
        _lines("Kernels", explanation.kernels),
        _lines("Fallbacks", explanation.fallbacks),
        _lines("Notes", explanation.notes),
    ]
    body = "\n".join(filter(None, sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def chip(axis: str, placement: str) -> str:
    """A placement as a coloured label; its colour is that of the dim, of partial, or of whole."""
    kind = "whole"
    if placement.startswith("S"):
        kind = f"s{min(int(placement[1:2]), 3)}"
    elif placement.startswith("P"):
        kind = "partial"
    name = f"<i>{escape(axis)}</i> " if axis else ""
    return f'<span class="chip {kind}">{name}{escape(placement)}</span>'


def _legend() -> str:
    shown = [
        (chip("", "S0"), "split along dim 0"),
        (chip("", "S1"), "dim 1"),
        (chip("", "S2"), "dim 2"),
        (chip("", "P"), "partial sum"),
        (chip("", "whole"), "every rank holds all of it"),
        ('<span class="link">&#8644;</span>', "collective"),
    ]
    items = "".join(f"<li>{mark} {escape(text)}</li>" for mark, text in shown)
    return f'<ul class="legend" title="{escape(LEGEND)}">{items}</ul>'


def _paragraph(kind: str, text: str) -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def _per_axis(explanation: Explanation) -> str:
    """One card for each axis: what the rank that sends most over it sends in a step."""
    cards = []
    for axis in dict.fromkeys(total.axis for total in explanation.totals):
        stages: dict[str, list[Total]] = {}
        for total in explanation.totals:
            if total.axis == axis:
                stages.setdefault(total.stage, []).append(total)
        most = max(stages.values(), key=lambda found: sum(t.nbytes for t in found))
        priced = [t.cost for t in most if t.cost is not None]
        cost = f"{cost_text(sum(priced), explanation.cluster)} {cost_unit(explanation)}"
        cards.append(
            f'<div class="card"><b>{escape(axis)}</b>'
            f"<strong>{escape(bytes_text(sum(t.nbytes for t in most)))}</strong>"
            f"<span>{counted(sum(t.calls for t in most), 'call')} per step</span>"
            f"<span>{escape(cost if priced else 'not priced')}</span></div>"
        )
    if not cards:
        return ""
    return (
        "<section><h2>Sent by one rank in a step, by axis</h2>"
        f'<div class="cards">{"".join(cards)}</div></section>'
    )


def _part(part: Part, explanation: Explanation) -> str:
    modules = "".join(_module(module, explanation) for module in part.modules)
    return f'<section class="part"><h2>{escape(part_title(part))}</h2>{modules}</section>'


def _module(module: Module, explanation: Explanation) -> str:
    outer = [v for v in module.values if v.kind != "inner"]
    inner = [v for v in module.values if v.kind == "inner"]
    if not module.values and not module.communications:
        return ""
    weights = [v for v in outer if v.kind == "parameter"][:1]
    badges = "".join(_chips(value) for value in weights)
    moved = len(module.communications)
    badges += f'<span class="link">&#8644; {moved}</span>' if moved else ""
    kind = f'<span class="kind">{escape(module.kind)}</span>' if module.kind else ""
    hidden = ""
    if inner:
        hidden = (
            f'<details class="inner"><summary>{counted(len(inner), "call")} inside</summary>'
            f"{_values(inner)}</details>"
        )
    sent = "".join(_communication(one, explanation) for one in module.communications)
    return (
        f'<details class="module" open style="margin-left:{module.depth * 1.4:.1f}rem">'
        f"<summary><code>{escape(module.path or 'itself')}</code>{kind}"
        f'<span class="badges">{badges}</span></summary>'
        f"{_values(outer)}{sent}{hidden}</details>"
    )


def _values(values: Sequence[Value]) -> str:
    if not values:
        return ""
    rows = "".join(
        f'<tr class="{value.kind}"><td><code>{escape(_title(value))}</code></td>'
        f"<td><code>{escape(value.type)}</code></td><td>{_chips(value)}</td>"
        f'<td class="note">{escape(gradient(value))}</td></tr>'
        for value in values
    )
    return f'<table class="values">{rows}</table>'


def _title(value: Value) -> str:
    return value.name if value.kind == "parameter" else f"\u2192 {value.op}"


def _chips(value: Value) -> str:
    shown = "".join(chip(axis, text) for axis, text in value.placements.items())
    return shown or chip("", "whole")


def _communication(one: Communication, explanation: Explanation) -> str:
    cost = f"{cost_text(one.cost, explanation.cluster)} {cost_unit(explanation)}"
    text = f"{one.phase} · {bytes_text(one.nbytes)} · {cost} · {one.times}"
    return (
        f'<div class="sent {escape(one.phase)}"><span class="link">&#8644;</span>'
        f"<div><b>{escape(one.kind)}</b> over <b>{escape(one.axis)}</b> "
        f'<span class="facts">{escape(text)}</span>'
        f'<div class="why">{escape(one.why)}</div></div></div>'
    )


def _reasons(reasons: Reasons, explanation: Explanation) -> str:
    unit, found = cost_unit(explanation), "given" if reasons.planned else "found"
    total = cost_text(reasons.cost, explanation.cluster)
    choices = "".join(_choice(choice, reasons, explanation) for choice in reasons.choices)
    sent = "".join(_communication(one, explanation) for one in reasons.communications)
    left = ""
    if reasons.unpriced:
        left = f"{reasons.unpriced} more choices are not priced; ask for a module inside this one."
    return (
        f"<section><h2>{escape(reasons.path)} <small>in {escape(reasons.part)}</small></h2>"
        f"<p>Cost of the plan that was {found}: <b>{escape(f'{total} {unit}')}</b> per micro-batch."
        f" Below, the cost of the best plan in which one choice is another.</p>{choices}"
        f"{_paragraph('missing', left)}<h3>Collectives</h3>{sent or '<p>none</p>'}"
        f"{_lines('Fallbacks', reasons.fallbacks or [NO_FALLBACK])}</section>"
    )


def _choice(choice: Choice, reasons: Reasons, explanation: Explanation) -> str:
    rows = []
    known = [option.cost for option in choice.alternatives if option.cost is not None]
    for option in choice.alternatives:
        width, cost, change = 0.0, "not possible", ""
        if option.cost is not None:
            width = 100 * option.cost / (max(known) or 1.0)
            cost = cost_text(option.cost, explanation.cluster)
            if not option.chosen and reasons.cost:
                change = f"{option.cost / reasons.cost - 1:+.1%}"
        mark = "chosen" if option.chosen else change
        style = "chosen" if option.chosen else ""
        rows.append(
            f'<tr class="{style}"><td><code>{escape(option.text)}</code></td>'
            f'<td class="number">{escape(cost)}</td><td class="number">{escape(mark)}</td>'
            f'<td class="bar"><span style="width:{width:.1f}%"></span></td></tr>'
        )
    title = f"<h3><code>{escape(choice.title)}</code></h3>"
    return f'{title}<table class="choice">{"".join(rows)}</table>'


def _totals(explanation: Explanation) -> str:
    if not explanation.totals:
        return ""
    head = ("stage", "axis", "kind", "calls", "bytes", cost_unit(explanation))
    rows = [
        (
            total.stage,
            total.axis,
            total.kind,
            str(total.calls),
            bytes_text(total.nbytes),
            cost_text(total.cost, explanation.cluster),
        )
        for total in explanation.totals
    ]
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return (
        "<section><h2>Collectives of one rank per step, by stage</h2>"
        f'<table class="totals"><tr>{_cells("th", head)}</tr>{body}</table></section>'
    )


def _cells(tag: str, cells: Iterable[str]) -> str:
    def one(position: int, cell: str) -> Iterator[str]:
        yield f'<{tag} class="number">' if position > 2 else f"<{tag}>"
        yield f"{escape(cell)}</{tag}>"

    return "".join(text for i, cell in enumerate(cells) for text in one(i, cell))


def _lines(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<section><h2>{escape(title)}</h2><ul>{items}</ul></section>"
