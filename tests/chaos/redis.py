"""A Redis tier's server is killed, restarted, frozen and emptied under load.

``python -m tests.chaos.redis --json`` prints one object; exit 1 unless every byte was right, no request hung, the tier
recovered within 5 s of the server's return, and CPU hits kept their speed within a factor of two.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from tests.chaos.load import LAYOUT, QUEUE_BYTES, config
from tests.chaos.phases import End, Result, Run, parser, report
from tests.servers.valkey import Valkey, valkey
from tiering import TieringOffloadingManager

DEADLINE = "500ms"


async def chaos(server: Valkey, *, phase_s: float, freeze_s: float, seed: int) -> Result:
    tier = {"type": "redis", "url": server.url, "deadline": DEADLINE, "queue_bytes": QUEUE_BYTES}
    async with TieringOffloadingManager(config(tier), LAYOUT) as manager:
        run = Run(manager, "redis", seed)
        async with run.running():
            await run.undisturbed(2 * phase_s)
            await run.fault("killed", lambda: _killed(server), phase_s)
            await run.fault("restarted at once", lambda: _restarted(server), 0.0)
            await run.fault("frozen", lambda: _frozen(server), freeze_s)
            await run.fault("emptied", lambda: _emptied(server), 0.0)
            await run.undisturbed(2 * phase_s)
        return run.result()


async def _killed(server: Valkey) -> End:
    await asyncio.to_thread(server.kill)

    async def start() -> None:
        await asyncio.to_thread(server.start)

    return start


async def _restarted(server: Valkey) -> End:
    await (await _killed(server))()
    return _nothing


async def _frozen(server: Valkey) -> End:
    await asyncio.to_thread(server.freeze)

    async def thaw() -> None:
        server.thaw()

    return thaw


async def _emptied(server: Valkey) -> End:
    await asyncio.to_thread(server, "FLUSHALL")
    return _nothing


async def _nothing() -> None:
    """It is over already."""


def main() -> None:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory, valkey(Path(directory)) as server:
        result = asyncio.run(chaos(server, phase_s=options.phase_s, freeze_s=options.freeze_s, seed=options.seed))
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
