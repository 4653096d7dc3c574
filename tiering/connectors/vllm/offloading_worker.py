"""The copies of ``TieringSpec``: our transfer engines behind vLLM's ``OffloadingWorker``, on CPU and CUDA."""

from __future__ import annotations

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from tiering.connectors.vllm.arena import attach
from tiering.connectors.vllm.transfers import SlotsLoadStoreSpec
from tiering.errors import TieringError
from tiering.memory.arena import Arena
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import LOAD, STORE, BlockSpan, Medium, TransferEngine, TransferSpec, TransferType


class TieringSpecWorker(OffloadingWorker):
    """One rank. The arena is mapped with the first job, which tells where it is."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_slot: int, ranks: int, rank: int) -> None:
        groups = [
            [kv_caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes] for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._device = DeviceBlocks.of(groups)
        self._placement = Placement((blocks_per_slot,) * len(groups), ranks)
        self._rank = rank
        self._arena: Arena | None = None
        self._engines: dict[TransferType, TransferEngine] = {}
        self._under_way: dict[TransferType, set[int]] = {STORE: set(), LOAD: set()}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        device = self._gpu_span(src_spec)
        self._submit(STORE, job_id, TransferSpec(device, self._cpu_span(dst_spec, device)), dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        device = self._gpu_span(dst_spec)
        self._submit(LOAD, job_id, TransferSpec(self._cpu_span(src_spec, device), device), src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Raises ``TieringError`` for a failed copy: vLLM's own half knows no failed transfer, and the bytes are not there."""
        finished = []
        for direction, engine in self._engines.items():
            for result in engine.poll():
                self._under_way[direction].discard(result.job_id)
                if not result.success:
                    raise TieringError(f"copying blocks {direction[0].value} -> {direction[1].value}: {result.error}")
                finished.append(TransferResult(result.job_id, True, result.bytes, result.seconds))
        return finished

    def wait(self, job_ids: set[int]) -> None:
        for direction, engine in self._engines.items():
            engine.wait(job_ids & self._under_way[direction])

    def shutdown(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        if self._arena is not None:
            self._arena.close()

    def _submit(self, direction: TransferType, job_id: int, spec: TransferSpec, host: LoadStoreSpec) -> None:
        if not self._engines:
            assert isinstance(host, SlotsLoadStoreSpec)
            self._arena = attach(host.arena)
            self._engines = open_engines(self._arena, self._device, self._placement, self._rank)
        self._engines[direction].submit(job_id, spec)
        self._under_way[direction].add(job_id)

    def _gpu_span(self, spec: GPULoadStoreSpec) -> BlockSpan:
        firsts = [
            index % blocks for index, blocks in zip(spec.block_indices, self._placement.blocks_per_slot, strict=True)
        ]
        return BlockSpan(Medium.GPU, tuple(spec.block_ids.tolist()), tuple(spec.group_sizes), tuple(firsts))

    def _cpu_span(self, spec: LoadStoreSpec, device: BlockSpan) -> BlockSpan:
        assert isinstance(spec, SlotsLoadStoreSpec)
        sizes = [
            -(-(first + count) // blocks) if count else 0
            for first, count, blocks in zip(
                device.block_indices, device.group_sizes, self._placement.blocks_per_slot, strict=True
            )
        ]
        return BlockSpan(Medium.CPU, tuple(spec.block_ids.tolist()), tuple(sizes), (0,) * len(sizes))
