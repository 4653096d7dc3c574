"""Functions in processes of their own: forked from one that has imported the engine, which takes longest."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
LOG_LINES_MAX = 40


class ChildError(Exception):
    """The function raised, or its process died or took too long; the text has the end of what it wrote."""


def in_child(function: Callable[..., T], *args: Any, log: Path, limit_s: float = 240.0) -> T:
    """``function(*args)`` in a forked process, which may have children itself. What it writes goes to ``log``.

    The result must be picklable. Raises ``ChildError``.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(theirs, log, function, args))
    child.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise ChildError(f"{function.__name__} took longer than {limit_s:g} s\n{_tail(log)}")
        good, value = ours.recv()
    except EOFError:
        child.join()
        raise ChildError(f"{function.__name__} died with exit code {child.exitcode}\n{_tail(log)}") from None
    finally:
        child.join(5.0)
        if child.is_alive():
            child.kill()
            child.join()
        ours.close()
    if not good:
        raise ChildError(f"{function.__name__}: {value}\n{_tail(log)}")
    return value


def _run(pipe: Connection, log: Path, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    with _output_to(log):
        try:
            pipe.send((True, function(*args)))
        except BaseException as error:
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))
        pipe.close()


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Both streams, also those of C code and of children."""
    with log.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield
        sys.stdout.flush()
        sys.stderr.flush()


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_MAX:])
