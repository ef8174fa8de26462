"""How a command of `msc` ends: what it prints, and its exit code.

0 all is well; 1 what was compared differs, or what was checked is damaged; 2 the input cannot be
used, as one message on stderr (with --json, as JSON on stdout); 3 MSC itself failed, which is a bug
of MSC's: where it was goes to stderr before the message.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console

from msc.build_target import user_line
from msc.ir.errors import MSCError, UserError

DIFFERENT = 1
UNUSABLE = 2
BROKEN = 3

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def guarded(action: Callable[[], Callable[[], int]], as_json: bool) -> int:
    """Run `action`, then what it returns, which prints; the exit code.

    What the user's code prints goes to stderr, so that stdout has the result alone.
    """
    try:
        with _stdout_to_stderr():
            show = action()
    except UserError as error:
        return _fail(str(error), UNUSABLE, as_json)
    except MSCError as error:
        traceback.print_exc()
        return _fail(f"MSC failed, this is a bug in it or in a pass: {error}", BROKEN, as_json)
    except Exception as error:
        traceback.print_exc()
        place = user_line(error)
        text = f"MSC failed, this is a bug in it: {type(error).__name__}: {error}"
        return _fail(f"{text}\n(while running {place})" if place else text, BROKEN, as_json)
    return show()


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _fail(message: str, code: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": message}))
    else:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print("[bold red]error:[/bold red] ", end="")
        console.print(message, markup=False)
    return code
