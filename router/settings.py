"""What the router is told at its start, checked once."""

from __future__ import annotations

import msgspec

from core.errors import ConfigError

#: Largest image file that is accepted.
MAX_IMAGE_BYTES = 32 * 1024 * 1024


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `python -m router serve`."""

    encoders: tuple[str, ...]
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 50060
    http_port: int = 8000
    request_timeout_s: float = 300.0  # where the client set no deadline
    max_inflight: int = 1024
    max_image_bytes_held: int = 4 * 1024**3  # of all requests in flight together
    drain_timeout_s: float = 60.0


def parse_addresses(option: str, value: str) -> tuple[str, ...]:
    """`HOST:PORT[,HOST:PORT…]` as a tuple, in order. Raises ConfigError that names `option` and the value."""
    addresses = tuple(part.strip() for part in value.split(","))
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(option, value, f"{address!r} is not HOST:PORT")
    if len(set(addresses)) != len(addresses):
        raise ConfigError(option, value, "the same worker stands there twice")
    return addresses
