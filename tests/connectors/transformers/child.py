"""Generates once and tells what came of it. ``python -m tests.connectors.transformers.child DIRECTORY SEED``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.connectors.transformers.models import NEW, TOKENS, config, model, nvme, prompts
from tiering.connectors.transformers import TieredPrefixCache

LENGTHS = (100, 83)
HEAD = 70


def main(directory: str, seed: int) -> None:
    ids, mask = prompts(LENGTHS, head=HEAD)
    with TieredPrefixCache(model(seed=seed), config(nvme(Path(directory))), tokens_per_block=TOKENS) as cache:
        out = cache.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        assert cache.last is not None
        print(json.dumps({"ids": out.tolist(), "reused": dict(cache.last.reused_tokens)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
