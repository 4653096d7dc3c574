"""A transfer engine whose thread dies of an exception that nobody expects: prints what its jobs tell then, as JSON."""

from __future__ import annotations

import ctypes
import json
import logging
import threading

import torch

from tests.memory.transfer.rig import Part, store
from tiering.memory.arena import Arena, PoolShape
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.cpu import CpuTransferEngine
from tiering.memory.transfer.spec import STORE


class _Levels(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.levelname)


def main() -> None:
    levels = _Levels()
    logging.getLogger("tiering.transfer").addHandler(levels)
    arena = Arena([PoolShape(8, 4096)])
    engine = CpuTransferEngine(
        STORE, arena, DeviceBlocks((tuple(torch.ones(2, 8, 512, dtype=torch.uint8)),)), Placement((1,))
    )
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "tiering-transfer-gpu-cpu")
    job = store(Part((1,), (1,)))
    engine.submit(0, job)
    engine.wait([0])
    before = engine.poll()[0].success
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    engine.submit(1, job)
    engine.submit(2, job)
    thread.join(30)
    alive = thread.is_alive()
    engine.submit(3, job)
    engine.wait([1, 2, 3])
    after = [(result.job_id, result.success, result.bytes, result.error) for result in engine.poll()]
    engine.close()
    print(json.dumps({"before": before, "alive": alive, "after": after, "logged": levels.names}))


if __name__ == "__main__":
    main()
