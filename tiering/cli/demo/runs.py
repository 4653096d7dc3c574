"""Runs the demo: the same conversations without tiers, with them, from NVMe, and in a new process; then re-store."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tiering.cli.demo import checks, plot
from tiering.cli.demo.child import run_in_new_process
from tiering.cli.demo.model import DemoModel, require_transformers
from tiering.cli.demo.options import DemoOptions, Progress, no_progress
from tiering.cli.demo.phase import PhaseResult, Setup, run_phase, run_server
from tiering.cli.demo.restoring import run_restoring
from tiering.cli.demo.result import DemoResult, PlainAnswer
from tiering.cli.demo.serving import Server
from tiering.errors import ConfigError


def run_demo(options: DemoOptions, *, progress: Progress = no_progress) -> DemoResult:
    """Run every phase and check. Blocks for some two minutes; opens managers, so call it outside of an event loop.

    Sets torch's thread count for the process and restores it. Writes the plot if ``options.plot`` is set. Raises
    ``ConfigError`` for a missing extra or an unusable path, before anything runs.
    """
    require_transformers()
    if options.plot is not None:
        plot.require_matplotlib()
        if not options.plot.parent.is_dir():
            raise ConfigError(f"--plot {options.plot}: {options.plot.parent} is not a directory; create it first")
    threads = torch.get_num_threads()
    try:
        with _directory(options.path) as directory:
            result = _run(options, directory, progress)
    finally:
        torch.set_num_threads(threads)
    if options.plot is not None:
        plot.save_plot(result, options.plot)
    return result


def _run(options: DemoOptions, directory: Path, progress: Progress) -> DemoResult:
    begin = time.perf_counter()
    setup = Setup(options.scale, options.conversations, options.turns, options.seed)
    model = setup.build_model()
    # Big enough for every block and the reserve kept for stores; and just enough for one conversation.
    roomy = setup.tiers(directory / "tiers", primary_blocks=setup.distinct_blocks_max * 5 // 4 + 4)
    tight = setup.tiers(directory / "tiers", primary_blocks=setup.pool_blocks + 2)

    in_memory, reference = run_server("in_memory", setup, model, None, progress, pool_blocks=setup.distinct_blocks_max)
    phases = {
        "in_memory": in_memory,
        "recompute": run_phase("recompute", setup, model, None, progress),
        "primary": run_phase("primary", setup, model, roomy, progress),
        "nvme": run_phase("nvme", setup, model, tight, progress),
    }
    progress("restart", 0, options.turns_total)
    phases["restart"] = run_in_new_process("restart", setup, tight)
    progress("restart", options.turns_total, options.turns_total)
    plain = _plain_answers(setup, model, in_memory, progress)
    control = _control(setup, model, reference, in_memory, directory, progress)
    restoring = run_restoring(setup, model, options.traffic, progress)
    return DemoResult(
        options=options,
        phases=phases,
        plain=plain,
        control=control,
        restoring=restoring,
        machine=_machine(directory),
        path=None if options.path is None else str(directory),
        seconds=time.perf_counter() - begin,
    )


def _plain_answers(
    setup: Setup, model: DemoModel, in_memory: PhaseResult, progress: Progress
) -> tuple[PlainAnswer, ...]:
    answers = []
    for conversation in range(setup.conversations):
        progress("plain forward", conversation, setup.conversations)
        prompt = checks.prompt_of(setup, in_memory.turns, conversation)
        logits, ttft_s = checks.plain_forward(model, prompt, setup.scale.answer_tokens)
        expected = checks.last_turn(in_memory.turns, conversation).logits
        answers.append(
            PlainAnswer(
                conversation=conversation,
                output_ids=tuple(logits.argmax(-1).tolist()),
                ttft_s=ttft_s,
                logit_difference=checks.largest_difference(logits, expected),
            )
        )
    progress("plain forward", setup.conversations, setup.conversations)
    return tuple(answers)


def _control(
    setup: Setup, model: DemoModel, reference: Server, in_memory: PhaseResult, directory: Path, progress: Progress
) -> checks.Control:
    progress("control", 0, 1)
    honest, altered = (
        setup.tiers(directory / name, primary_blocks=setup.pool_blocks + 2)
        for name in ("control-honest", "control-altered")
    )
    control = checks.run_control(setup, model, reference, in_memory.turns, (honest, altered))
    progress("control", 1, 1)
    return control


@contextmanager
def _directory(path: Path | None) -> Iterator[Path]:
    """A fresh directory below ``path``, kept; or a temporary one, removed at the end."""
    if path is None:
        with tempfile.TemporaryDirectory(prefix="kvtiering-demo-") as temporary:
            yield Path(temporary)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="demo-", dir=path))
    except OSError as error:
        raise ConfigError(f"--path {path}: {error.strerror}; choose a directory that you can write to") from error
    yield fresh


def _machine(directory: Path) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": require_transformers().__version__,
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "filesystem": filesystem_of(directory),
    }


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that holds ``path`` ("ext4", "tmpfs"), or "unknown" where the kernel does not tell."""
    if not mounts.exists():
        return "unknown"
    best, kind = -1, "unknown"
    for line in mounts.read_text().splitlines():
        _, point, fs_type, *_ = line.split(" ")
        if path.resolve().is_relative_to(point.replace("\\040", " ")) and len(point) >= best:
            best, kind = len(point), fs_type
    return kind
