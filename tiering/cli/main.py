"""The ``tiering`` command line. Exit codes: 0 good, 1 the check failed, 2 bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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

ConfigPath = Annotated[Path, typer.Argument(help="The YAML configuration.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
BlockBytes = Annotated[str, typer.Option(help="Size of one block of your model, with a unit.")]
TokensPerBlock = Annotated[int, typer.Option(min=1, help="Tokens that one block stands for.")]


def run(work: Callable[[], dict[str, Any]], show: Callable[[Console, dict[str, Any]], None], *, as_json: bool) -> None:
    """Do the work and show its result; ``result["ok"]`` (default true) decides between exit code 0 and 1."""
    result = work()
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        show(Console(), result)
    if not result.get("ok", True):
        raise typer.Exit(1)


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
    run(lambda: command.check(config, layout), command.show, as_json=as_json)


@app.command()
def inspect(
    config: ConfigPath,
    tier: Annotated[str, typer.Argument(help="Name of the tier.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Read every block and check its checksum.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a tier holds, by namespace. Works on a tier that no engine has open."""
    from tiering.cli import inspect as command

    run(lambda: command.inspect(config, tier, verify=verify), command.show, as_json=as_json)


@bench_app.command("nvme")
def bench_nvme(
    path: Annotated[
        Path | None, typer.Option(help="Directory on the disk to measure; a temporary one by default.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=3, help="Interleaved pairs of runs a size.")] = 7,
    as_json: Json = False,
) -> None:
    """Compare the nvme backend with a raw O_DIRECT loop of the same depth and buffers, in interleaved pairs."""
    from tiering.cli import bench_nvme as command

    run(lambda: command.bench(path, pairs), command.show, as_json=as_json)


@config_app.command("init")
def config_init(
    name: Annotated[str, typer.Argument(help="Which shipped configuration; see `tiering config list`.")] = "local",
    to: Annotated[Path, typer.Option(help="File to write; never overwritten.")] = Path("kvtiering.yaml"),
    as_json: Json = False,
) -> None:
    """Write one of the shipped configurations to a file of yours."""
    from tiering.config import shipped_config

    def work() -> dict[str, Any]:
        text = shipped_config(name)
        try:
            with to.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            remedy = "choose another file with --to" if isinstance(error, FileExistsError) else "check the directory"
            raise ConfigError(f"{to}: {error.strerror}; {remedy}") from None
        return {"ok": True, "name": name, "path": str(to)}

    run(work, lambda console, result: console.print(f"wrote {result['path']}"), as_json=as_json)


@config_app.command("list")
def config_list(as_json: Json = False) -> None:
    """Name the shipped configurations."""
    from tiering.config import shipped_config_names

    names = list(shipped_config_names())
    run(lambda: {"names": names}, lambda console, result: console.print("\n".join(result["names"])), as_json=as_json)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    from tiering.config import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


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
    options = command.DemoOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    with command.progress_bar() as progress:
        result = command.run_demo(options, progress=progress)
    run(result.to_json, lambda console, _: command.render(result, console), as_json=as_json)


def _bytes(text: str, option: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def main() -> None:
    """Entry point: errors that an operator can fix become one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except (ConfigError, ShapeError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    except TieringError as error:
        sys.stderr.write(f"failed: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
