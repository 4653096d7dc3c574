"""What a server says of itself at open: whether it is what the configuration takes it for, and what it can hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from backends.redis.batch import redirect_of
from backends.redis.config import RedisConfig
from backends.redis.dial import rejected
from backends.redis.failures import ErrorReply, RedisFailure, Rejected
from backends.redis.resp import Connection, Reply, encode
from backends.redis.topology import Topology
from backends.redis.url import Address

VALUE_BYTES_MAX: Final = 512 << 20
"""The longest value that Redis takes unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Facts:
    address: Address
    value_bytes_max: int


def look_at(connection: Connection, address: Address, probe: bytes, *, clustered: bool) -> Facts:
    """In a thread. ``probe`` is a key of ours that need not exist. Raises ``Rejected`` with the remedy.

    INFO and CONFIG are often withheld from users of managed servers; what they would have told is then found out by use.
    """
    exists, info, limit = connection.pipeline(
        [encode(b"EXISTS", probe), encode(b"INFO"), encode(b"CONFIG", b"GET", b"proto-max-bulk-len")]
    )
    says = _fields(info)
    # Redis has redis_mode, Valkey server_mode.
    if "sentinel" in (says.get("redis_mode"), says.get("server_mode")):
        raise Rejected(f"{address} is a Sentinel; set `mode: sentinel` and `sentinel_service:`", retryable=False)
    if isinstance(exists, ErrorReply):
        redirected = redirect_of(exists) is not None
        if redirected and not clustered:
            raise Rejected(f"{address} is a member of a cluster; set `mode: cluster`", retryable=False)
        if not redirected:
            raise rejected(address, "EXISTS", exists)
    elif not isinstance(exists, int):
        raise Rejected(f"{address} answered EXISTS with {exists!r:.40}")
    if says.get("cluster_enabled") == "1" and not clustered:
        raise Rejected(f"{address} is a member of a cluster; set `mode: cluster`", retryable=False)
    if says.get("role") == "slave":
        raise Rejected(f"{address} is a replica, which takes no stores; name its master, or use Sentinel or Cluster")
    return Facts(address, _limit(limit))


async def look_at_all(topology: Topology, config: RedisConfig, probe: bytes) -> list[Facts]:
    """Of every server that answers; one is enough, since the others may come back. Raises ``RedisFailure``."""
    await topology.route([])
    look = partial(look_at, probe=probe, clustered=config.mode == "cluster")
    found: list[Facts] = []
    failures: list[RedisFailure] = []
    for node in topology.nodes:
        try:
            found.append(await node.run(partial(look, address=node.address)))
        except RedisFailure as failure:
            if not failure.retryable:
                raise
            failures.append(failure)
    if not found:
        raise failures[0]
    return found


def _fields(info: Reply) -> dict[str, str]:
    if not isinstance(info, bytes):
        return {}
    pairs = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in pairs if colon}


def _limit(reply: Reply) -> int:
    match reply:
        case [_, bytes(value)] if value.isdigit():
            return int(value)
    return VALUE_BYTES_MAX
