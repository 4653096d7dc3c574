"""How a worker finds the slots that vLLM's scheduler process has."""

from __future__ import annotations

import os

from tiering.connectors.wire import ArenaAddress
from tiering.errors import ConfigError
from tiering.manager import TieringOffloadingManager
from tiering.memory.arena import Arena, PoolShape


def address_of(manager: TieringOffloadingManager) -> ArenaAddress:
    """Where the shared arena of an open manager is, for other processes."""
    arena = manager.organs.arena
    pools = [arena.array(group).shape for group in range(len(manager.layout.groups))]
    return ArenaAddress(os.getpid(), arena.fd, tuple((int(slots), int(size)) for slots, size in pools))


def attach(address: ArenaAddress) -> Arena:
    """Map the arena at ``address``; the caller closes it. It has no name: only a process of the same user finds it.

    Raises ``ConfigError`` if the descriptor cannot be opened.
    """
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"cannot map the slots of the scheduler's process at {path} ({error.strerror}): workers must run as the same"
            " user, on the same host and in the same PID namespace"
        ) from error
    try:
        return Arena.attach(fd, [PoolShape(slots, slot_bytes) for slots, slot_bytes in address.pools])
    finally:
        os.close(fd)
