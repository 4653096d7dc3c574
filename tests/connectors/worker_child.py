"""A worker's half in a process of its own: ``python -m tests.connectors.worker_child``. Metadata comes pickled on standard
input, one a step; for each it answers what it reports and what the GPU blocks hold, pickled, on standard output."""

from __future__ import annotations

import pickle
import sys

import torch

from tiering.connectors import OffloadingConnectorWorker
from tiering.memory.transfer.blocks import DeviceBlocks, Placement


def main() -> None:
    blocks, block_bytes = (int(word) for word in sys.argv[1:])
    memory = torch.arange(blocks, dtype=torch.uint8).repeat_interleave(block_bytes).reshape(blocks, block_bytes)
    worker = OffloadingConnectorWorker()
    worker.register_kv_caches(DeviceBlocks(((memory,),)), Placement((1,)))
    while True:
        try:
            metadata = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv()
        worker.wait_for_save()
        _, recving = worker.get_finished()
        pickle.dump((worker.take_output(), recving, memory.numpy().copy()), sys.stdout.buffer)
        sys.stdout.buffer.flush()
    worker.shutdown()


if __name__ == "__main__":
    main()
