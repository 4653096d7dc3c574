"""The ``tiering`` command line. Exit codes: 0 good, 1 the check failed, 2 bad input."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tiering.cli import tiers
from tiering.cli.output import (
    BAD_INPUT,
    CHECK_FAILED,
    GOOD,
    INTERRUPTED,
    READER_GONE,
    TERMINATED,
    OutputError,
    drop_stdout,
    emit,
    finish,
    report_error,
)
from tiering.errors import ConfigError, ShapeError, TieringError
from tiering.support.units import parse_bytes

app = typer.Typer(
    help="Keep a language model's KV cache alive beyond GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Configuration files.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure a tier against the raw medium, in one run.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")

_UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]
"""What the parser raises. It has no public name of its own: Typer carries its own copy of click since 0.26."""

ConfigPath = Annotated[Path, typer.Argument(help="The YAML configuration.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
BlockBytes = Annotated[str, typer.Option(help="Size of one block of your model, with a unit.")]
TokensPerBlock = Annotated[int, typer.Option(min=1, help="Tokens that one block stands for.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        emit(f"kvtiering {importlib.metadata.version('kvtiering')}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep a language model's KV cache alive beyond GPU memory."""


@app.command()
def check(
    config: ConfigPath,
    as_json: Json = False,
    block_bytes: BlockBytes = "2MiB",
    tokens_per_block: TokensPerBlock = 16,
) -> None:
    """Open each tier, write, read and remove a few blocks, and show capacity and bandwidth."""
    from tiering.cli import check as command

    layout = command.layout_of(_bytes(block_bytes, "--block-bytes"), tokens_per_block)
    finish(command.check(config, layout), command.show, as_json=as_json)


@app.command()
def inspect(
    config: ConfigPath,
    tier: Annotated[str, typer.Argument(help="Name of the tier.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Read every block and check its checksum.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a tier holds, by namespace. Works on a tier that no engine has open."""
    from tiering.cli import inspect as command

    finish(command.inspect(config, tier, verify=verify), command.show, as_json=as_json)


@app.command("new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(help="Its type in the YAML, such as my-store.", show_default=False)],
    directory: Annotated[
        Path | None,
        typer.Option(
            help="Directory to make; kvtiering-NAME by default. One that exists is left alone.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a package with a new backend that passes the conformance kit, for you to change."""
    from tiering.cli import new_backend as command

    finish(command.new_backend(name, directory), command.show, as_json=as_json)


@bench_app.command("nvme")
def bench_nvme(
    path: Annotated[
        Path | None,
        typer.Option(help="Directory on the disk to measure; the current one by default. Needs 1 GiB, left as it was."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=3, max=1000, help="Interleaved pairs of runs a block size.")] = 7,
    as_json: Json = False,
) -> None:
    """Compare the nvme backend with a raw O_DIRECT loop of the same depth and buffers, in interleaved pairs."""
    from tiering.cli import bench_nvme as command

    finish(command.bench(path, pairs), command.show, as_json=as_json)


@bench_app.command("redis")
def bench_redis(
    url: Annotated[
        str | None,
        typer.Option(help="The server to measure; without it one is started, if one is installed.", show_default=False),
    ] = None,
    pairs: Annotated[int, typer.Option(min=3, max=1000, help="Rounds a block size, in which every way runs once.")] = 7,
    as_json: Json = False,
) -> None:
    """Compare the redis backend with a raw socket and with redis-py on the same server, in one run."""
    from tiering.cli import bench_redis as command

    finish(command.bench(url, pairs), command.show, as_json=as_json)


@bench_app.command("s3")
def bench_s3(
    url: Annotated[
        str | None,
        typer.Option(
            help="s3://BUCKET/PREFIX; without it a server is started, if one is installed.", show_default=False
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=3, max=1000, help="Rounds a block size, in which both sides run once.")] = 5,
    as_json: Json = False,
) -> None:
    """Compare the fsspec backend with the bare S3 clients on the same server, in one run."""
    from tiering.cli import bench_s3 as command

    finish(command.bench(url, pairs), command.show, as_json=as_json)


@config_app.command("init")
def config_init(
    name: Annotated[str, typer.Argument(help="Which shipped configuration; see `tiering config list`.")] = "local",
    to: Annotated[Path, typer.Option(help="File to write; never overwritten.")] = Path("kvtiering.yaml"),
    as_json: Json = False,
) -> None:
    """Write one of the shipped configurations to a file of yours."""
    from tiering.config import shipped_config

    text = shipped_config(name)
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--to {to}: {error.strerror}; name a new file in a directory you may write to") from None
    result = {"ok": True, "name": name.removesuffix(".yaml"), "path": str(to)}
    finish(result, lambda console, shown: console.print(f"wrote {shown['path']}", soft_wrap=True), as_json=as_json)


@config_app.command("list")
def config_list(as_json: Json = False) -> None:
    """Name the shipped configurations."""
    from tiering.config import shipped_config_names

    result = {"ok": True, "names": list(shipped_config_names())}
    finish(result, lambda console, shown: console.print("\n".join(shown["names"])), as_json=as_json)


@config_app.command("schema")
def config_schema(as_json: Json = False) -> None:
    """Print the JSON Schema of a configuration, for editors."""
    from tiering.config import json_schema

    emit(json.dumps(json_schema(), indent=None if as_json else 2) + "\n")


@app.command()
def demo(
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write a chart of the times to first token to this PNG.")] = None,
    path: Annotated[Path | None, typer.Option(help="Directory of the NVMe tier; a temporary one by default.")] = None,
    conversations: Annotated[int | None, typer.Option(min=2, help="Conversations that alternate.")] = None,
    turns: Annotated[int | None, typer.Option(min=2, help="Turns of each conversation.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the model's weights and of the prompts.")] = None,
) -> None:
    """Run a real model with and without tiers below it, in this process and in a new one, and compare."""
    from tiering.cli import demo as command

    given = {"plot": plot, "path": path, "conversations": conversations, "turns": turns, "seed": seed}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    demo_options = command.DemoOptions(**chosen)
    with command.progress_bar() as progress:
        result = command.run_demo(demo_options, progress=progress)
    finish(result.to_json(), lambda console, _: command.render(result, console), as_json=as_json, markup=True)


def _bytes(text: str, option: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not size:
        raise ConfigError(f"{option}: a block has at least one byte")
    return size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own when None) and return its exit code.

    What an operator can put right becomes a line on stderr (with ``--json`` also an object on stdout), never a traceback.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if arguments is None:
        # As at Ctrl-C, temporary files are removed first.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        code = _run(words, as_json="--json" in words)
    except OutputError as error:
        if error.reader_gone:
            code = READER_GONE
        else:
            sys.stderr.write(f"error: {error}\n")
            code = CHECK_FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else CHECK_FAILED
    if arguments is None and tiers.hung:
        # The interpreter would wait for threads that never return.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(words: list[str], *, as_json: bool) -> int:
    try:
        code: int | None = app(words, prog_name="tiering", standalone_mode=False)
        sys.stdout.flush()
    except (ConfigError, ShapeError) as error:
        return report_error(str(error), BAD_INPUT, as_json=as_json)
    except TieringError as error:
        return report_error(str(error), CHECK_FAILED, as_json=as_json)
    except _UsageError as error:
        return _report_usage(error, as_json=as_json)
    except typer.Abort:
        return INTERRUPTED
    except OSError as error:
        # No command lets one through on purpose, but a disk can fail anywhere, and a traceback helps nobody then.
        if isinstance(error, BrokenPipeError):
            drop_stdout()
            raise OutputError(error) from None
        return report_error(str(error), CHECK_FAILED, as_json=as_json)
    return code or GOOD


def _report_usage(error: Any, *, as_json: bool) -> int:
    message = error.format_message().rstrip(".")
    if not message:
        return BAD_INPUT  # no arguments at all: the help is out already
    place = error.ctx.command_path if error.ctx is not None else "tiering"
    return report_error(f"{place}: {message}; see `{place} --help`", BAD_INPUT, as_json=as_json)
