"""The EC connector over Redis: one server, the master of a Sentinel service, or a cluster.

Redis 6.2 or later. With ACLs the user needs the keys `triptych:*` and the commands `exists getex getrange set pexpire
renamenx unlink watch unwatch multi exec`, with `max_bytes` also `eval zadd zscore zrem zrange zrangebyscore time`, in a
cluster also `cluster|slots`. Redis had better have a limit of its own and `maxmemory-policy allkeys-lru`: it then makes
room by itself, and with `noeviction` saves fail as soon as it is full. `max_bytes` is for a Redis that is shared with
others: it limits what items take, all writers together, if all of them and the readers set it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from connectors.ec.base import ECConnectorConfig, ECSide
from connectors.ec.redis_servers import ClusterServers, OneServer, RedisServers, SentinelServers
from connectors.ec.redis_store import RedisStore, RedisStoreSettings
from connectors.ec.redis_url import Login, parse_url, read_password, refuse_secrets, tls_context
from connectors.ec.store_connector import ECStoreConnector, StoreOptions
from connectors.options import EC_EXTRA
from core.errors import ConfigError

#: Of `chunk_bytes`, for the head of an item and for Redis's own: a value of a whole power of two would take a quarter
#: more memory than it holds, since the allocator rounds up.
_RESERVED_BYTES = 1024

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class RedisOptions(StoreOptions, frozen=True, kw_only=True):
    """The keys of the extra config. All instances of a deployment should agree on them."""

    url: str  # see redis_url.py
    username: _Text | None = None
    password_file: _Text | None = None
    password_env: _Text | None = None
    sentinel_username: _Text | None = None
    sentinel_password_file: _Text | None = None
    sentinel_password_env: _Text | None = None
    tls_ca_file: _Text | None = None  # None: the system's authorities
    tls_cert_file: _Text | None = None
    tls_key_file: _Text | None = None
    ttl_s: Annotated[float, msgspec.Meta(ge=1, le=366 * 86400)] = 86400.0  # of an item that is neither saved nor loaded
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)] | None = None
    chunk_bytes: Annotated[int, msgspec.Meta(ge=16 << 10, le=64 << 20)] = 512 << 10  # of one value in Redis, at most
    max_connections: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 32  # to each server


class ECRedisConnector(ECStoreConnector):
    """A Redis string for each item, several for a large one. A server that is down at the start is not an error."""

    options_type = RedisOptions

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        refuse_secrets(config.extra)
        super().__init__(config, side)

    def open_store(self, options: RedisOptions) -> RedisStore:
        if options.max_connections <= options.num_threads:
            reason = f"is to be more than num_threads={options.num_threads}"
            raise ConfigError(f"{EC_EXTRA} max_connections", options.max_connections, reason)
        settings = RedisStoreSettings(
            namespace=self.config.namespace,
            ttl_s=options.ttl_s,
            chunk_bytes=options.chunk_bytes - _RESERVED_BYTES,
            timeout_s=options.timeout_s,
            max_bytes=options.max_bytes,
        )
        return RedisStore(_open_servers(options), settings)


def _open_servers(options: RedisOptions) -> RedisServers:
    """Connects to nothing yet. Raises ConfigError."""
    location = parse_url(options.url)
    password = read_password("password_file", options.password_file, "password_env", options.password_env)
    for option, ours, given in (
        ("username", options.username, location.login.username),
        ("password_file" if options.password_file else "password_env", password and "***", location.login.password),
    ):
        if ours is not None and given is not None:
            raise ConfigError(f"{EC_EXTRA} {option}", ours, "is given in the URL too; one is enough")
    login = Login(options.username or location.login.username, password or location.login.password)
    if login.username and not login.password:
        raise ConfigError(f"{EC_EXTRA} username", login.username, "is given without a password")
    location = msgspec.structs.replace(location, login=login)
    sentinel_login = Login(
        options.sentinel_username,
        read_password(
            "sentinel_password_file",
            options.sentinel_password_file,
            "sentinel_password_env",
            options.sentinel_password_env,
        ),
    )
    if location.kind != "sentinel" and sentinel_login != Login():
        raise ConfigError(f"{EC_EXTRA} sentinel_username", options.sentinel_username, "is for +sentinel:// URLs only")
    if sentinel_login.username and not sentinel_login.password:
        raise ConfigError(f"{EC_EXTRA} sentinel_username", options.sentinel_username, "is given without a password")
    tls = None
    files = {name: getattr(options, name) for name in ("tls_ca_file", "tls_cert_file", "tls_key_file")}
    if location.tls:
        tls = tls_context(*files.values())
    for name, file in files.items():
        if file is not None and tls is None:
            raise ConfigError(f"{EC_EXTRA} {name}", file, "is given, but the URL does not say TLS: rediss://…")
    # Shorter than the limit of a whole load or save, so that a silent server is reported as what it is.
    common = (options.max_connections, options.timeout_s / 2, tls)
    if location.kind == "sentinel":
        return SentinelServers(location, sentinel_login, *common)
    if location.kind == "cluster":
        return ClusterServers(location, *common)
    return OneServer(location, *common)
