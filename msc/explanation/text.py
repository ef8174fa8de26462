"""An explanation as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msc.explanation.facts import (
    LEGEND,
    Communication,
    Explanation,
    Part,
    Reasons,
    Value,
    cost_text,
    cost_unit,
)


def to_text(explanation: Explanation) -> str:
    """The whole explanation, without a newline at its end."""
    lines = [heading(explanation)]
    if explanation.missing:
        lines += ["", explanation.missing]
    for part in explanation.parts:
        lines += ["", part_title(part), *_part(part, explanation)]
    if explanation.reasons is not None:
        lines += ["", *_reasons(explanation.reasons, explanation)]
    if explanation.totals:
        lines += ["", "collectives of one rank per step", *_totals(explanation)]
    sections = {
        "one op in place of several": explanation.fused,
        "kernels": explanation.kernels,
        "fallbacks": explanation.fallbacks,
        "notes": explanation.notes,
    }
    for title, found in sections.items():
        if found:
            lines += ["", title, *(f"  {line}" for line in found)]
    return "\n".join([*lines, "", LEGEND])


NO_FALLBACK = "no fallback: every call that could be large is split"


def heading(explanation: Explanation) -> str:
    """What was compiled, and in what its costs are."""
    return f"placements on mesh {explanation.mesh}, {facts(explanation)}"


def facts(explanation: Explanation) -> str:
    """`2 micro-batches; costs are modelled microseconds (us) on cluster 'a100'`."""
    if explanation.cluster:
        costs = f"modelled microseconds (us) on cluster '{explanation.cluster}'"
    else:
        costs = "units of weighted bytes and FLOPs, not times: no cluster is known"
    number = explanation.micro_batches
    return f"{number} micro-batch{'' if number == 1 else 'es'}; costs are {costs}"


def part_title(part: Part) -> str:
    """`h.0-3 (4 equal layers)`."""
    return f"{part.title} ({part.count} equal layers)" if part.count > 1 else part.title


def sent(communication: Communication, explanation: Explanation) -> str:
    """`all_gather over tp, forward: 16.0 KiB, 12.3 us`."""
    one = communication
    return (
        f"{one.kind} over {one.axis}, {one.phase}: {bytes_text(one.nbytes)}, "
        f"{cost_text(one.cost, explanation.cluster)} {cost_unit(explanation)}"
    )


def bytes_text(size: float) -> str:
    """A number of bytes in a fitting unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows in columns, two spaces apart; the last is not padded."""
    rows = list(rows)
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def gradient(value: Value) -> str:
    """Where a parameter's gradient is summed; "" where it is not."""
    over = value.partial_gradient
    return f"gradient summed over {','.join(over)}" if over else ""


def _part(part: Part, explanation: Explanation) -> Iterator[str]:
    for module in part.modules:
        rows = table(_row(v) for v in module.values if v.kind != "inner")
        if not rows and not module.communications:
            continue
        pad = "  " * (module.depth + 1)
        if module.path:
            yield f"{pad[2:]}{module.path}" + (f"  {module.kind}" if module.kind else "")
        yield from (pad + row for row in rows)
        for one in module.communications:
            yield f"{pad}> {sent(one, explanation)}, {one.times}"
            yield f"{pad}    {one.why}"


def _row(value: Value) -> tuple[str, ...]:
    if value.kind != "parameter":
        return f"-> {value.op}", value.type, value.placement, ""
    return value.name, value.type, value.placement, gradient(value)


def _reasons(reasons: Reasons, explanation: Explanation) -> Iterator[str]:
    unit = cost_unit(explanation)
    yield f"{reasons.path}, in {reasons.part}" if reasons.part != reasons.path else reasons.path
    if reasons.choices:
        found = "the given plan" if reasons.planned else "the plan that was found"
        total = cost_text(reasons.cost, explanation.cluster)
        yield (
            f"Cost of {found}: {total} {unit} per micro-batch. Below, the cost of the best plan in "
            "which one choice is another."
        )
    for choice in reasons.choices:
        yield ""
        yield f"  {choice.title}"
        rows = []
        for option in choice.alternatives:
            if option.cost is None:
                rows.append((option.text, "not possible", ""))
                continue
            change = option.cost - reasons.cost
            more = f"{change / reasons.cost:+.1%}" if reasons.cost else ""
            verdict = "chosen" if option.chosen else more
            rows.append((option.text, f"{cost_text(option.cost, explanation.cluster)}", verdict))
        yield from (f"    {line}" for line in table(rows))
    if reasons.unpriced:
        yield ""
        yield f"  {reasons.unpriced} more choices are not priced; ask for a module inside this one."
    if reasons.communications:
        yield ""
        yield "  collectives"
    for one in reasons.communications:
        yield f"    {sent(one, explanation)}, {one.times}"
        yield f"      {one.why}"
    yield ""
    yield "  fallbacks" if reasons.fallbacks else f"  {NO_FALLBACK}"
    yield from (f"    {line}" for line in reasons.fallbacks)


def _totals(explanation: Explanation) -> Iterator[str]:
    rows = [("", "axis", "kind", "calls", "bytes", cost_unit(explanation))]
    for one in explanation.totals:
        cost = cost_text(one.cost, explanation.cluster)
        rows.append((one.stage, one.axis, one.kind, str(one.calls), bytes_text(one.nbytes), cost))
    yield from (f"  {line}" for line in table(rows))
