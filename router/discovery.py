"""Where workers come from: the operator's lists, DNS names, the admin call.

A list is what `--encoder` and its likes say. A name (`dns:NAME:PORT`, a headless Service of Kubernetes) stands for all
addresses that it resolves to and is resolved again all the time: new ones are added, those that are gone get no new
requests. The admin call adds and removes one at a time, and what it removed stays away, whoever else names it, until it
is added again. A worker belongs to the fleet for as long as any of them says so.

A name that cannot be resolved at the moment changes nothing. One that resolves to nothing does, once it has done so a
few times in a row: a resolver may say so for a moment. Whether a worker serves is for its health to say.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator

from core.server import address
from core.types import Stage
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.settings import DNS_PREFIX, RouterSettings
from router.workers import Worker

logger = logging.getLogger(__name__)

LIST = "list"
ADMIN = "admin"
_EMPTY_ANSWERS = 3
_RESOLVE_TIMEOUT_S = 30.0  # of a resolver that does not even give up by itself
_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

#: HOST:PORT of all that a name stands for now, empty where it stands for nothing. Raises OSError where nobody knows.
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(name: str, port: int) -> list[str]:
    """By the system's resolver, IPv4 where there is any: a worker with an address of each kind is still one worker."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def tell(found: list[str] | OSError) -> None:
        if answer.done():
            return
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        try:
            found: list[str] | OSError = _look_up(name, port)
        except OSError as error:
            found = error
        except UnicodeError as error:  # no name at all, to IDNA
            found = OSError(str(error))
        try:
            loop.call_soon_threadsafe(tell, found)
        except RuntimeError:
            return  # the loop has ended meanwhile

    # A thread of its own: one that hangs in the resolver must hold up neither other names nor the router's end.
    threading.Thread(target=ask, name=f"resolve-{name}", daemon=True).start()
    async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
        return await answer


def _look_up(name: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_NAME:
            return []
        raise
    hosts = {family: [str(where[0]) for kind, *_, where in found if kind is family] for family in _FAMILIES}
    return sorted({address(host, port) for host in hosts[socket.AF_INET] or hosts[socket.AF_INET6]})


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class Discovery:
    """Who belongs to a fleet, and why. Event loop only."""

    def __init__(
        self, settings: RouterSettings, fleet: Fleet, metrics: RouterMetrics, *, resolve: Resolve = resolve
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._resolve = resolve
        self._interval_s = settings.dns_interval_s
        self._sources: dict[tuple[Stage, str], list[str]] = {}
        self._removed: set[tuple[Stage, str]] = set()  # by the admin call
        self._names: list[tuple[Stage, str]] = []
        for stage, entries in settings.entries():
            for entry in entries:
                if entry.startswith(DNS_PREFIX):
                    self._names.append((stage, entry))
                else:
                    self._claim(stage, entry, LIST)

    async def run(self) -> None:
        """Resolve the names again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for stage, entry in self._names:
                group.create_task(self._follow(stage, entry))

    def add(self, stage: Stage, where: str) -> bool:
        """The admin call's. False where the worker was there."""
        self._removed.discard((stage, where))
        return self._claim(stage, where, ADMIN)

    def remove(self, stage: Stage, where: str) -> bool:
        """The admin call's. False where there is no such worker."""
        if not self._fleet.remove(stage, where):
            return False
        self._removed.add((stage, where))
        self._release(stage, where, ADMIN)
        return True

    def sources(self, worker: Worker) -> list[str]:
        return list(self._sources.get((worker.stage, worker.address), ()))

    def _claim(self, stage: Stage, where: str, source: str) -> bool:
        """True where the fleet has one more worker by it."""
        sources = self._sources.setdefault((stage, where), [])
        if source not in sources:
            sources.append(source)
        return (stage, where) not in self._removed and self._fleet.add(stage, where)

    def _release(self, stage: Stage, where: str, source: str) -> None:
        sources = self._sources.get((stage, where), [])
        if source in sources:
            sources.remove(source)
        if not sources:
            self._sources.pop((stage, where), None)
            self._removed.discard((stage, where))
            self._fleet.remove(stage, where)

    def _claimed(self, stage: Stage, source: str) -> Iterator[str]:
        for (other, where), sources in tuple(self._sources.items()):
            if other is stage and source in sources:
                yield where

    async def _follow(self, stage: Stage, entry: str) -> None:
        name, _, port = entry.removeprefix(DNS_PREFIX).rpartition(":")
        num_empty, is_failing = 0, False
        while True:
            try:
                found = await self._resolve(name, int(port))
            except (OSError, TimeoutError) as error:
                self._metrics.dns_failures.inc()
                if not is_failing:
                    logger.warning("%s %s cannot be resolved, its workers stay: %s", stage, entry, error)
                is_failing = True
            else:
                is_failing = False
                num_empty = 0 if found else num_empty + 1
                if found or num_empty >= _EMPTY_ANSWERS:
                    for gone in set(self._claimed(stage, entry)).difference(found):
                        self._release(stage, gone, entry)
                    for where in found:
                        self._claim(stage, where, entry)
            await asyncio.sleep(self._interval_s * random.uniform(0.8, 1.2))
