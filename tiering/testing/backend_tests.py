"""The conformance kit for backends: subclass ``BackendTests``, override ``make_backend``, run pytest."""

from __future__ import annotations

from tiering.testing.conformance.batches import BatchRules
from tiering.testing.conformance.concurrency import ConcurrencyRules
from tiering.testing.conformance.disturbed import DisturbedRules
from tiering.testing.conformance.histories import HistoryRules
from tiering.testing.conformance.lifetime import LifetimeRules
from tiering.testing.conformance.medium import MediumRules
from tiering.testing.conformance.payloads import PayloadRules


class BackendTests(
    BatchRules, PayloadRules, ConcurrencyRules, DisturbedRules, LifetimeRules, MediumRules, HistoryRules
):
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

    A test is named after the rule that it proves (``test_rule_05_...``), and what it raises begins with the number of
    the rule that is broken and its words. Every test takes ``tmp_path`` alone, needs pytest-asyncio in either mode, and
    works on a medium of its own. The hooks are ``make_backend``, ``corrupt`` with ``corrupt_supported``,
    ``crash_supported``, ``payload_sizes``, ``call_timeout_s``, ``heavy_modules``, and ``slow_medium``,
    ``hung_medium`` and ``failing_medium``; ``KitBase`` documents them.

    Not proven here: that a backend on a full medium says REFUSED rather than FAILED, and what it does when a medium
    fails that the three media hooks do not reach. ``tiering.testing.FaultyBackend`` shows how the manager takes both.
    """
