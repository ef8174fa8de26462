"""Beats of a run reach a monitor, which may be restarted."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

import msc
from msc.cli import app
from msc.monitor import address, beats, open_inbox, watch
from msc.runtime.monitor.beat import MAX_BYTES, Beat
from msc.runtime.monitor.sources import LogTail
from tests.checkpoint.runs import trainer


def test_a_run_beats(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-00009.ring").write_bytes(b"not yet whole")
    with open_inbox(("127.0.0.1", 0)) as inbox, trainer(None, run=tmp_path / "run") as run:
        run.fit(2)
        sending = beats(tmp_path / "run", inbox.getsockname(), LogTail([log]), "node7", 0.05)
        sent = next(sending)
        assert Beat.from_bytes(inbox.recv(MAX_BYTES)) == sent
        (rank,) = sent.ranks
        assert (rank.rank, rank.state, rank.phase, rank.step) == (0, "running", "idle", 2)
        log.write_text("CUDA error: device-side assert\n")
        next(sending)
        inbox_address = inbox.getsockname()
        inbox.sendto(b"somebody else's", inbox_address)
        heard = watch(inbox, 0.05, until=lambda: False)
        event = next(heard)
        assert (event.kind, event.node) == ("log", "node7")
        event = next(heard)  # the beats have ended
        assert (event.kind, event.node, event.rank) == ("missed beats", "node7", 0)
    next(sending)  # nobody listens: no harm
    with open_inbox(inbox_address) as again:
        next(sending)
        assert Beat.from_bytes(again.recv(MAX_BYTES)).ranks[0].phase == "ended"


@pytest.mark.parametrize("text", ["", "29400", "host:", ":1", "host:x", "host:70000"])
def test_what_is_no_address_is_told(text: str) -> None:
    with pytest.raises(msc.UserError, match="is no address; write host:port"):
        address(text)


@pytest.mark.parametrize(
    ("run", "to", "log", "words"),
    [
        ("none", "127.0.0.1:9", "log", "is no folder"),
        (".", "no-such-host.invalid:9", "log", "no-such-host.invalid:9 is not found"),
        (".", "127.0.0.1:9", ".", "cannot be read"),
    ],
)
def test_beats_that_would_tell_nothing_are_not_begun(
    tmp_path: Path, run: str, to: str, log: str, words: str
) -> None:
    arguments = ["beat", str(tmp_path / run), "--to", to, "--log", str(tmp_path / log)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 2
    assert words in shown.stderr


def test_events_that_cannot_be_written_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "none" / "events.jsonl"
    shown = CliRunner().invoke(app, ["monitor", "--listen", "127.0.0.1:0", "--events", str(file)])
    assert shown.exit_code == 2
    assert "Events cannot be appended" in shown.stderr


def test_an_address_that_is_taken_is_told() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        shown = CliRunner().invoke(app, ["monitor", "--listen", f"127.0.0.1:{port}"])
    assert shown.exit_code == 2
    assert "cannot be listened to" in shown.stderr
