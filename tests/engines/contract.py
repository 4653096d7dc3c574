"""What vLLM's interfaces ask of ``TieringSpec``, without an engine: real managers, real tiers, vLLM's own types."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.engines.catalog import Result

CONTRACTS: Final[dict[str, Callable[[Path], Result]]] = {}
BLOCK_BYTES: Final = 4096
TOKENS: Final = 32


def contract(check: Callable[[Path], Result]) -> Callable[[Path], Result]:
    CONTRACTS[check.__name__] = check
    return check


def offloading_config(**changes: Any) -> Any:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    parallel = OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0, data_parallel_size=1,
        data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("layer.0",), 0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="contract",
        model=OffloadingModelConfig("model", "float16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=parallel,
        kv_cache_layout="LBHNC",
    )
    return dataclasses.replace(config, **changes)


@contextmanager
def spec_manager(directory: Path, *, slots: int, nvme: bool = False) -> Iterator[Any]:
    """The manager that vLLM's scheduler half would get."""
    from tiering.connectors.vllm import TieringSpec

    path = directory / "tiering.yaml"
    lines = [f"primary: {{capacity: {slots * BLOCK_BYTES}B, store_reserve: 0%}}"]
    if nvme:
        lines += ["tiers:", f"  - {{type: nvme, path: {directory / 'nvme'}, capacity: 16MiB, deadline: 5s}}"]
    path.write_text("\n".join(lines), encoding="utf-8")
    manager = TieringSpec(offloading_config(extra_config={"tiering_config": str(path)})).get_manager()
    try:
        yield manager
    finally:
        manager.shutdown()


def request(name: str, chain: str, blocks: int) -> tuple[Any, list[Any]]:
    """A request as vLLM's scheduler registers it, and its keys."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    context = ReqContext(req_id=name)
    keys = [make_offload_key(f"{chain}-{index:04}".encode().ljust(32, b"."), 0) for index in range(blocks)]
    for index, key in enumerate(keys):
        context.set_offload_key_position(key, (index + 1) * TOKENS)
    return context, keys


def end_step(manager: Any) -> None:
    from vllm.v1.kv_offload.base import ScheduleEndContext

    manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))


def store(manager: Any, context: Any, keys: list[Any]) -> int:
    """Store blocks whose bytes begin with their key; how many were granted."""
    output = manager.prepare_store(keys, context)
    if output is None:
        return 0
    for key, slot in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
        manager.tiering.sync.slot_view(slot)[: len(key)] = key
    manager.complete_store(set(output.keys_to_store), context)
    return len(output.keys_to_store)


def leased(manager: Any) -> int:
    snapshot = manager.tiering.parts.gate.snapshot()
    return sum(pool["busy_slots"] for pool in snapshot["pools"]) + snapshot["open_loads"] + snapshot["open_stores"]


@contract
def a_hit_stays_until_it_is_loaded(directory: Path) -> Result:
    """Row 24: between the lookup and the load of one step everything else is stored; the block is still there, and it is
    the right one. What no load took can be evicted from the next step on."""
    from vllm.v1.kv_offload.base import LookupResult

    with spec_manager(directory, slots=8) as manager:
        mine, keys = request("mine", "mine", 4)
        manager.on_new_request(mine)
        assert store(manager, mine, keys) == 4
        verdicts = [manager.lookup(key, mine) for key in keys]
        flood, others = request("flood", "flood", 32)
        manager.on_new_request(flood)
        granted = store(manager, flood, others)
        slots = manager.prepare_load(keys, mine).block_ids.tolist()
        right = [bytes(manager.tiering.sync.slot_view(slot)[:36]) for slot in slots] == keys
        end_step(manager)
        while_loading = leased(manager)
        manager.complete_load(set(keys), mine)
        looked_at = [manager.lookup(key, mine) for key in keys]
        end_step(manager)
        left = leased(manager)
        good = right and granted == 4 and while_loading > 0 and left == 0
        hit = all(verdict is LookupResult.HIT for verdict in verdicts + looked_at)
    return {"ok": good and hit, "granted_beside": granted, "leases_left": left}


@contract
def few_requests_promote_while_they_wait(directory: Path) -> Result:
    """Rows 2 and 27: of many requests that wait for blocks on disk some are promoted for; one that goes away holds nothing."""
    from vllm.v1.kv_offload.base import LookupResult

    from tiering.connectors.vllm.managers import run_blocking
    from tiering.connectors.vllm.offloading_manager import PROMOTING_REQUESTS_MAX

    many = 4 * PROMOTING_REQUESTS_MAX
    with spec_manager(directory, slots=64, nvme=True) as manager:
        requests = [request(f"request-{number}", f"chain-{number}", 2) for number in range(many)]
        for context, keys in requests:
            manager.on_new_request(context)
            store(manager, context, keys)
            run_blocking(manager.tiering.flush())
        flood, others = request("flood", "flood", 64)
        manager.on_new_request(flood)
        store(manager, flood, others)
        run_blocking(manager.tiering.flush())
        verdicts = {manager.lookup(key, context) for context, keys in requests for key in keys}
        end_step(manager)
        promoting = sum(1 for context, _ in requests if manager.promotes(context.req_id))
        for context, _ in requests:
            manager.on_request_finished(context)
        manager.on_request_finished(flood)
        end_step(manager)
        run_blocking(manager.tiering.flush())
        left = manager.tiering.parts.gate.snapshot()["open_loads"]
    good = verdicts == {LookupResult.HIT_PENDING} and 0 < promoting <= PROMOTING_REQUESTS_MAX and left == 0
    return {"ok": good, "waiting": many, "promoting": promoting, "loads_left": left}


@contract
def random_calls_leave_nothing(directory: Path) -> Result:
    """Row 25: requests come, look, load, store, are preempted and end in any order; at the end nothing is leased."""
    from vllm.v1.kv_offload.base import LookupResult

    source = random.Random(25)
    wrong = hits = 0
    with spec_manager(directory, slots=24, nvme=True) as manager:
        alive: dict[str, tuple[Any, list[Any]]] = {}
        loading: list[tuple[Any, list[Any]]] = []
        for number in range(1500):
            if not alive or source.random() < 0.3:
                name = f"request-{number}"
                alive[name] = request(name, f"chain-{source.randrange(8)}", source.randrange(1, 12))
                manager.on_new_request(alive[name][0])
            context, keys = alive[source.choice(list(alive))]
            action = source.choice(
                ("look", "look", "store", "end", "landed", "reset" if number % 400 == 399 else "look")
            )
            if action == "look":
                run = []
                for key in keys:
                    verdict = manager.lookup(key, context)
                    if verdict is not LookupResult.HIT:
                        break
                    run.append(key)
                if run and source.random() < 0.7:
                    slots = manager.prepare_load(run, context).block_ids.tolist()
                    views = [bytes(manager.tiering.sync.slot_view(slot)[:36]) for slot in slots]
                    wrong += sum(view != key for view, key in zip(views, run, strict=True))
                    hits += len(run)
                    loading.append((context, run))
            elif action == "store":
                store(manager, context, keys)
            elif action == "end":
                manager.on_request_finished(context)
                del alive[context.req_id]
            elif action == "landed" and loading:
                context, run = loading.pop(source.randrange(len(loading)))
                manager.complete_load(set(run), context)
            elif action == "reset":
                manager.reset_cache()
                loading.clear()
            end_step(manager)
        for context, run in loading:
            manager.complete_load(set(run), context)
        for context, _ in alive.values():
            manager.on_request_finished(context)
        for _ in range(5):
            end_step(manager)
        snapshot = manager.tiering.parts.gate.snapshot()
        left = snapshot["open_loads"] + snapshot["open_stores"] + sum(pool["leases"] for pool in snapshot["pools"])
    return {"ok": not wrong and hits > 100 and not left, "hits": hits, "wrong_blocks": wrong, "left": left}


@contract
def what_differs_is_kept_apart(directory: Path) -> Result:
    """Row 14: one field at a time, and the namespace is another."""
    from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingGroupConfig, OffloadingModelConfig

    from tiering.connectors.vllm.layout import blocks_of_offloading
    from tiering.types import Namespace

    parallel = offloading_config().parallel
    others: dict[str, Any] = {
        "model": {"model": OffloadingModelConfig("another", "float16")},
        "cache dtype": {"model": OffloadingModelConfig("model", "fp8_e4m3")},
        "revision": {"extra_config": {"model_revision": "main"}},
        "tensor parallel": {"parallel": dataclasses.replace(parallel, tp_size=2, world_size=2)},
        "pipeline parallel": {"parallel": dataclasses.replace(parallel, pp_size=2, world_size=2)},
        "context parallel": {"parallel": dataclasses.replace(parallel, pcp_size=2, world_size=2)},
        "block size": {"groups": (OffloadingGroupConfig(2 * TOKENS, ("layer.0",), 0),)},
        "blocks a chunk": {"cache": OffloadingCacheConfig(TOKENS, 2)},
        "bytes": {"worker_kv_bytes_per_block": 2 * BLOCK_BYTES},
        "layers": {"groups": (OffloadingGroupConfig(TOKENS, ("layer.0", "layer.1"), 0),)},
        "layout": {"kv_cache_layout": "BLHNC"},
    }
    digests = {
        name: Namespace.of(blocks_of_offloading(offloading_config(**changes)).layout, epoch="0").digest
        for name, changes in {"the same": {}, **others}.items()
    }
    again = Namespace.of(blocks_of_offloading(offloading_config(engine_id="another")).layout, epoch="0").digest
    apart = len(set(digests.values())) == len(digests)
    return {"ok": apart and again == digests["the same"], "fields": sorted(others)}


@contract
def documented_configurations_are_accepted(directory: Path) -> Result:
    """Each ``--kv-transfer-config`` of docs/vllm.md is one that vLLM takes, and names classes that are there."""
    import json
    import re

    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    page = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
    texts = re.findall(r"--kv-transfer-config '(\{.*?\n  \})'", page.read_text(encoding="utf-8"), re.DOTALL)
    found: list[str] = []
    for text in texts:
        config = KVTransferConfig(**json.loads(text))
        found.append(KVConnectorFactory.get_connector_class(config).__name__)
        extra = config.kv_connector_extra_config
        if found[-1] == "OffloadingConnector":
            found[-1] = OffloadingSpecFactory.get_spec_cls(extra).__name__
            found += [SecondaryTierFactory.get_tier_class(tier).__name__ for tier in extra.get("secondary_tiers", [])]
    expected = ["TieringConnector", "TieringSpec", "TieringOffloadingSpec", "TieringSecondaryTier"]
    return {"ok": found == expected, "found": found}
