"""The configuration of a Redis tier. Imported while YAML is read, so it imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, WithJsonSchema, model_validator

from backends.redis.url import Server, UrlError, parse_url
from tiering.api import BackendConfig, Seconds

TTL_S_MAX: Final = 10 * 365 * 86400


def _as_text(value: Any) -> Any:
    """A password of digits alone is a number in YAML."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Secret = Annotated[
    SecretStr, BeforeValidator(_as_text), WithJsonSchema({"type": "string", "format": "password", "writeOnly": True})
]


class RedisConfig(BackendConfig):
    """``{type: redis, url: redis://localhost:6379/0, ttl: 6h}``. No secret in it shows in its repr or in an error."""

    model_config = ConfigDict(hide_input_in_errors=True)
    backend: ClassVar[str] = "backends.redis.backend:RedisBackend"

    type: Literal["redis"] = "redis"
    url: Secret
    """``redis://``, ``rediss://`` (TLS) or ``unix://``, with ``user:password@``, ``/db`` and, for Sentinel and Cluster,
    several ``host:port`` separated by commas."""
    mode: Literal["standalone", "sentinel", "cluster"] = "standalone"
    """What ``url`` names: the server itself, Sentinels that know it, or members of a cluster."""
    sentinel_service: str | None = Field(default=None, min_length=1)
    """The name under which the Sentinels know the server."""
    username: str | None = None
    password: Secret | None = None
    """Instead of those in ``url``, where special characters would have to be percent-encoded."""
    sentinel_username: str | None = None
    sentinel_password: Secret | None = None
    """For the Sentinels themselves, if they ask for one."""
    ttl_s: Seconds | None = Field(default=None, alias="ttl", ge=1, le=TTL_S_MAX)
    """A block is gone so long after its last store. None: it stays until the server evicts it."""
    prefix: str = Field(default="kvtiering", pattern=r"^[A-Za-z0-9._:-]{1,64}$")
    """What every key of ours begins with."""
    connections_max: int = Field(default=4, ge=1, le=64)
    """Most connections to one server, and threads that serve them. Stores take half of them at most."""
    timeout_s: Seconds = Field(default=5.0, alias="timeout", ge=0.01, le=3600)
    """A connection on which the server is silent for so long in the middle of a call is given up."""
    tls_ca_file: Path | None = None
    """Certificates to trust instead of the system's."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    """Our own certificate and key, where the server asks for them. The key may stand in the certificate's file."""
    tls_server_name: str | None = Field(default=None, min_length=1)
    """The name that the certificate must have, where that is not the address that is connected to."""

    @model_validator(mode="after")
    def _consistent(self) -> RedisConfig:
        try:
            server = self.server
        except UrlError as error:
            raise ValueError(f"url: {error}") from None
        if server.credentials.username and not server.credentials.password:
            raise ValueError("username: there is no password; set `password:` too, such as ${REDIS_PASSWORD}")
        if len(server.addresses) > 1 and self.mode == "standalone":
            raise ValueError("url: it names several servers; set `mode: sentinel` or `mode: cluster`")
        if self.mode == "cluster" and server.addresses[0].is_path:
            raise ValueError("url: the members of a cluster are reached by host and port; write redis://HOST:PORT")
        if (self.mode == "sentinel") != (self.sentinel_service is not None):
            raise ValueError("sentinel_service: it goes with `mode: sentinel`; set both or neither")
        if (self.sentinel_username or self.sentinel_password) and self.mode != "sentinel":
            raise ValueError("sentinel_password: it goes with `mode: sentinel`")
        if self.sentinel_username and not self.sentinel_password:
            raise ValueError("sentinel_username: there is no password; set `sentinel_password:` too")
        if not server.tls and (self.tls_ca_file or self.tls_cert_file or self.tls_key_file or self.tls_server_name):
            raise ValueError("url: the tls_ fields need TLS; write rediss://")
        if self.tls_key_file and not self.tls_cert_file:
            raise ValueError("tls_key_file: there is no certificate; set `tls_cert_file:` too")
        return self

    @property
    def server(self) -> Server:
        """What ``url``, ``username`` and ``password`` say together. Raises ``UrlError``."""
        return parse_url(
            self.url.get_secret_value(), self.username, self.password.get_secret_value() if self.password else None
        )
