"""From a configuration to the servers that it names, and from what they refuse to words for an operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from backends.redis.cluster import Cluster
from backends.redis.config import RedisConfig
from backends.redis.dial import Dialer, tls_context
from backends.redis.failures import ConnectionLost, RedisFailure
from backends.redis.node import Node
from backends.redis.topology import Sentinel, Standalone, Topology
from backends.redis.url import Address, Credentials
from tiering.api import BackendError, ConfigError, run_blocking


async def make_topology(config: RedisConfig) -> Topology:
    """Connects to nothing yet. Raises ``ConfigError`` for TLS files that cannot be used."""
    server = config.server
    tls = await run_blocking(tls_context, config)
    nodes = Dialer(server.credentials, server.db, tls, config.tls_server_name, config.timeout_s)
    thread_name = f"{config.name or config.type}-redis"

    def make_node(address: Address, dialer: Dialer = nodes) -> Node:
        return Node(address, dialer, connections_max=config.connections_max, thread_name=thread_name)

    match config.mode:
        case "standalone":
            return Standalone(server.addresses[0], make_node)
        case "cluster":
            return Cluster(server.addresses, make_node)
        case "sentinel":
            secret = config.sentinel_password
            credentials = Credentials(config.sentinel_username, secret.get_secret_value() if secret else None)
            sentinels = replace(nodes, credentials=credentials, db=0)
            service = config.sentinel_service or ""
            return Sentinel(service, server.addresses, partial(make_node, dialer=sentinels), make_node)


@contextmanager
def operators_words(config: RedisConfig, op: str) -> Iterator[None]:
    """Turns a ``RedisFailure`` into ``ConfigError`` if an operator must act, else into a retryable ``BackendError``."""
    tier = config.name or config.type
    try:
        yield
    except RedisFailure as failure:
        if not failure.retryable:
            raise ConfigError(f"{tier}: {failure}") from failure
        # A port that wants TLS closes on whoever speaks without, or says something in its own way.
        plain = isinstance(failure, ConnectionLost) and not config.server.tls
        hint = "; if it wants TLS, write rediss:// instead of redis://" if plain else ""
        raise BackendError(f"{failure}{hint}", tier=tier, op=op, retryable=True) from failure
