"""The engine calls the halves in the order that docs/engine-integration.md tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.connectors.reference.tiered import open_manager
from tests.connectors.reference.worlds import FULL
from tiering.connectors.reference import ContentRunner, ReferenceEngine, connect

PROMPT = list(range(13))


class Overheard:
    """Stands before a half, or the runner, and notes the calls."""

    def __init__(self, one: Any, name: str, heard: list[str]) -> None:
        self._one, self._name, self._heard = one, name, heard

    def __getattr__(self, call: str) -> Any:
        found = getattr(self._one, call)
        if not callable(found):
            return found
        return self._noting(found, f"{self._name}.{call}")

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._heard.append(name)
            return function(*args, **options)

        return call


def test_the_calls_of_a_step() -> None:
    heard: list[str] = []
    runner = ContentRunner([FULL], num_gpu_blocks=20, ranks=2)
    with open_manager(runner.layout) as manager:
        connection = connect(runner, manager)
        try:
            engine = ReferenceEngine(
                Overheard(runner, "runner", heard),
                connector_scheduler=Overheard(connection.scheduler, "scheduler", heard),
                connector_workers=[Overheard(one, f"worker{n}", heard) for n, one in enumerate(connection.workers)],
            )
            engine.add_request("a", PROMPT, max_tokens=1)
            assert heard == ["scheduler.on_new_request"]
            heard.clear()
            engine.step()
            before = ["handle_preemptions", "bind_connector_metadata", "start_load_kv"]
            after = ["wait_for_save", "get_finished", "take_output", "clear_connector_metadata"]
            assert heard == [
                "scheduler.get_num_new_matched_tokens",
                "scheduler.update_state_after_alloc",
                "scheduler.build_connector_meta",
                *(f"worker{rank}.{call}" for rank in range(2) for call in before),
                "runner.forward",
                *(f"worker{rank}.{call}" for rank in range(2) for call in after),
                "scheduler.update_connector_output",
                "scheduler.request_finished",
            ]
            heard.clear()
            assert engine.has_work  # stores are still to be copied
            engine.run()
            # Steps that compute nothing make the same calls, but those of requests.
            assert heard.count("scheduler.build_connector_meta") == heard.count("worker1.start_load_kv") > 0
            assert "scheduler.get_num_new_matched_tokens" not in heard
            heard.clear()
            engine.reset_prefix_cache()
            assert heard == ["scheduler.reset"]
        finally:
            connection.shutdown()
