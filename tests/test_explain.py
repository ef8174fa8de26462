"""What an explanation says: the lines of a GPT on tp, its collectives, and why."""

from __future__ import annotations

import functools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import msc
from msc.cost import Cluster, CostModel
from msc.explanation import Explanation, why
from msc.explanation.overview import top_modules
from msc.ir.errors import UserError
from msc.ir.structure import layer_names
from msc.program import Program
from tests import models

FAST_LINKS = {
    "name": "fast links",
    "flops_per_s": 1e12,
    "memory_bytes_per_s": 1e12,
    "memory_bytes": 8e10,
    "devices_per_node": 8,
    "node_bytes_per_s": 1e12,
    "network_bytes_per_s": 1e12,
    "node_latency_s": 1e-9,
    "network_latency_s": 1e-8,
}


@functools.cache
def gpt(mesh: str = "tp=2", with_cluster: bool = False) -> Program:
    torch.manual_seed(0)
    return msc.compile(
        models.GPT(),
        models.tokens(),
        mesh=mesh,
        microbatches=2,
        cluster=FAST_LINKS if with_cluster else None,
    )


def section(text: str, title: str) -> list[str]:
    """The lines of a paragraph, squeezed; N for costs without a cluster, which mean little."""
    paragraphs = [part.splitlines() for part in text.split("\n\n")]
    (found,) = (lines for lines in paragraphs if lines[0].startswith(title))
    lines = [re.sub(r" {2,}", "  ", line.strip()) for line in found]
    return [re.sub(r"[\d,]+ units", "N units", line) for line in lines]


def test_equal_layers_are_shown_once_with_their_placements_and_collectives() -> None:
    lines = section(str(gpt().explain()), "h.0-3")
    assert lines[0] == "h.0-3 (4 equal layers)"
    start = lines.index("attn  Linear")
    assert lines[start : start + 8] == [
        "attn  Linear",
        "weight  f32[192,64]  tp S0/3",
        "bias  f32[192]  tp S0/3",
        "-> aten.add.Tensor  f32[8,16,192]  mb S0  tp S2/3",
        "> all_gather over tp, forward: 16.0 KiB, N units, 2x per step and layer",
        "ln_1 (aten.layer_norm) is computed as S0, attn (msc.linear) reads R~",
        "> reduce_scatter over tp, backward: 16.0 KiB, N units, 2x per step and layer",
        "ln_1 (aten.layer_norm) is computed as S0, attn (msc.linear) reads R~",
    ]
    kinds = [line.split(":")[0] for line in lines if line.startswith(">")]
    assert sorted(kinds) == sorted(
        ["> all_gather over tp, forward", "> reduce_scatter over tp, forward"] * 2
        + ["> all_gather over tp, backward", "> reduce_scatter over tp, backward"] * 2
    )
    assert "weight  f32[64]  whole  gradient summed over tp" in lines


def test_gradients_are_said_to_be_summed_over_dp() -> None:
    lines = section(str(gpt("pp=2,dp=2,tp=2").explain()), "h.0-3")
    assert "weight  f32[256,64]  tp S0  gradient summed over dp" in lines
    assert "weight  f32[64]  whole  gradient summed over dp,tp" in lines


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp=2,tp=2"])
def test_collectives_of_the_layers_add_up_to_what_is_sent(mesh: str) -> None:
    explanation = gpt(mesh).explain()
    layers: dict[str, list[int]] = {}
    for part in explanation.parts:
        for module in part.modules:
            for one in module.communications:
                found = layers.setdefault(one.kind, [0, 0])
                found[0] += one.calls * one.layers
                found[1] += one.calls * one.layers * one.nbytes
    sent: dict[str, list[int]] = {}
    for total in explanation.totals:
        if total.axis == "tp":
            found = sent.setdefault(total.kind, [0, 0])
            found[0] += total.calls
            found[1] += total.nbytes
    assert layers["all_gather"] == sent["all_gather"]
    assert layers["reduce_scatter"] == sent["reduce_scatter"]
    counted = {k: v for stage in gpt(mesh).report.collectives for k, v in stage.items()}
    assert sum(total.calls for total in explanation.totals) == sum(
        calls for stage in gpt(mesh).report.collectives for calls, _ in stage.values()
    )
    assert counted


def test_without_a_cluster_costs_are_called_units() -> None:
    text = str(gpt().explain())
    assert text.startswith(
        "placements on mesh tp=2, 2 micro-batches; costs are units of weighted bytes and FLOPs, "
        "not times: no cluster is known\n"
    )
    assert " us" not in text


def test_with_a_cluster_costs_are_microseconds_of_its_model() -> None:
    explanation = gpt(with_cluster=True).explain()
    assert "modelled microseconds (us) on cluster 'fast links'" in str(explanation)
    model = CostModel(Cluster.load(FAST_LINKS))
    (part,) = (part for part in explanation.parts if part.count == 4)
    for one in (one for module in part.modules for one in module.communications):
        assert one.cost == model.collective(one.kind, one.nbytes, 2)
    assert "16.0 KiB, 0.00919 us" in str(explanation)


@functools.cache
def down() -> Explanation:
    return gpt().explain("h.2.down")


def test_why_lists_the_alternatives_with_their_costs() -> None:
    reasons = down().reasons
    assert reasons is not None
    assert reasons.part == "h.0-3"
    weight = reasons.choices[0]
    assert weight.title == "down.weight f32[64,256]"
    assert weight.alternatives[0].text == "S1"
    assert weight.alternatives[0].chosen
    assert {other.text for other in weight.alternatives[1:]} == {"S0", "R", "R~"}
    for choice in reasons.choices:
        assert choice.alternatives[0].cost == reasons.cost == gpt().report.search_cost
        for other in choice.alternatives[1:]:
            assert other.cost is None or other.cost >= reasons.cost


def test_the_cost_of_an_alternative_is_that_of_the_plan_that_has_it() -> None:
    reasons = down().reasons
    assert reasons is not None
    (rows,) = (a for a in reasons.choices[0].alternatives if a.text == "S0")
    torch.manual_seed(0)
    pinned = msc.compile(
        models.GPT(),
        models.tokens(),
        mesh="tp=2",
        microbatches=2,
        pins={"h.*.down.weight": {"tp": msc.Shard(0)}},
    )
    assert rows.cost == pytest.approx(pinned.report.search_cost)


def test_why_as_text() -> None:
    text = str(down())
    lines = section(text, "  down.weight")
    assert lines[0] == "down.weight f32[64,256]"
    assert re.fullmatch(r"S1  [\d,]+  chosen", lines[1])
    assert re.fullmatch(r"S0  [\d,]+  \+[\d.]+%", lines[2])
    assert section(text, "  down (msc.linear)")[1].startswith("S2, S1 -> P  ")
    assert section(text, "  collectives")[1:3] == [
        "reduce_scatter over tp, forward: 16.0 KiB, N units, 2x per step and layer",
        "down (msc.linear) is computed as P, down (aten.add.Tensor) reads S0",
    ]
    assert "no fallback" in text


def test_why_of_a_parameter() -> None:
    reasons = gpt().explain("h.1.attn.weight").reasons
    assert reasons is not None
    assert [choice.title for choice in reasons.choices] == ["attn.weight f32[192,64]"]


def test_why_of_a_layer_prices_weights_first_and_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(why, "PRICED", 16)
    reasons = gpt().explain("h.1").reasons
    assert reasons is not None
    assert reasons.choices[0].title == "attn.weight f32[192,64]"
    assert len(reasons.communications) == 8
    assert reasons.unpriced > 0
    assert f"{reasons.unpriced} more choices are not priced" in str(gpt().explain("h.1"))


@pytest.mark.parametrize("path", ["h.0.dwon", "h.9.down", "nothing"])
def test_an_unknown_module_is_refused_with_those_that_there_are(path: str) -> None:
    with pytest.raises(UserError, match=f"nothing in a module '{re.escape(path)}'") as error:
        gpt().explain(path)
    if path == "h.0.dwon":
        assert "h.0.down" in str(error.value)


@torch.library.custom_op("explained::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    """An op that no rule knows."""
    return x / 2


halve.register_fake(torch.empty_like)
halve.register_autograd(lambda ctx, grad: grad / 2)


class WithoutRule(nn.Module):
    """A weight that an op without a rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.first(x) @ halve(self.second.weight)).square().sum()
        return result


def test_what_fell_back_is_said_with_the_reason() -> None:
    program = msc.compile(WithoutRule(), (torch.randn(4, 4),), mesh="tp=2")
    (line,) = (line for line in program.explain().fallbacks if "no sharding rule" in line)
    assert "explained.halve has no sharding rule; it runs whole on every tp rank (" in line
    said = line.split(" (")[0]
    assert said in str(program.explain("second.weight"))
    assert said not in str(program.explain("first"))


def test_what_became_one_op_is_said(tmp_path: Path) -> None:
    program = msc.compile(models.GPT(), models.tokens(), mesh="dp=2", fuse_loss=True)
    found = program.explain().fused
    assert any(
        line.startswith("fuse-loss, lm_head: one op with its cross entropy") for line in found
    )
    assert any(line.startswith("fuse-epilogue, h.0.up, gelu in the forward") for line in found)
    assert not any("left alone" in line for line in found)
    assert "\n\none op in place of several\n  fuse-loss, lm_head: one" in str(program.explain())
    program.save(tmp_path)
    assert msc.load(tmp_path).explain().fused == found


@pytest.mark.parametrize("mesh", ["", "dp=2", "pp=2"])
def test_without_tp_there_is_nothing_to_choose(mesh: str) -> None:
    program = gpt(mesh)
    assert "weight  f32[192,64]  whole" in "\n".join(section(str(program.explain()), "h.0-3"))
    text = str(program.explain("h.0.down"))
    assert "has one rank of tp: there was nothing to choose" in text


def test_a_loaded_program_says_what_it_cannot_explain(tmp_path: Path) -> None:
    gpt("pp=2,dp=2,tp=2").save(tmp_path)
    loaded = msc.load(tmp_path)
    text = str(loaded.explain())
    assert "This program was loaded: it has its graphs and its plan, but neither the model" in text
    assert "weight  f32[256,64]  tp S0  gradient summed over dp" in section(text, "h.0-3")
    whole = gpt("pp=2,dp=2,tp=2").explain()
    assert [(t.axis, t.calls, t.nbytes) for t in loaded.explain().totals] == [
        (t.axis, t.calls, t.nbytes) for t in whole.totals
    ]
    with pytest.raises(
        UserError, match=r"Why 'h\.0' lies as it does cannot be said\. This program"
    ):
        loaded.explain("h.0")


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["gpt.embedding", "gpt.embedding.token", "gpt.embedding.position"], "gpt.embedding"),
        (["", "gpt.norm", "gpt.head", "gpt.head.weight"], "gpt.norm, gpt.head"),
        (["wte", "wpe", "", "drop"], "wte, wpe, drop"),
        (["a.b.c"], "a.b.c"),
        (["", ""], "(model)"),
    ],
)
def test_what_is_no_layer_is_named_by_its_modules(paths: list[str], name: str) -> None:
    assert top_modules(paths) == name


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["h.0", "h.1", "h.2", "h.5", "g.6"], "h.0-2, h.5, g.6"),
        (["0", "1"], "0-1"),
        (["head"], "head"),
        ([""], "(model)"),
    ],
)
def test_equal_layers_have_one_name(paths: list[str], name: str) -> None:
    assert layer_names(paths) == name


def test_stages_that_send_the_same_are_one() -> None:
    torch.manual_seed(0)
    model = models.GPT(width=16, heads=2, layers=6)
    program = msc.compile(model, models.tokens(), mesh="pp=4,tp=2", microbatches=4)
    stages = dict.fromkeys(total.stage for total in program.explain().totals)
    assert len(stages) < 4
    assert "stage0" in stages
    assert any(re.fullmatch(r"stage\d to stage\d", stage) for stage in stages)


class Page(HTMLParser):
    """The text of a page, what it refers to, and whether its elements are closed."""

    VOID = ("meta", "br", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.references += [str(v) for k, v in attrs if k in ("src", "href", "action", "onclick")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.found.append(data)


@pytest.mark.parametrize("module", [None, "h.0.down"])
def test_the_page_says_the_same_and_needs_nothing_else(module: str | None, tmp_path: Path) -> None:
    explanation: Any = gpt("pp=2,dp=2,tp=2", with_cluster=True).explain(
        module, html=tmp_path / "plan.html"
    )
    text = (tmp_path / "plan.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.references == []
    assert not re.search(r"https?:|url\(|@import|<script|<link", text)
    shown = " ".join(page.found)
    for part in explanation.parts:
        assert part.title in shown
        for each in part.modules:
            for value in each.values:
                assert value.type in shown
            for one in each.communications:
                assert one.why in shown
    if explanation.reasons is not None:
        for choice in explanation.reasons.choices:
            assert choice.title in shown
            assert all(option.text in shown for option in choice.alternatives)


def test_a_page_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(UserError, match="cannot be written"):
        gpt().explain(html="/nowhere/plan.html")
