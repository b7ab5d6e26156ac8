"""What the router is told at its start, checked once."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from core.errors import ConfigError
from core.types import Stage

#: Largest image file that is accepted.
MAX_IMAGE_BYTES = 32 * 1024 * 1024
#: Begins an entry of `--encoder` and its likes that is a name to be resolved.
DNS_PREFIX = "dns:"
#: The whole value of `--encoder` and its likes where workers come by the admin call only.
NO_WORKERS = "none"


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `python -m router serve`. Workers are `HOST:PORT`, or `dns:NAME:PORT` for all that it resolves
    to."""

    encoders: tuple[str, ...]
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 50060
    http_port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None  # None: no admin service
    processes: int = 1
    request_timeout_s: float = 300.0  # where the client set no deadline
    max_inflight: int = 1024
    max_image_bytes_held: int = 4 * 1024**3  # of all requests in flight together
    max_work: int = 0  # predicted tokens under way at a time; 0: twice what the decode workers' KV caches hold
    max_queue: int = 1024  # requests that wait for their turn
    max_queue_s: float = 30.0  # that one may be predicted to wait
    trust_tenant_header: bool = False
    drain_timeout_s: float = 60.0
    worker_timeout_s: float = 10.0  # a worker that answers nothing for so long is lost
    stall_timeout_s: float = 30.0  # a call without a word for so long goes to another worker, where there is one
    client_timeout_s: float = 30.0  # a client that takes nothing of its answer for so long is given up
    dns_interval_s: float = 5.0
    encode_policy: str = "consistent-hash"
    prefill_policy: str = "expected-cost"
    decode_policy: str = "free-kv"
    log_level: str = "INFO"
    log_format: str = "text"

    def entries(self) -> Iterator[tuple[Stage, tuple[str, ...]]]:
        """Stages and what was given for each."""
        yield Stage.ENCODER, self.encoders
        yield Stage.PREFILL, self.prefills
        yield Stage.DECODE, self.decodes

    def policies(self) -> Iterator[tuple[str, str]]:
        """Options and what was given for each, in the order of the stages."""
        yield "--encode-policy", self.encode_policy
        yield "--prefill-policy", self.prefill_policy
        yield "--decode-policy", self.decode_policy

    @property
    def is_open(self) -> bool:
        """Whether there may be other workers than those that are listed one by one."""
        return self.admin_port is not None or any(
            entry.startswith(DNS_PREFIX) for _, entries in self.entries() for entry in entries
        )


def parse_workers(option: str, value: str, *, admin: bool) -> tuple[str, ...]:
    """`ENTRY[,ENTRY…]` as a tuple, in order; an entry is HOST:PORT or dns:NAME:PORT. `none` is the empty tuple where
    workers may come by the admin call (`admin`).

    Raises ConfigError that names `option` and the value.
    """
    if value.strip() == NO_WORKERS:
        if not admin:
            raise ConfigError(option, value, "no worker could ever come: that needs --admin-port")
        return ()
    entries = tuple(part.strip() for part in value.split(","))
    for entry in entries:
        if not is_address(entry.removeprefix(DNS_PREFIX)):
            raise ConfigError(option, value, f"{entry!r} is neither HOST:PORT nor dns:NAME:PORT")
    if len(set(entries)) != len(entries):
        raise ConfigError(option, value, "the same worker stands there twice")
    return entries


def is_address(text: str) -> bool:
    """Whether it reads HOST:PORT."""
    host, colon, port = text.rpartition(":")
    return bool(
        colon
        and 0 < len(host) <= 255
        and host.isprintable()
        and not set(host) & set(" /,@")
        and (":" not in host or (host[0] == "[" and host[-1] == "]"))
        and port.isascii()
        and port.isdigit()
        and 0 < int(port) < 65536
    )
