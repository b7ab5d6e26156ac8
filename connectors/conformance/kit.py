"""What a check is given: engines, processes, the harness, and randomness with a seed."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from connectors.conformance.channel import Channel, ChannelError
from connectors.conformance.ends import DTYPES, FailedError, RefusedError, digest, expect, payload, same_bits
from connectors.conformance.engine import Engine, Loaded, Setup
from connectors.conformance.engine_process import EngineProcess, Piece
from connectors.conformance.factory import ConnectorFactory
from connectors.conformance.harness import Damage, NotTriedError, StoredItem
from core.types import ECRole

Made = TypeVar("Made")

#: The largest item that there is a check for.
MAX_ITEM_MIB = 256
_HARNESS_S = 60.0
_WIDTH = 24


class Settings(msgspec.Struct, frozen=True):
    """Of a whole run. `limit_s`: within which the connector is to report an order where its config does not say.
    `max_item_mib`: what is larger is not tried."""

    thorough: bool = False
    limit_s: float = 10.0
    seed: int = 0
    max_item_mib: int = MAX_ITEM_MIB


class Kit:
    """One check's. Everything it makes is closed by `close`; what it makes in a namespace is this check's alone."""

    def __init__(self, name: str, factory: ConnectorFactory, settings: Settings, channel: Channel, path: str) -> None:
        self.settings = settings
        self.namespace = digest(settings.seed, name)
        self.random = random.Random(f"{settings.seed} {name}")
        self.factory = factory
        self.sources: dict[str, str] = {}
        self._channel = channel
        self.path = path  # of the fork server
        self._engines: list[Engine | EngineProcess] = []
        self._extra: Mapping[str, Any] | None = None
        self._base_dtype: str | None = None

    def key(self, *words: object) -> str:
        return digest(self.namespace, *words)

    # ---- engines ----

    def extra(self) -> dict[str, Any]:
        """Extra config for the store as it is."""
        if self._extra is None:
            self._extra = self._ask("extra")
        return dict(self._extra)

    def time_limit(self, seconds: float) -> dict[str, Any]:
        """Extra config under which orders end within `seconds`. Where nobody knows how: without, and as long as it
        takes."""
        try:
            return {**self._ask("time_limit", seconds), _LIMIT: seconds}
        except NotTriedError:
            return {}

    def time_limit_or_nothing(self, seconds: float) -> dict[str, Any]:
        """As `time_limit`, for connectors that are made without `engine`."""
        extra = self.time_limit(seconds)
        extra.pop(_LIMIT, None)
        return extra

    def capacity(self, num_bytes: int) -> dict[str, Any]:
        return dict(self._ask("capacity", num_bytes))

    def ttl(self, seconds: float) -> dict[str, Any]:
        return dict(self._ask("ttl", seconds))

    def engine(self, role: ECRole = ECRole.BOTH, **given: Any) -> Engine:
        """An engine in this process. `given`: fields of Setup; `extra` is added to that of the store."""
        engine = self._make(lambda setup: Engine(self.factory, setup, DTYPES[setup.dtype], self.sources), role, given)
        self._engines.append(engine)
        return engine

    def process(self, role: ECRole = ECRole.BOTH, **given: Any) -> EngineProcess:
        """One in a process of its own."""
        made = self._make(lambda setup: EngineProcess(self.path, self.factory, setup, self.sources), role, given)
        self._engines.append(made)
        return made

    def _make(self, make: Callable[[Setup], Made], role: ECRole, given: dict[str, Any]) -> Made:
        """Where the check does not name a dtype, one that the connector takes."""
        extra = {**self.extra(), **given.pop("extra", {})}
        limit_s = extra.pop(_LIMIT, extra.get("timeout_s"))
        if not isinstance(limit_s, int | float):
            limit_s = self.settings.limit_s
        wanted = {"namespace": self.namespace, "width": _WIDTH, "num_rows": 256, "limit_s": limit_s, **given}
        if "dtype" in given:
            return make(Setup(role=role, extra=extra, **wanted))
        refusals = []
        for dtype in [self._base_dtype] if self._base_dtype else ["float32", "bfloat16", "float16"]:
            try:
                made = make(Setup(role=role, extra=extra, dtype=dtype, **wanted))
            except RefusedError as error:
                refusals.append(str(error))
            else:
                self._base_dtype = dtype
                return made
        raise FailedError(f"does not start: {refusals[0]}")

    def close(self, engine: Engine | EngineProcess) -> None:
        """Close one now."""
        self._engines.remove(engine)
        engine.close()

    def kill(self, process: EngineProcess) -> None:
        """SIGKILL one now."""
        self._engines.remove(process)
        process.kill()

    def close_all(self) -> None:
        """The end of a check that went well: everything closed as an engine closes it."""
        while self._engines:
            engine = self._engines.pop()
            if isinstance(engine, Engine):
                engine.settle(0.0)
            engine.close()

    # ---- items ----

    def item(self, engine: Engine, key: str, rows: int = 5, variant: str = "") -> torch.Tensor:
        """The bits that `Piece(key, rows, variant)` has in this engine."""
        return payload(rows, engine.setup.width, engine.buffer.dtype, key, variant)

    def save(self, engine: Engine, key: str, rows: int = 5, variant: str = "") -> torch.Tensor:
        """Save the item, which must go well; its bits."""
        embeds = self.item(engine, key, rows, variant)
        reason = engine.save(key, embeds)
        expect(not reason, f"a save failed: {reason}")
        return embeds

    def must_fetch(self, engine: Engine, key: str, embeds: torch.Tensor) -> None:
        """The item is found, loaded, and is `embeds`."""
        expect(engine.look_up(key), "has_cache_item says that an item is absent which was saved")
        loaded = engine.load(key, embeds.shape[0])
        expect(loaded.embeds is not None, f"an item that was saved cannot be loaded: {loaded.reason}")
        self.must_be_right(loaded, embeds)

    def may_fetch(self, engine: Engine, key: str, embeds: torch.Tensor) -> Loaded:
        """The item is found or not, loaded or not; if it is loaded it is `embeds`."""
        loaded = engine.fetch(key, embeds.shape[0])
        self.must_be_right(loaded, embeds)
        return loaded

    def must_be_right(self, loaded: Loaded, *allowed: torch.Tensor) -> None:
        """Not loaded, or one of `allowed` bit for bit."""
        if loaded.embeds is not None:
            right = any(same_bits(loaded.embeds, embeds) for embeds in allowed)
            expect(right, "a load was reported as finished and the tensor is wrong")

    def eventually(self, done: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
        """For what nothing tells of: asked anew every few hundredths of a second. Fails with `what`."""
        deadline_s = time.monotonic() + limit_s
        while not done():
            expect(time.monotonic() < deadline_s, f"{what}, {limit_s:g} s later still")
            time.sleep(0.02)

    def piece(self, n: object, rows: int = 5) -> Piece:
        return Piece(self.key(n), rows)

    # ---- the harness ----

    def damage(self, key: str, how: Damage, *, other: StoredItem | None = None) -> None:
        self._ask("damage", StoredItem(self.namespace, key), how, other)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The store cannot be reached."""
        self._ask("stop")
        yield
        self._ask("start")

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """The store has no room."""
        self._ask("fill")
        yield
        self._ask("free")

    @contextlib.contextmanager
    def slowed(self, keys: Sequence[str]) -> Iterator[None]:
        """The store hangs."""
        self._ask("slow", [StoredItem(self.namespace, key) for key in keys])
        yield
        self._ask("unslow")

    def left_overs(self) -> list[str]:
        return list(self._ask("left_overs"))

    def num_listings(self) -> int:
        return int(self._ask("num_listings"))

    def _ask(self, call: str, *args: Any) -> Any:
        self._channel.send(harness=call, args=args)
        try:
            answer = self._channel.receive(_HARNESS_S)
        except ChannelError as error:
            raise NotTriedError(f"the harness did not answer `{call}`: {error}") from None
        if "not_tried" in answer:
            raise NotTriedError(answer["not_tried"])
        return answer["value"]


#: In `extra` between `time_limit` and `engine`, and taken out there.
_LIMIT = "(limit of the kit)"
