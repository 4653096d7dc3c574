"""``TieringConnector`` with a transfer engine that goes wrong, in the worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch

from tiering.connectors.vllm import TieringConnector
from tiering.connectors.vllm.arena import attach
from tiering.connectors.vllm.messages import TieringMetadata
from tiering.connectors.vllm.pages import device_blocks
from tiering.memory.transfer.blocks import DeviceBlocks, Placement
from tiering.memory.transfer.factory import open_engines
from tiering.memory.transfer.spec import LOAD, TransferEngine, TransferResult, TransferSpec, TransferType


class _LoadEngine:
    """Loads through the real engine."""

    def __init__(self, engine: TransferEngine, blocks: DeviceBlocks) -> None:
        self._engine = engine
        self._blocks = blocks

    @property
    def type(self) -> TransferType:
        return self._engine.type

    def submit(self, job_id: int, spec: TransferSpec) -> None:
        self._engine.submit(job_id, spec)

    def poll(self) -> list[TransferResult]:
        return self._engine.poll()

    def wait(self, job_ids: Collection[int]) -> None:
        self._engine.wait(job_ids)

    def close(self) -> None:
        self._engine.close()


class _FirstFails(_LoadEngine):
    """The first load names slots that are not there, as a torn message would: the real engine refuses it."""

    failed = False

    def submit(self, job_id: int, spec: TransferSpec) -> None:
        if not self.failed and spec.source.block_ids:
            self.failed = True
            slots = tuple(slot + (1 << 40) for slot in spec.source.block_ids)
            spec = TransferSpec(dataclasses.replace(spec.source, block_ids=slots), spec.destination)
        super().submit(job_id, spec)


class _Negated(_LoadEngine):
    """Every loaded value changes its sign once it has landed."""

    def __init__(self, engine: TransferEngine, blocks: DeviceBlocks) -> None:
        super().__init__(engine, blocks)
        self._specs: dict[int, TransferSpec] = {}

    def submit(self, job_id: int, spec: TransferSpec) -> None:
        self._specs[job_id] = spec
        super().submit(job_id, spec)

    def poll(self) -> list[TransferResult]:
        results = super().poll()
        for result in results:
            ids = list(self._specs.pop(result.job_id).destination.of_group(0))
            for pages in self._blocks.groups[0]:
                pages[ids] = (-pages[ids].view(torch.float32)).view(torch.uint8)
        return results


class _FaultyConnector(TieringConnector):
    engine: type[_LoadEngine]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._device = device_blocks(kv_caches, self._kv_cache_config, self._blocks)
        self._ready = False

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if not self._ready:
            assert isinstance(kv_connector_metadata, TieringMetadata)
            assert kv_connector_metadata.step.arena is not None
            self._ready = True
            arena = attach(kv_connector_metadata.step.arena)
            placement = Placement((1,), 1)
            self.worker.register_kv_caches(self._device, placement, arena)
            real = open_engines(arena, self._device, placement)
            self.worker.register_engine(self.engine(real[LOAD], self._device))
        super().handle_preemptions(kv_connector_metadata)


class FirstLoadFails(_FaultyConnector):
    engine = _FirstFails


class NegatedLoads(_FaultyConnector):
    engine = _Negated
