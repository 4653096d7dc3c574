"""What the scenarios ran on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any


def machine() -> dict[str, Any]:
    import torch
    import vllm

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "kvtiering": version("kvtiering"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
