"""Offline inference with vLLM and kvtiering: the second run of this program finds the first one's prompts on disk.

    python examples/vllm_offline.py MODEL tiering.yaml

MODEL is a Hugging Face name or a directory. The YAML file should name an NVMe tier; `tiering config init` writes one.
"""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main(model: str, tiering_config: str) -> None:
    llm = LLM(
        model=model,
        enable_prefix_caching=True,
        disable_log_stats=False,  # for the counters below
        kv_transfer_config=KVTransferConfig(
            kv_connector="TieringConnector",
            kv_connector_module_path="tiering.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"tiering_config": tiering_config},
        ),
    )
    document = "The quick brown fox jumps over the lazy dog. " * 200
    questions = ["Who jumps?", "Who is lazy?", "What colour is the fox?"]
    for question in questions:
        start_s = time.perf_counter()
        outputs = llm.generate([f"{document}\n{question}\n"], SamplingParams(max_tokens=32), use_tqdm=False)
        print(f"{time.perf_counter() - start_s:6.2f} s  {outputs[0].num_cached_tokens or 0:5d} tokens not computed")
    totals = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    for name in ("vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits", "vllm:tiering_stored_blocks"):
        print(f"{name:35} {totals.get(name, 0):.0f}")


# vLLM starts its processes by importing this file again.
if __name__ == "__main__":
    main(*sys.argv[1:])
