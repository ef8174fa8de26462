"""The command `msc`: verify, compile, explain, simulate, tune and run models; runs, checkpoints.

`msc/commands` has the commands, and `msc/command_exit.py` says what exit codes mean.
"""

from __future__ import annotations

from typing import Any

import typer

from msc.checkpoint.commands import app as checkpoint_app
from msc.commands.compiling import compile_command, explain, simulate, verify
from msc.commands.runs import blame, report_command, run
from msc.commands.tuning import tune
from msc.doctor import doctor
from msc.monitor import beat, monitor

app = typer.Typer(
    name="msc",
    help="Compile an ordinary PyTorch model into per-rank parallel training programs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint_app, name="ckpt")
app.command()(doctor)
app.command()(beat)
app.command()(monitor)
app.command()(verify)
app.command("compile")(compile_command)
app.command()(explain)
app.command()(simulate)
app.command()(tune)
app.command()(blame)
app.command("report")(report_command)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(
    run
)


def main(arguments: list[str] | None = None) -> Any:
    """The entry point of the command; exits the process."""
    app(args=arguments, prog_name="msc")
