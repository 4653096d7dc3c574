"""A demo for people: the progress bar on stderr, and the tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from tiering.cli.demo.block import BLOCKS
from tiering.cli.demo.checks import ALTERED_BLOCK
from tiering.cli.demo.options import Progress
from tiering.cli.demo.restoring import GPU_GAIN_TO_COST, HIT_AGAIN, RestoreResult
from tiering.cli.demo.result import MEASURED, DemoResult

HEADINGS = {
    "in_memory": "in memory",
    "recompute": "recompute",
    "primary": "CPU",
    "nvme": "NVMe",
    "restart": "NVMe, new process",
}


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress sink that draws one bar a phase on stderr, so that stdout stays for the result."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase.replace("_", " "), total=total)
            bars.update(tasks[phase], completed=done)

        yield report


def render(result: DemoResult, console: Console) -> None:
    """Print the tables, the proof and the verdict."""
    console.print(_turns_table(result))
    console.print(_phases_table(result))
    console.print(_restore_table(result.restoring))
    console.print(_restore_worth(result.restoring), highlight=False)
    console.print(_proof(result), highlight=False)
    if result.path is not None:
        console.print(f"The tiers' files are kept in {result.path}", highlight=False)
    if result.options.plot is not None:
        console.print(f"Plot: {result.options.plot}", highlight=False)
    for failure in result.failures:
        console.print(f"[bold red]FAILED[/]: {failure}", highlight=False)
    if result.ok:
        console.print(
            f"[bold green]OK[/]: same answers, {result.speedup('primary'):.1f}x sooner from CPU memory, "
            f"{result.speedup('nvme'):.1f}x from NVMe, {result.speedup('restart'):.1f}x in a new process",
            highlight=False,
        )


def _turns_table(result: DemoResult) -> Table:
    table = Table(title="Time to first token by turn and source (ms)", title_justify="left")
    for heading in ("conversation", "turn", "prompt tokens", *(HEADINGS[name] for name in MEASURED)):
        table.add_column(heading, justify="right")
    table.add_column("answer (token ids)")
    for records in zip(*(result.phases[name].turns for name in MEASURED), strict=True):
        first = records[0]
        table.add_row(
            str(first.conversation),
            str(first.turn),
            f"{first.prompt_tokens:,}",
            *(f"{record.ttft_s * 1e3:,.0f}" for record in records),
            " ".join(map(str, first.output_ids[:4])) + (" ..." if len(first.output_ids) > 4 else ""),
        )
    return table


def _phases_table(result: DemoResult) -> Table:
    table = Table(
        title="By phase: prompt tokens of all turns; median load and TTFT (ms) of the turns with a prefix to reuse",
        title_justify="left",
    )
    for heading in ("phase", "computed", "device pool", "CPU hits", "NVMe hits", "load", "TTFT", "min-max", "speed-up"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for name, phase in result.phases.items():
        hits, values = result.hit_tokens_by_tier(name), result.ttft_ms(name)
        table.add_row(
            HEADINGS[name],
            f"{sum(turn.computed_tokens for turn in phase.turns):,}",
            f"{sum(turn.device_tokens for turn in phase.turns):,}",
            f"{hits.get('primary', 0):,}",
            f"{hits.get('nvme', 0):,}",
            f"{result.load_median_ms(name):,.1f}" if hits else "",
            f"{result.ttft_median_ms(name):,.0f}",
            f"{min(values):,.0f}-{max(values):,.0f}",
            f"{result.speedup(name):.1f}x",
        )
    return table


def _restore_table(restoring: RestoreResult) -> Table:
    scale = restoring.scale
    table = Table(
        title=f"Re-store: {scale.conversations} live conversations of {scale.turns} turns beside prompts that pass through, "
        f"a CPU tier of {scale.primary_blocks} blocks alone; all but the first turns",
        title_justify="left",
    )
    headings = ("policy", "re-store", "hit tokens", "hit rate", "restored blocks", "holes", "hole tokens", "TTFT (ms)")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for run in (run for pair in restoring.pairs for run in (pair.off, pair.on)):
        table.add_row(
            run.policy,
            "on" if run.restore else "off",
            f"{run.hit_tokens:,}",
            f"{run.token_hit_rate:.3f}",
            f"{run.restored_blocks:,}",
            f"{run.holes_mean:.1f}",
            f"{run.holes_mean * run.tokens_per_block:,.0f}",
            f"{run.ttft_median_ms:,.0f}",
        )
    return table


def _restore_worth(restoring: RestoreResult) -> str:
    block = restoring.block
    again = ", ".join(
        f"{pair.on.policy} {pair.hit_again:.2f} of them: {restoring.expected_gain_to_cost(pair):,.0f}x"
        for pair in restoring.pairs
        if pair.hit_again is not None
    )
    return (
        f"One block ({block.block_bytes / 1024:.0f} KiB, {block.tokens_per_block} tokens): re-storing it cost a copy of "
        f"{block.cost_s * 1e3:.2f} ms, computing its tokens again takes {block.gain_s * 1e3:,.0f} ms: "
        f"{block.gain_to_cost:,.0f}x a hit (estimate for a serving GPU: {GPU_GAIN_TO_COST:.0f}x).\n"
        f"By the blocks that the traffic above hit again for each one re-stored ({again}; estimate for a GPU, half of them "
        f"hit: {GPU_GAIN_TO_COST * HIT_AGAIN:.0f}x).\n"
        f"With that one block lost of {BLOCKS} the prompt found {block.off.hit_tokens:,} tokens and took "
        f"{block.off.ttft_s * 1e3:,.0f} ms to its first token; with it re-stored {block.on.hit_tokens:,} tokens, "
        f"{block.on.ttft_s * 1e3:,.0f} ms. The device is a CPU here and the model small: the ratios are not a GPU's."
    )


def _proof(result: DemoResult) -> str:
    scale, control = result.options.scale, result.control
    answers = sum(len(phase.turns) for phase in result.phases.values()) + len(result.plain)
    ratio = result.gap_to_difference
    times = "" if ratio is None else f": {ratio:,.0f} times"
    same = sum(a == b for a, b in zip(control.altered_ids, control.expected_ids, strict=True))
    return (
        f"Outputs: {answers} answers of {scale.answer_tokens} tokens, "
        f"{'identical' if result.outputs_identical else 'NOT identical'} token for token in all phases; logits of tiered "
        f"phases {'bit-equal' if result.bit_equal_same_chunks else 'NOT bit-equal'} to the in-memory run.\n"
        f"Margin: smallest top-2 gap {result.smallest_top2_gap:.2e}, largest logit difference against recomputing "
        f"{result.largest_logit_difference:.2e}{times}.\n"
        f"Control: with block {ALTERED_BLOCK} of the prompt altered before it was stored, {same} of "
        f"{len(control.expected_ids)} tokens stayed the same (largest logit change {control.logit_change:.2f}).\n"
        f"Model: {scale.model.layers} layers x {scale.model.hidden}, fp32, seed {result.options.seed}; "
        f"{scale.tokens_per_block}-token blocks of {scale.block_bytes / 1024:.0f} KiB; at least "
        f"{result.prefix_tokens:,} prefix tokens reused; {scale.threads} torch thread(s) on {result.machine['cpus']} CPUs; "
        f"{result.machine['filesystem']}; {result.seconds:.0f} s in all."
    )
