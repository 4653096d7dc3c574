"""The PNG of ``tiering demo --plot``: time to first token by source, and tokens computed and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiering.cli.demo.result import MEASURED, DemoResult
from tiering.errors import ConfigError

COLOURS = {"recompute": "#b5544d", "primary": "#2f6f8f", "nvme": "#4f9d69", "restart": "#d09a3a"}
SAVED_COLOURS = {"computed": "#b5544d", "device pool": "#9aa5ad", "primary": "#2f6f8f", "nvme": "#4f9d69"}


def require_matplotlib() -> Any:
    """matplotlib's ``Figure`` type. Raises ``ConfigError`` that names the extra if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot draws with matplotlib, which cannot be imported ({error}); pip install 'kvtiering[plot]'"
        ) from error
    return Figure


def save_plot(result: DemoResult, path: Path) -> None:
    """Write a PNG to ``path``, whatever its suffix. Raises ``ConfigError`` if it cannot be written."""
    # A Figure without pyplot: no display, no global state.
    figure = require_matplotlib()(figsize=(11, 4.2), layout="constrained")
    ttft, tokens = figure.subplots(1, 2)
    _draw_ttft(ttft, result)
    _draw_tokens(tokens, result)
    scale = result.options.scale
    figure.suptitle(
        f"{result.options.conversations} conversations x {result.options.turns} turns, prefix of at least "
        f"{result.prefix_tokens:,} tokens, {scale.block_bytes / 1024:.0f} KiB blocks",
        fontsize=11,
    )
    try:
        figure.savefig(path, format="png", dpi=140)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}; choose a file that you can write to") from error


def _draw_ttft(axes: Any, result: DemoResult) -> None:
    for position, name in enumerate(MEASURED):
        values = result.ttft_ms(name)
        median = result.ttft_median_ms(name)
        axes.bar(position, median, color=COLOURS[name], width=0.65, zorder=2)
        axes.scatter([position] * len(values), values, s=12, color="black", alpha=0.5, zorder=3)
        axes.annotate(
            f"{median:,.0f} ms", (position, max(values)), xytext=(0, 5), textcoords="offset points", ha="center"
        )
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(MEASURED)), ["recompute", "CPU tier", "NVMe tier", "NVMe,\nnew process"])
    axes.set_ylabel("ms (log scale)")
    axes.set_title("Time to first token: median, and each turn", fontsize=10)
    axes.grid(axis="y", alpha=0.3, zorder=0)


def _draw_tokens(axes: Any, result: DemoResult) -> None:
    for position, name in enumerate(MEASURED):
        turns = result.phases[name].turns
        parts = {
            "computed": sum(turn.computed_tokens for turn in turns),
            "device pool": sum(turn.device_tokens for turn in turns),
            **result.hit_tokens_by_tier(name),
        }
        bottom = 0
        for part, colour in SAVED_COLOURS.items():
            label = part if position == 0 else None
            axes.bar(position, parts.get(part, 0), bottom=bottom, color=colour, width=0.65, label=label, zorder=2)
            bottom += parts.get(part, 0)
    axes.set_xticks(range(len(MEASURED)), ["recompute", "CPU tier", "NVMe tier", "NVMe,\nnew process"])
    axes.set_ylabel("prompt tokens")
    axes.set_title("Where prompt tokens came from, all turns", fontsize=10)
    axes.set_ylim(0, 1.18 * sum(turn.prompt_tokens for turn in result.phases["recompute"].turns))
    axes.legend(loc="upper center", ncols=4, fontsize=8, frameon=False)
    axes.grid(axis="y", alpha=0.3, zorder=0)
