"""One vLLM engine for one scenario: which door it has, what it is asked, and what it reports."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from tests.engines.model import TINY, ModelShape, write_model

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

Door: TypeAlias = Literal["none", "baseline", "secondary", "spec", "connector"]
DOORS: Final[tuple[Door, ...]] = ("none", "baseline", "secondary", "spec", "connector")

GPU_BLOCK_TOKENS: Final = 32
"""The smallest block that vLLM's CPU attention takes."""
UNLIMITED_BLOCKS: Final = 1024

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
}
"""Of each scenario's process. One thread: two spin against each other on a loaded machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What a scenario's engine is made of. Sizes of tiers are in bytes."""

    door: Door
    directory: Path
    """The scenario's own: configurations and tiers' files go there."""
    models: Path
    shape: ModelShape = TINY
    gpu_blocks: int = 48
    primary_bytes: int = 64 << 20
    nvme_bytes: int = 0
    """0: no secondary tier."""
    restore: bool = True
    policy: str = "prefix"
    epoch: str = "0"
    max_batch_tokens: int = 1024
    max_requests: int = 16
    tensor_parallel: int = 1
    failure_policy: Literal["recompute", "fail"] = "recompute"
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """More of ``kv_connector_extra_config``."""
    connector: tuple[str, str] | None = None
    """Another connector's (class, module) in place of the door's: for injected faults."""

    @property
    def block_bytes(self) -> int:
        return self.shape.kv_bytes_per_token * GPU_BLOCK_TOKENS

    def but(self, **changes: Any) -> Setting:
        return dataclasses.replace(self, **changes)


def write_config(setting: Setting) -> Path:
    """The YAML file that every door of ours is configured by."""
    path = setting.directory / f"tiering-{setting.door}.yaml"
    lines = [
        f"primary: {{capacity: {setting.primary_bytes}B, policy: {setting.policy}}}",
        f"restore: {{enabled: {str(setting.restore).lower()}}}",
        f'epoch: "{setting.epoch}"',
    ]
    if setting.nvme_bytes:
        nvme = setting.directory / "nvme"
        lines += ["tiers:", f"  - {{type: nvme, path: {nvme}, capacity: {setting.nvme_bytes}B, deadline: 10s}}"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def transfer_config(setting: Setting) -> dict[str, Any] | None:
    """What ``--kv-transfer-config`` of ``vllm serve`` takes."""
    ours = "tiering.connectors.vllm"
    common = {"kv_role": "kv_both", "kv_load_failure_policy": setting.failure_policy}
    if setting.door == "none":
        return None
    if setting.door in ("baseline", "secondary"):
        tiers: list[dict[str, Any]] = []
        if setting.nvme_bytes and setting.door == "baseline":
            tiers = [{"type": "fs", "root_dir": str(setting.directory / "fs")}]
        elif setting.nvme_bytes:
            path = str(write_config(setting))
            tiers = [{"type": "TieringSecondaryTier", "module_path": ours, "tiering_config": path}]
        extra = {"spec_name": "MemcpyTieringSpec", "spec_module_path": "tests.engines.baseline",
                 "cpu_bytes_to_use": setting.primary_bytes, "secondary_tiers": tiers}  # fmt: skip
        return {"kv_connector": "OffloadingConnector", **common, "kv_connector_extra_config": extra | setting.extra}
    extra = {"tiering_config": str(write_config(setting))} | setting.extra
    if setting.door == "spec":
        extra |= {"spec_name": "TieringSpec", "spec_module_path": ours}
        return {"kv_connector": "OffloadingConnector", **common, "kv_connector_extra_config": extra}
    name, module = setting.connector or ("TieringConnector", ours)
    return {
        "kv_connector": name, "kv_connector_module_path": module, **common, "kv_connector_extra_config": extra
    }  # fmt: skip


class Engine:
    """A started engine. ``close`` ends it, and everything of ours in it."""

    def __init__(self, setting: Setting) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.setting = setting
        transfer = transfer_config(setting)
        self.llm: LLM = LLM(
            model=str(model_directory(setting)),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=GPU_BLOCK_TOKENS,
            num_gpu_blocks_override=setting.gpu_blocks,
            kv_cache_memory_bytes=max(1 << 28, 2 * setting.gpu_blocks * setting.block_bytes),
            max_model_len=setting.shape.positions,
            max_num_batched_tokens=setting.max_batch_tokens,
            max_num_seqs=setting.max_requests,
            enable_prefix_caching=True,
            disable_log_stats=False,
            seed=0,
            tensor_parallel_size=setting.tensor_parallel,
            kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        )
        self.cached_tokens = 0
        """Prompt tokens that requests of ``ask`` did not compute when they were first admitted, whoever had them."""

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int = 16, **transfer_params: Any) -> list[list[int]]:
        """Greedy token ids of each prompt, all at once. ``transfer_params``: the requests' ``kv_transfer_params``."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts], sampling(tokens, **transfer_params), use_tqdm=False
        )
        self.cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def ask_each(self, prompts: Sequence[Sequence[int]], tokens: int = 16, **transfer_params: Any) -> list[list[int]]:
        """The same, one after another."""
        return [self.ask([prompt], tokens, **transfer_params)[0] for prompt in prompts]

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name, summed over labels."""
        totals: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if (value := getattr(metric, "value", None)) is not None:
                totals[metric.name] = totals.get(metric.name, 0.0) + value
        return totals

    def hits(self) -> Hits:
        """Counters as of now."""
        metrics = self.metrics()
        if self.setting.door == "connector":
            ours = metrics["vllm:tiering_hit_tokens"] - metrics["vllm:tiering_resumed_hit_tokens"]
        else:
            ours = metrics.get("vllm:kv_offload_load_bytes", 0.0) / self.setting.shape.kv_bytes_per_token
        return Hits(
            tokens=int(ours),
            engine_reported=int(metrics.get("vllm:external_prefix_cache_hits", 0)),
            local=int(metrics["vllm:prefix_cache_hits"]),
            queries=int(metrics["vllm:prefix_cache_queries"]),
        )

    @property
    def core(self) -> Any:
        """The engine's core, where it runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    def settle(self, limit_s: float = 20.0) -> None:
        """Step until nothing is left to do: stores that were queued are copied and reported."""
        until_s = time.monotonic() + limit_s
        while self.core.scheduler.has_requests():
            if time.monotonic() > until_s:
                raise TimeoutError(f"the engine still has work after {limit_s:g} s")
            self.llm.llm_engine.step()

    def evict_gpu(self) -> None:
        """vLLM forgets its own prefix cache, and keeps the connector's."""
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


@dataclasses.dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens of requests at their first admission."""

    tokens: int
    """That the tiers gave, by our own count (by bytes moved, where the scheduler half is vLLM's)."""
    engine_reported: int
    """The same by vLLM's metric."""
    local: int
    """That vLLM's own prefix cache had."""
    queries: int

    @property
    def rate(self) -> float:
        """Share of all prompt tokens that nobody computed."""
        return (self.local + self.engine_reported) / self.queries

    def since(self, before: Hits) -> Hits:
        return Hits(
            self.tokens - before.tokens,
            self.engine_reported - before.engine_reported,
            self.local - before.local,
            self.queries - before.queries,
        )


def sampling(tokens: int, **transfer_params: Any) -> SamplingParams:
    """Greedy, exactly ``tokens`` of them."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": transfer_params} if transfer_params else None
    return SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, detokenize=False, extra_args=extra)


def model_directory(setting: Setting) -> Path:
    """Where the setting's model is; written if it is not there yet."""
    directory = setting.models / setting.shape.name
    if not (directory / "config.json").exists():
        write_model(directory, setting.shape)
    return directory


def apply_environment() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
