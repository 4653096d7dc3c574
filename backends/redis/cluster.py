"""A cluster: 16,384 hash slots spread over its members, and which member has which."""

from __future__ import annotations

import asyncio
import binascii
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Final

from backends.redis.batch import Redirect
from backends.redis.dial import rejected
from backends.redis.failures import ErrorReply, RedisFailure, Rejected, Unreachable
from backends.redis.node import Node
from backends.redis.resp import Connection, Reply
from backends.redis.topology import MakeNode, Topology
from backends.redis.url import Address

SLOTS: Final = 16384


def slot_of(key: bytes) -> int:
    """The hash slot of ``key``: of what stands between its first ``{`` and the next ``}``, if there is something."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


class Cluster(Topology):
    """Keeps the map of slots, asks any member for it when in doubt, and corrects it by every MOVED."""

    def __init__(self, seeds: Sequence[Address], make_node: MakeNode) -> None:
        self._seeds = seeds
        self._make_node = make_node
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Address | None] = [None] * SLOTS
        self._asked = 0
        """Counts the times that the members were asked, so that of many calls in doubt one asks."""
        self._doubtful = True
        self._asking = asyncio.Lock()

    @property
    def nodes(self) -> Sequence[Node]:
        return list(self._nodes.values())

    def everything(self) -> Sequence[Node]:
        return self.nodes

    def doubt(self) -> None:
        self._doubtful = True

    async def route(self, keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        if self._doubtful:
            seen = self._asked
            async with self._asking:
                if seen == self._asked:
                    await self._refresh()
        slots = [slot_of(key) for key in keys]
        if any(self._owners[slot] is None for slot in slots):
            self._doubtful = True
            raise Unreachable("no member of the cluster serves the slots of these keys")
        places: defaultdict[Node, list[int]] = defaultdict(list)
        for at, slot in enumerate(slots):
            owner = self._owners[slot]
            if owner is not None:
                places[self._node(owner)].append(at)
        return list(places.items())

    def learn(self, key: bytes, redirect: Redirect, origin: Address) -> Node:
        # A member that does not know its own address leaves it out.
        address = redirect.address if redirect.address.host else Address(origin.host, redirect.address.port)
        if not redirect.ask:
            self._owners[slot_of(key)] = address
            self._doubtful = True
        return self._node(address)

    def _node(self, address: Address) -> Node:
        if address not in self._nodes:
            self._nodes[address] = self._make_node(address)
        return self._nodes[address]

    async def _refresh(self) -> None:
        try:
            owners = await self._ask_all()
        except RedisFailure:
            self._asked += 1
            if not any(self._owners):
                raise
            return  # what is known may still be right for most slots; the doubt stays
        self._asked += 1
        self._owners = owners
        self._doubtful = False
        members = {owner for owner in owners if owner is not None}
        for address in members:
            self._node(address)
        for address in self._nodes.keys() - members:
            self._nodes.pop(address).leave()

    async def _ask_all(self) -> list[Address | None]:
        failures: list[RedisFailure] = []
        known = sorted(self._nodes.values(), key=lambda node: node.failing)
        for address in [*(node.address for node in known), *(seed for seed in self._seeds if seed not in self._nodes)]:
            node = self._node(address)
            try:
                return await node.run(partial(_ask, address))
            except RedisFailure as failure:
                failures.append(failure)
        # What an operator must act upon says more than a member that is down.
        raise min(failures, key=lambda failure: failure.retryable)


def _ask(member: Address, connection: Connection) -> list[Address | None]:
    """In a thread: the owner of each slot, as ``member`` sees it."""
    reply = connection.command(b"CLUSTER", b"SLOTS")
    if isinstance(reply, ErrorReply):
        if "cluster support disabled" in reply.text:
            raise Rejected(f"{member} is not a member of a cluster; set `mode: standalone`", retryable=False)
        raise rejected(member, "CLUSTER SLOTS", reply)
    owners = _owners(reply, member)
    if not any(owners):
        raise Unreachable(f"{member} knows of no slots; it is alone, or its cluster is still being made")
    return owners


def _owners(reply: Reply, member: Address) -> list[Address | None]:
    owners: list[Address | None] = [None] * SLOTS
    for one in reply if isinstance(reply, list) else []:
        match one:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                # A member that does not know its own address leaves it out, or writes "?".
                known = host.decode() if isinstance(host, bytes) and host not in (b"", b"?") else member.host
                address = Address(known, port)
                owners[first : last + 1] = [address] * (last + 1 - first)
            case _:
                raise Rejected(f"{member} answered CLUSTER SLOTS with {one!r:.80}")
    return owners
