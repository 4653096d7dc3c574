"""``tiering demo``: a real transformers model on the reference engine, whose KV cache goes to CPU memory, NVMe, a new process.

``run_demo(DemoOptions(), progress=...)`` returns a ``DemoResult``; ``render(result, console)`` prints it.
Nothing here imports torch models or plots until a demo runs.
"""

from tiering.cli.demo.options import DemoOptions, ModelSpec, Scale, TrafficScale
from tiering.cli.demo.report import progress_bar, render
from tiering.cli.demo.result import DemoResult
from tiering.cli.demo.runs import run_demo

__all__ = ["DemoOptions", "DemoResult", "ModelSpec", "Scale", "TrafficScale", "progress_bar", "render", "run_demo"]
