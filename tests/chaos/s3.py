"""An S3 tier's server answers with errors, slowly, in part, wrongly or not at all, under load.

``python -m tests.chaos.s3 --json`` prints one object; exit 1 unless every byte was right, no request hung, the tier
recovered within 5 s of the server's return, and CPU hits kept their speed within a factor of two.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tests.chaos.load import LAYOUT, QUEUE_BYTES, config
from tests.chaos.phases import End, Result, Run, parser, report
from tests.chaos.s3_proxy import Proxy, proxy
from tests.servers.seaweed import SeaweedServer, start_seaweed
from tiering import TieringOffloadingManager

DEADLINE: Final = "500ms"
BUCKET: Final = "kvtiering-chaos"
FAULTS: Final = ("500", "403", "slow", "truncated", "shortened", "flipped", "dead")


async def chaos(server: SeaweedServer, *, phase_s: float, freeze_s: float, seed: int) -> Result:
    async with proxy(server.endpoint_url) as wire:
        tier = {
            "type": "fsspec",
            "url": f"s3://{BUCKET}/{seed}",
            "name": "s3",
            "storage_options": {**server.storage_options(), "endpoint_url": wire.url},
            "timeout": "2s",
            "deadline": DEADLINE,
            "queue_bytes": QUEUE_BYTES,
        }
        async with TieringOffloadingManager(config(tier), LAYOUT) as manager:
            run = Run(manager, "s3", seed)
            async with run.running():
                await run.undisturbed(2 * phase_s)
                for word in FAULTS:
                    await _say(run, wire, word, phase_s)
                await run.fault("frozen", lambda: _frozen(server), freeze_s)
                await run.undisturbed(2 * phase_s)
            return run.result()


async def _say(run: Run, wire: Proxy, word: str, seconds: float) -> None:
    async def begin() -> End:
        await wire.say(word)
        return lambda: wire.say("well")

    await run.fault(word, begin, seconds)


async def _frozen(server: SeaweedServer) -> End:
    await asyncio.to_thread(server.freeze)

    async def thaw() -> None:
        server.thaw()

    return thaw


def main() -> None:
    options = parser(__doc__).parse_args()
    server = start_seaweed()
    try:
        server.make_bucket(BUCKET)
        result = asyncio.run(chaos(server, phase_s=options.phase_s, freeze_s=options.freeze_s, seed=options.seed))
    finally:
        server.stop()
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
