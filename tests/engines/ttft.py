"""Time to the first token of a prompt with a 3,072-token prefix: computed, from CPU memory, and from disk in a new process."""

from __future__ import annotations

import statistics
import time
from typing import Final

from tests.engines.catalog import Result, log_of
from tests.engines.children import in_child
from tests.engines.engine import Door, Engine, Setting
from tests.engines.prompts import prompt

TTFT_DOORS: Final[tuple[Door, ...]] = ("connector", "baseline")
PREFIX: Final = 3072
PROMPTS: Final = 3
CPU_ROUNDS: Final = 3
CPU_TIMES_MIN: Final = 20.0
NVME_TIMES_MIN: Final = 10.0


def measure_ttft(setting: Setting) -> Result:
    """Medians, in milliseconds. Cold runs are also what fills the tiers."""
    room = 2 * PROMPTS * (PREFIX + 64) * setting.shape.kv_bytes_per_token
    setting = setting.but(gpu_blocks=112, primary_bytes=room, nvme_bytes=room, max_batch_tokens=4096)
    cold, cpu, cold_ids, cpu_ids = in_child(_first, setting, log=log_of(setting, "first"))
    nvme, nvme_ids = in_child(_second, setting, log=log_of(setting, "second"))
    medians = {name: statistics.median(times) for name, times in (("cold", cold), ("cpu", cpu), ("nvme", nvme))}
    identical = cold_ids == cpu_ids == nvme_ids
    times = {name: medians["cold"] / medians[name] for name in ("cpu", "nvme")}
    return {
        "ok": identical and times["cpu"] >= CPU_TIMES_MIN and times["nvme"] >= NVME_TIMES_MIN,
        "ids_identical": identical,
        **{f"{name}_ms": round(1e3 * seconds, 1) for name, seconds in medians.items()},
        **{f"{name}_times_faster": round(ratio, 1) for name, ratio in times.items()},
        "samples": {"cold": len(cold), "cpu": len(cpu), "nvme": len(nvme)},
    }


def _prompts() -> list[list[int]]:
    return [prompt(f"ttft-{number}", PREFIX + 16) for number in range(PROMPTS)]


def _first(setting: Setting) -> tuple[list[float], list[float], list[list[int]], list[list[int]]]:
    engine = Engine(setting)
    engine.ask([prompt("warm", 64)], 2)
    cold, cold_ids = _ask(engine)
    engine.settle()
    cpu: list[float] = []
    cpu_ids: list[list[int]] = []
    for _ in range(CPU_ROUNDS):
        engine.evict_gpu()
        times, cpu_ids = _ask(engine)
        cpu += times
    engine.settle()
    engine.close()
    return cold, cpu, cold_ids, cpu_ids


def _second(setting: Setting) -> tuple[list[float], list[list[int]]]:
    engine = Engine(setting)
    engine.ask([prompt("warm", 64)], 2)
    found = _ask(engine)
    engine.close()
    return found


def _ask(engine: Engine) -> tuple[list[float], list[list[int]]]:
    """One token of each prompt, one after another, on a GPU without any of them."""
    times: list[float] = []
    ids: list[list[int]] = []
    for tokens in _prompts():
        engine.settle()
        start_s = time.perf_counter()
        ids += engine.ask([tokens], 1)
        times.append(time.perf_counter() - start_s)
    return times, ids
