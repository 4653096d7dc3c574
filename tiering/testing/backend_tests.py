"""The conformance kit for backends: subclass ``BackendTests``, override ``make_backend``, run pytest."""

from __future__ import annotations

from tiering.testing.conformance.batches import BatchRules
from tiering.testing.conformance.concurrency import ConcurrencyRules
from tiering.testing.conformance.histories import HistoryRules
from tiering.testing.conformance.lifetime import LifetimeRules
from tiering.testing.conformance.medium import MediumRules
from tiering.testing.conformance.payloads import PayloadRules


class BackendTests(BatchRules, PayloadRules, ConcurrencyRules, LifetimeRules, MediumRules, HistoryRules):
    """The ten rules of the backend contract and the promises of ``BackendCapabilities``, as tests.

    ::

        class TestMyBackend(BackendTests):
            corrupt_supported = True

            def make_backend(self, tmp_path):
                return MyBackend(MyConfig(type="mine", path=tmp_path))

            def corrupt(self, tmp_path, key, edit):
                file = tmp_path / key.hex()
                file.write_bytes(edit(file.read_bytes()))
                return True

    A test is named after the rule that it proves (``test_rule_05_...``), and what it raises says the rule in words.
    Every test takes ``tmp_path`` alone, needs pytest-asyncio in either mode, and works on a medium of its own. The
    hooks are ``make_backend``, ``corrupt`` with ``corrupt_supported``, ``crash_supported``, ``payload_sizes`` and
    ``heavy_modules``; ``KitBase`` documents them.

    Not proven here, since it takes a medium that hangs or fills up: the deadline of ``aclose``, REFUSED for want of
    room, and errors of the medium. ``tiering.testing.FaultyBackend`` shows how the manager takes those.
    """
