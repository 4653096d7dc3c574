"""What a command prints, and with which code it ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import typer
from rich import box
from rich.console import Console
from rich.table import Table

GOOD: Final = 0
CHECK_FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
"""As a shell reports Ctrl-C."""
TERMINATED: Final = 143
"""As a shell reports SIGTERM."""
READER_GONE: Final = 141
"""As a shell reports a process that wrote into a pipe whose reader had left."""

WIDTH_OFF_SCREEN: Final = 400
"""In columns; no table of ours is as wide."""

Show: TypeAlias = Callable[[Console, dict[str, Any]], None]


class OutputError(Exception):
    """The result could not be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write the result: {error.strerror or error}")
        self.reader_gone = isinstance(error, BrokenPipeError)


def finish(result: dict[str, Any], show: Show, *, as_json: bool, markup: bool = False) -> None:
    """Print the result: as one JSON object, or by ``show``. Ends the command with 1 if ``result["ok"]`` is false.

    Only texts of our own may be ``markup``: a path with brackets in it would lose them.
    """
    if as_json:
        emit(json.dumps(result) + "\n")
    else:
        # What goes into a file or a pipe is not cut to the width of a screen.
        width = None if sys.stdout.isatty() else WIDTH_OFF_SCREEN
        console = Console(markup=markup, highlight=False, emoji=False, width=width)
        with _writing(), console.capture() as shown:  # it flushes at its end
            show(console, result)
        emit(shown.get())
    if not result["ok"]:
        raise typer.Exit(CHECK_FAILED)


def table(*columns: str) -> Table:
    """An empty table. A column's name may end with ``>``: its cells are then aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for name in columns:
        made.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return made


def emit(text: str) -> None:
    """Write ``text`` to stdout, all of it; what its encoding lacks is escaped. Raises ``OutputError``."""
    encoding = sys.stdout.encoding
    with _writing():
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        drop_stdout()
        raise OutputError(error) from None


def drop_stdout() -> None:
    """What a failed write left in the buffer would be tried again at exit, and fail with a traceback."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def report_error(message: str, code: int, *, as_json: bool) -> int:
    """One line on stderr, with ``--json`` also an object on stdout. Returns ``code``."""
    sys.stderr.write(f"error: {message}\n")
    if as_json:
        emit(json.dumps({"ok": False, "error": message}) + "\n")
    return code
