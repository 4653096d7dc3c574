"""vLLM's own offloading manager and tiers on a CPU: only the copies between the engine and its CPU tier are replaced."""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyTieringSpec(TieringOffloadingSpec):
    """vLLM's multi-tier spec with copies by the CPU instead of its CUDA kernels."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return MemcpyWorker(kv_caches, region, self.blocks_per_chunk)


class MemcpyWorker(OffloadingWorker):
    """Copies inside ``submit``: on a CPU there is no other engine that could do it meanwhile."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._device = [tensor.tensor for tensor in kv_caches.tensors]
        self._host = [
            region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk) for tensor in kv_caches.tensors
        ]
        self._tensors_of_group = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool) -> bool:
        assert isinstance(host, BlockIDsLoadStoreSpec)
        start_s = time.monotonic()
        moved = block = chunk = 0
        for group, count in enumerate(device.group_sizes):
            skipped = device.block_indices[group] % self._blocks_per_chunk
            position = torch.arange(skipped, skipped + count)
            chunks = -(-(skipped + count) // self._blocks_per_chunk) if count else 0
            blocks = torch.from_numpy(device.block_ids[block : block + count]).long()
            rows = torch.from_numpy(host.block_ids[chunk : chunk + chunks]).long()[position // self._blocks_per_chunk]
            for index in set(self._tensors_of_group[group]):
                moved += self._copy_tensor(index, blocks, rows, position % self._blocks_per_chunk, store=store)
            block, chunk = block + count, chunk + chunks
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - start_s))
        return True

    def _copy_tensor(
        self, index: int, blocks: torch.Tensor, rows: torch.Tensor, parts: torch.Tensor, *, store: bool
    ) -> int:
        page = self._device[index].shape[1]
        for block, row, part in zip(blocks.tolist(), rows.tolist(), parts.tolist(), strict=True):
            piece = self._host[index][row, part * page : (part + 1) * page]
            if store:
                piece.copy_(self._device[index][block])
            else:
                self._device[index][block].copy_(piece)
        return page * len(blocks)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._device.clear()
        self._host.clear()
        self._region.cleanup()
