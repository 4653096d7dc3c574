"""KV events over ZeroMQ, in the format in which vLLM publishes its own, so that a router understands both.

Each message has three parts: topic, sequence number (8 bytes, big-endian), and a msgpack array ``[time_s, events, rank]``;
an event is a map with ``type`` BlockStored, BlockRemoved or AllBlocksCleared. Source: vllm/distributed/kv_events.py, 0.32.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from tiering.config import EventsConfig
from tiering.errors import ConfigError
from tiering.keys import DIGEST_BYTES
from tiering.runtime.event_log import EventLog
from tiering.types import KEY_BYTES_MAX, BlockKey, KvEvent, KvEventBatch, KVLayout

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("tiering.events")

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_PRIMARY: Final = "primary"
_POLL_S: Final = 0.1
"""How long a close may have to wait for the thread."""
_HWM_MESSAGES: Final = 100_000


class EventPublisher:
    """Publishes what an ``EventLog`` gets, from a thread of its own, until ``close``."""

    def __init__(
        self,
        log_: EventLog,
        config: EventsConfig,
        layout: KVLayout,
        remote_tiers: frozenset[str],
        on_death: Callable[[], None],
    ) -> None:
        """``remote_tiers``: names of the tiers that other nodes share. ``on_death`` is called if publishing ends by an error. Raises ``ConfigError`` if an address cannot be used
        or the ``events`` extra is not installed."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"events.zmq_endpoint: {error.name} is not installed; pip install 'kvtiering[events]'"
            ) from None
        self._log = log_
        self._topic = config.topic.encode()
        self._layout = layout
        self._remote = remote_tiers
        self._on_death = on_death
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._stop = threading.Event()
        try:
            assert config.zmq_endpoint is not None
            self._pub = self._socket(zmq.PUB, config.zmq_endpoint, "zmq_endpoint", bind=_is_bound(config.zmq_endpoint))
            self._replay: zmq.Socket[bytes] | None = None
            if config.zmq_replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, config.zmq_replay_endpoint, "zmq_replay_endpoint", bind=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._main, name="kvtiering-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, endpoint: str, key: str, *, bind: bool) -> zmq.Socket[bytes]:
        import zmq

        socket = self._context.socket(kind)
        socket.set_hwm(_HWM_MESSAGES)
        try:
            if bind:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"events.{key}: cannot use {endpoint}: {error.strerror}") from None
        return socket

    @property
    def endpoint(self) -> str:
        """The address that the PUB socket is bound or connected to (a port of ``*`` is known then)."""
        return _address(self._pub)

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._replay is None else _address(self._replay)

    def close(self) -> None:
        """Publish what is there, and stop. Idempotent."""
        self._stop.set()
        self._log.close()
        self._thread.join()
        self._context.destroy(linger=0)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            sequence = 0
            while True:
                stopping = self._stop.is_set()
                for batch in self._log.since(sequence):
                    self._pub.send_multipart(self._message(batch))
                    sequence = batch.sequence + 1
                self._serve_replays()
                if stopping:
                    return
                self._log.wait(sequence, _POLL_S)
        except Exception:
            log.exception("KV events are published no more")
            self._on_death()

    def _serve_replays(self) -> None:
        """Who missed something names the first sequence number that it wants, and gets all that is kept from there on."""
        while self._replay is not None and self._replay.poll(0):
            who, *request = self._replay.recv_multipart()
            if len(request) != 2 or len(request[1]) != 8:
                log.warning(
                    "a replay request of %d parts is none: an empty part and 8 bytes were expected", len(request)
                )
                continue
            for batch in self._log.since(int.from_bytes(request[1], "big")):
                _, number, payload = self._message(batch)
                self._replay.send_multipart((who, b"", number, payload))
            self._replay.send_multipart((who, b"", END_OF_REPLAY, b""))

    # -- the format ---------------------------------------------------------------------------------------------------

    def _message(self, batch: KvEventBatch) -> tuple[bytes, bytes, bytes]:
        events = [self._event(event) for event in batch.events]
        return self._topic, batch.sequence.to_bytes(8, "big"), self._encode([batch.time_s, events, 0])

    def _event(self, event: KvEvent) -> dict[str, Any]:
        if event.kind == "cleared":
            return {"type": "AllBlocksCleared"}
        common: dict[str, Any] = {
            "block_hashes": _hashes(event.keys),
            "medium": "CPU" if event.tier == _PRIMARY else "STORAGE",
            "group_idx": event.group,
            "locality": "REMOTE" if event.tier in self._remote else "LOCAL",
            "ownership": None if event.tier == _PRIMARY else event.tier,
        }
        if event.kind == "removed":
            return {"type": "BlockRemoved", **common}
        group = self._layout.groups[event.group]
        return {
            "type": "BlockStored",
            **common,
            "parent_block_hash": None if event.parent is None else _hashes((event.parent,))[0],
            "token_ids": [],  # the manager knows hashes, and no tokens
            "block_size": group.tokens_per_block,
            "lora_id": None,
            "lora_name": None,
        }


def _address(socket: zmq.Socket[bytes]) -> str:
    import zmq

    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _hashes(keys: Sequence[BlockKey]) -> list[bytes]:
    """The content hashes: a key of full length ends with its group's number."""
    return [key[:DIGEST_BYTES] if len(key) == KEY_BYTES_MAX else key for key in keys]


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or not endpoint.startswith("tcp://")
