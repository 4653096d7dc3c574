"""How fast the CPU engine copies: ``python -m tests.memory.transfer.bench_transfer``. Best of several runs.

Each figure is beside one plain ``numpy.copyto`` of as many bytes in the same run. ``layers``: all layers in one storage, a
layer after the other, scattered blocks and slots; ``apart``: a storage a layer; ``runs``: as layers, both in order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch

from tests.memory.transfer.rig import Part, load, store
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import LOAD, STORE, TransferEngine, TransferSpec

GIB = 1 << 30
JOB_BYTES = 128 << 20
LAYERS = 16
REPEATS = 9


def best_s(*calls: Callable[[], None]) -> list[float]:
    """The shortest time of each, taken in turns: what else the machine does then meets them all."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def run(engine: TransferEngine, spec: TransferSpec) -> None:
    engine.submit(1, spec)
    engine.wait([1])
    assert engine.poll()[0].success


def measure(page_bytes: int, how: str) -> None:
    count = JOB_BYTES // (LAYERS * page_bytes)
    if how == "apart":
        # Two pages apart at least, so that no two layers happen to lie at one distance.
        layers = [
            torch.ones(count + number * number, page_bytes, dtype=torch.uint8)[:count] for number in range(LAYERS)
        ]
    else:
        layers = list(torch.ones(LAYERS, count, page_bytes, dtype=torch.uint8))
    arena = Arena([PoolShape(count, LAYERS * page_bytes)])
    arena.prefault()
    engines = open_engines(arena, DeviceBlocks((tuple(layers),)), Placement((1,)))
    blocks, slots = list(range(count)), list(range(count))
    if how != "runs":
        random.Random(1).shuffle(blocks)
        random.Random(2).shuffle(slots)
    part = Part(tuple(blocks), tuple(slots))
    flat = np.ones(JOB_BYTES, np.uint8)
    plain, stored, loaded = (
        JOB_BYTES / GIB / seconds
        for seconds in best_s(
            lambda: np.copyto(arena.array(0).reshape(-1), flat),
            lambda: run(engines[STORE], store(part)),
            lambda: run(engines[LOAD], load(part)),
        )
    )
    for engine in engines.values():
        engine.close()
    arena.close()
    print(
        f"{page_bytes >> 10:5} KiB {how:6}  store {stored:5.2f} ({stored / plain:.2f})  load {loaded:5.2f} "
        f"({loaded / plain:.2f})  plain {plain:5.2f} GiB/s"
    )


if __name__ == "__main__":
    for size in (16 << 10, 64 << 10, 1 << 20):
        for layout in ("layers", "apart", "runs"):
            measure(size, layout)
