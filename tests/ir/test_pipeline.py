"""The pipeline runs passes in order and holds each of them to what it promises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import msc
from msc.ir.errors import UserError, VerifyError
from msc.ir.flags import FLAGS
from msc.ir.pipeline import BIT_EXACT, GraphPass, Pass, Pipeline, Unit, UnitPass
from msc.ir.printer import format_graph
from tests.ir.simple_passes import (
    BringBack,
    DropNeg,
    Lengthen,
    NeedsNoNeg,
    Replace,
    Reports,
    Split,
    aten,
    calls,
    chain,
    forward,
    one_size,
)


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in FLAGS:
        monkeypatch.delenv(flag.name, raising=False)


def fails(unit: Unit, *passes: Pass) -> str:
    with pytest.raises(VerifyError) as error:
        Pipeline(passes).run(unit)
    return str(error.value)


def test_passes_run_in_order_and_are_recorded() -> None:
    unit = forward(aten.neg.default, aten.exp.default, aten.neg.default)
    Pipeline([DropNeg(), NeedsNoNeg()]).run(unit)
    gm = unit.graphs["forward"]
    assert len(calls(gm, aten.exp.default)) == 3
    assert [(r.name, r.changes, r.nodes_before, r.nodes_after) for r in unit.log] == [
        ("drop-neg", 2, 5, 5),
        ("needs-no-neg", 2, 5, 5),
    ]
    assert all(record.cpu_seconds >= 0 for record in unit.log)


def test_a_changed_graph_is_recompiled() -> None:
    unit = forward(aten.neg.default)
    Pipeline([DropNeg()]).run(unit)
    assert unit.graphs["forward"](torch.tensor([-1.0, 2.0]))[0].tolist() == [1.0, 2.0]


def test_a_second_run_changes_nothing() -> None:
    unit = forward(aten.neg.default)
    Pipeline([DropNeg()]).run(unit)
    text = format_graph(unit.graphs["forward"])
    Pipeline([DropNeg()]).run(unit)
    assert [record.changes for record in unit.log] == [1, 0]
    assert format_graph(unit.graphs["forward"]) == text


def test_what_was_ensured_stays_checked() -> None:
    message = fails(forward(aten.neg.default), DropNeg(), NeedsNoNeg(), BringBack())
    assert (
        message
        == """\
no_neg fails after pass 3 of 3, bring-back, in graph 'forward':
  %neg_default negates

  %x: f32[2] = input
> %neg_default: f32[2] = aten.neg(%x)
  return (%neg_default,)

This is a bug in the pass. MSC_DUMP=<folder> writes the program before and after it."""
    )


def test_what_a_pass_ensures_is_checked_even_if_it_changes_nothing() -> None:
    message = fails(forward(aten.neg.default), DropNeg(old=aten.exp.default))
    assert message.startswith("no_neg fails after pass 1 of 1, drop-neg, in graph 'forward':")


def test_a_unit_pass_replaces_graphs_and_its_check_spans_them() -> None:
    unit = forward(aten.abs.default)
    message = fails(unit, Split(), Lengthen())
    assert message.startswith(
        "one_size fails after pass 2 of 2, lengthen:\n  graphs of [3, 4] nodes\n\nThis is a bug"
    )
    assert list(unit.graphs) == ["block.0", "block.1"]
    assert [record.nodes_after for record in unit.log] == [6, 7]


def test_what_was_ensured_concerns_the_graphs_of_that_pass() -> None:
    unit = Unit({"forward": chain(aten.neg.default), "block.1": chain(aten.neg.default)})
    Pipeline([DropNeg(), Lengthen()]).run(unit)
    assert len(calls(unit.graphs["block.1"], aten.neg.default)) == 2


@dataclass(frozen=True)
class NeedsOneSize(Replace):
    name: ClassVar[str] = "needs-one-size"
    requires = (one_size,)


def test_a_check_of_the_unit_can_be_required() -> None:
    assert Pipeline([Split(), NeedsOneSize()]).names == ("split", "needs-one-size")
    with pytest.raises(UserError, match="requires one_size, which no pass before it ensures"):
        Pipeline([NeedsOneSize(), Split()])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            Reports(rename=True, number=0),
            "pass 1 of 1, reports, reports 0 changes of graph 'forward', but its text changed. ",
        ),
        (
            Reports(rename=False, number=2),
            "pass 1 of 1, reports, reports 2 changes of graph 'forward', "
            "but its text did not change. ",
        ),
        (Split(number=0), "pass 1 of 1, split, reports 0 changes of the program, but its text"),
        (Reports(number=None), "pass 1 of 1, reports, returned None; a pass returns the number"),
        (Reports(number=True), "pass 1 of 1, reports, returned True; a pass returns the number"),
        (Reports(number=-1), "pass 1 of 1, reports, returned -1; a pass returns the number"),
    ],
)
def test_a_wrong_report_is_refused(wrong: Pass, message: str) -> None:
    assert fails(forward(aten.abs.default), wrong).startswith(message)


@dataclass(frozen=True)
class Swap(GraphPass):
    name: ClassVar[str] = "swap"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Unit) -> int:
        unit.graphs["forward"] = chain(aten.exp.default)
        return 1


def test_a_graph_pass_may_not_replace_graphs() -> None:
    message = fails(forward(aten.abs.default), Swap())
    assert message.startswith("pass 1 of 1, swap, added, removed or replaced graphs of the unit.")


def test_the_input_is_verified_too() -> None:
    unit = forward(aten.abs.default)
    del calls(unit.graphs["forward"], aten.abs.default)[0].meta["val"]
    message = fails(unit, DropNeg())
    assert message.startswith("values_known fails after capture, in graph 'forward':")


def test_ops_that_write_may_come_in_but_not_come_back() -> None:
    """A captured graph may have in-place ops until a pass has removed them."""
    remove = DropNeg(old=aten.neg_.default)
    bring = BringBack(old=aten.abs.default, new=aten.neg_.default)
    unit = forward(aten.neg_.default, aten.exp.default)
    Pipeline([NeedsNothing(), remove]).run(unit)
    message = fails(unit, bring)
    assert message.startswith("functional fails after pass 1 of 1, bring-back, in graph 'forward':")
    message = fails(forward(aten.neg_.default), remove, bring)
    assert message.startswith("functional fails after pass 2 of 2, bring-back, in graph 'forward':")


@dataclass(frozen=True)
class Put(UnitPass):
    """Removes the forward graph, or puts one there."""

    numerics: ClassVar[str] = "changes, on purpose"
    targets: tuple[Any, ...] = ()

    def run(self, unit: Unit) -> int:
        unit.graphs.pop("forward", None)
        if self.targets:
            unit.graphs["forward"] = chain(*self.targets)
        return 1


class Remove(Put):
    name: ClassVar[str] = "remove"


class Add(Put):
    name: ClassVar[str] = "add"


def test_a_new_graph_must_be_functional_whatever_stood_there_before() -> None:
    message = fails(forward(aten.neg_.default), Remove(), Add((aten.neg_.default,)))
    assert message.startswith("functional fails after pass 2 of 2, add, in graph 'forward':")


@dataclass(frozen=True)
class NeedsNothing(Replace):
    name: ClassVar[str] = "needs-nothing"
    old: Any = aten.exp.default
    new: Any = aten.log.default


@dataclass(frozen=True)
class Raises(GraphPass):
    name: ClassVar[str] = "raises"
    numerics: ClassVar[str] = BIT_EXACT
    error: Any = None

    def run(self, gm: fx.GraphModule, unit: Unit) -> int:
        raise self.error


def test_an_exception_of_a_pass_names_the_pass() -> None:
    with pytest.raises(KeyError) as error:
        Pipeline([Raises(KeyError("x"))]).run(forward())
    assert error.value.__notes__ == ["This happened in pass 1 of 1, raises."]


def test_an_error_about_the_model_is_left_alone() -> None:
    with pytest.raises(UserError) as error:
        Pipeline([Raises(UserError("The model is too small."))]).run(forward())
    assert str(error.value) == "The model is too small."
    assert not hasattr(error.value, "__notes__")


@dataclass(frozen=True)
class BadName(Replace):
    name: ClassVar[str] = "Bad_name"


@dataclass(frozen=True)
class Silent(Replace):
    name: ClassVar[str] = "silent"
    numerics: ClassVar[str] = ""


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (
            [Replace(), NeedsNoNeg()],
            "Pass 'needs-no-neg' requires no_neg, which no pass before it ensures. "
            "Before it stand: replace.",
        ),
        ([NeedsNoNeg(), DropNeg()], "Before it stand: none."),
        ([Replace(), Replace()], "Pass 'replace' stands in the pipeline twice."),
        ([BadName()], "BadName has the name 'Bad_name'; a pass has"),
        ([Silent()], "Pass 'silent' does not say what it does to numbers."),
        ([DropNeg], "is no pass; a pass is an instance of a subclass"),
    ],
)
def test_a_pipeline_is_checked_when_it_is_built(passes: Sequence[Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Pipeline(passes)


def test_a_pass_is_frozen() -> None:
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclass(type("Thawed", (GraphPass,), {"__annotations__": {"x": int}}))


def test_a_pass_prints_its_options() -> None:
    assert str(Split(number=3)) == "split{number=3}"
    assert str(Replace()) == "replace{old=aten.neg,new=aten.abs}"
    assert str(Swap()) == "swap"


PIPELINE = Pipeline([DropNeg(), NeedsNoNeg()])


def test_user_passes_go_where_they_are_put() -> None:
    one, two = Reports(), Swap()
    pipeline = PIPELINE.with_user_passes({"before:drop-neg": one, "after:drop-neg": [two]})
    assert pipeline.names == ("reports", "drop-neg", "swap", "needs-no-neg")
    assert PIPELINE.names == ("drop-neg", "needs-no-neg")
    both = PIPELINE.with_user_passes({"after:needs-no-neg": (one, two)})
    assert both.names == ("drop-neg", "needs-no-neg", "reports", "swap")


def test_a_pass_of_a_user_is_held_to_the_same_rules() -> None:
    pipeline = PIPELINE.with_user_passes({"after:needs-no-neg": BringBack()})
    with pytest.raises(VerifyError, match="no_neg fails after pass 3 of 3, bring-back"):
        pipeline.run(forward(aten.neg.default))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "before:drop",
            "There is no pass 'drop' (a pass is to run at 'before:drop'). "
            "The passes are drop-neg, needs-no-neg.",
        ),
        ("drop-neg", "A pass cannot be put at 'drop-neg'; a place is 'before:<name>' or "),
        ("at:drop-neg", "A pass cannot be put at 'at:drop-neg'; a place is "),
    ],
)
def test_an_unknown_place_is_refused(place: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        PIPELINE.with_user_passes({place: Reports()})


@pytest.mark.parametrize("from_environment", [False, True])
def test_stop_and_skip(monkeypatch: pytest.MonkeyPatch, from_environment: bool) -> None:
    pipeline = Pipeline([Replace(), DropNeg(), NeedsNoNeg(), BringBack()])

    def run(stop_after: str | None = None, skip: tuple[str, ...] = ()) -> list[str]:
        unit = forward(aten.neg.default)
        if from_environment:
            monkeypatch.setenv("MSC_STOP_AFTER", stop_after or "")
            monkeypatch.setenv("MSC_SKIP", " , ".join(skip))
            pipeline.run(unit)
        else:
            pipeline.run(unit, stop_after=stop_after, skip=skip)
        return [record.name for record in unit.log]

    assert run(stop_after="drop-neg") == ["replace", "drop-neg"]
    assert run(stop_after="needs-no-neg", skip=("replace",)) == ["drop-neg", "needs-no-neg"]
    assert run(skip=("replace", "bring-back")) == ["drop-neg", "needs-no-neg"]
    with pytest.raises(UserError, match=r"There is no pass 'drop' .*The passes are replace, drop-"):
        run(skip=("drop",))
    with pytest.raises(
        UserError, match=r"There is no pass 'end' .*MSC_STOP_AFTER.*The passes are "
    ):
        run(stop_after="end")
    with pytest.raises(UserError, match="requires no_neg, which no pass before it ensures"):
        run(skip=("drop-neg",))


def test_a_pass_that_applies_to_no_graph_is_refused() -> None:
    with pytest.raises(UserError) as error:
        Pipeline([Reports()]).run(Unit({"block.0": chain(aten.neg.default)}))
    assert "the pass applies to none of the graphs" in str(error.value)
    assert "block.0. Put it elsewhere, such as 'before:cut'" in str(error.value)


def test_an_essential_pass_cannot_be_skipped() -> None:
    class Needed(Reports):
        name: ClassVar[str] = "needed"
        essential: ClassVar[bool] = True

    with pytest.raises(UserError) as error:
        Pipeline([Needed()]).run(forward(aten.neg.default), skip=["needed"])
    assert "Pass 'needed' cannot be left out" in str(error.value)


def test_flags_of_dump_and_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MSC_DUMP", str(tmp_path))
    monkeypatch.setenv("MSC_LOG", "1")
    PIPELINE.run(forward(aten.neg.default))
    assert (tmp_path / "02_needs-no-neg.txt").exists()
    out, log = capsys.readouterr()
    assert out == ""
    assert (
        re.sub(r"\d+ ms", "T ms", log)
        == """\
[msc]  1/2  drop-neg{old=aten.neg,new=aten.abs}       1 change   3 -> 3 nodes   T ms
[msc]  2/2  needs-no-neg{old=aten.abs,new=aten.exp}   1 change   3 -> 3 nodes   T ms
"""
    )
    monkeypatch.setenv("MSC_LOG", "0")
    PIPELINE.run(forward(aten.neg.default))
    assert capsys.readouterr().err == ""


def test_flags_have_one_sentence_each() -> None:
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    for flag in FLAGS:
        assert re.fullmatch(r"[A-Z0-9][^.]*\.", flag.help), flag.name


OPS = [aten.neg.default, aten.abs.default, aten.exp.default]


@given(
    st.lists(st.sampled_from(OPS), max_size=6),
    st.lists(st.tuples(st.sampled_from(OPS), st.sampled_from(OPS)), max_size=4),
)
def test_any_honest_pipeline_runs(ops: list[Any], rewrites: list[tuple[Any, Any]]) -> None:
    """What a pass says it changed is what an independent count of the ops says."""
    passes = []
    for number, (old, new) in enumerate(rewrites):
        named = type("Named", (Replace,), {"name": f"replace-{number}"})
        passes.append(named(old=old, new=new))
    expected, program = [], list(ops)
    for old, new in rewrites:
        expected.append(program.count(old))
        program = [new if op is old else op for op in program]
    unit = forward(*ops)
    lies = [old is new and n > 0 for (old, new), n in zip(rewrites, expected, strict=True)]
    if any(lies):
        with pytest.raises(VerifyError, match="did not change"):
            Pipeline(passes).run(unit)
        assert len(unit.log) == lies.index(True) + 1
    else:
        Pipeline(passes).run(unit)
        assert [record.changes for record in unit.log] == expected
        targets = [n.target for n in unit.graphs["forward"].graph.nodes if n.op == "call_function"]
        assert targets == program


def test_the_public_names() -> None:
    assert (msc.Pass, msc.GraphPass, msc.UnitPass) == (Pass, GraphPass, UnitPass)
