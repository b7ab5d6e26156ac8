"""Ports for programs that are to be started on this machine with a port that is known beforehand.

A port that the system itself hands out (`bind` to port 0) may be handed out again, to any program that asks or connects
somewhere, before the one that it was meant for has bound it. Those below that range go to nobody by chance.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 20_000, 65_535
#: Below the range there is to be room for many programs that choose at the same time.
_MIN_ROOM = 2_000


def free_ports(count: int, host: str = "127.0.0.1", *, beside: int = 0) -> list[int]:
    """TCP ports of `host` that are free now, no two alike; so is the one `beside` above each, if that is not 0. Nothing
    holds them: whoever wants one must bind it soon. Raises OSError where there are not so many."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for candidate in _candidates():
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                port = _hold(held, host, candidate)
                if beside:
                    _hold(held, host, port + beside)
                ports.append(port)
        if len(ports) < count:
            raise OSError(f"{count} free ports of {host} are not to be had")
        return ports


def _candidates() -> Iterator[int]:
    """In an order that no other process has, whatever seed its dice were given. 0: the system is to say."""
    lowest_handed_out = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        lowest_handed_out = int(_HANDED_OUT.read_text().split()[0])
    if lowest_handed_out - _LOWEST >= _MIN_ROOM:
        places = range(_LOWEST, lowest_handed_out)
        yield from random.SystemRandom().sample(places, len(places))
    for _ in range(1000):
        yield 0


def _hold(held: contextlib.ExitStack, host: str, port: int) -> int:
    if port > _HIGHEST:
        raise OSError(f"{port} is no port")
    probe = held.enter_context(socket.socket())
    probe.bind((host, port))
    bound: int = probe.getsockname()[1]
    return bound
