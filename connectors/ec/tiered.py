"""The EC connector over others, fastest first: shared memory before Redis, or an encoder's memory behind a store.

    {"tiers": [{"connector": NAME, "module_path": MODULE, "extra": {…}, "write": "through" | "back" | "fallback"}, …]}

*Look-ups*: there, as soon as one tier says so, except that a faster one that has not answered yet is waited for, a few
milliseconds; absent, once all have said so. *Loads* go to the first tier that has it, then to the next, until one
succeeds. What came from a slower tier is copied into the faster ones, unless it came over a way
round ("fallback") or `copy_bytes` is used up; the copy is made before the load is reported, the saves are not waited
for.

*Saves*, by `write` of each tier. "through": at once; an item counts as saved when all of these have ended and one of
them has it. "back": from a copy, after that; where `copy_bytes` is used up the save waits for this tier too.
"fallback": only if no tier before it took the item: a way round a store that is down. If none of the "through" ones
took it, the others are tried one after the other, "back" ones too. An item that a consumer reported missing is saved to
all of them.

A tier that failed while another one made it good counts as one of `tier_failures`. A tier's own limits bound its
orders; an order's bound is their sum. How much a tier keeps is an option of that tier.

What a tier sees that a connector alone does not: an order may be given to its scheduler side and never to its worker
side, and is then told as failed; orders may come a step or more later; what it saves may be in host memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
import torch

from connectors.device_copy import DeviceCopies
from connectors.ec.base import (
    MAX_SOURCE_CHARS,
    BufferSlice,
    ECConnectorBase,
    ECConnectorConfig,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECItem,
    ECLoad,
    ECSide,
)
from connectors.ec.tiered_copies import HostCopies
from connectors.ec.tiered_options import TieredOptions, Write, labels_of
from connectors.ec.tiered_tier import Tier
from connectors.ec.tiered_worker import TieredWorker, TierReports
from connectors.factory import make_ec_connector
from connectors.options import EC_EXTRA, parse_options
from core.config import ConnectorConfig
from core.errors import ConfigError
from core.struct import field
from core.types import ECRole

log = logging.getLogger(__name__)

#: Of the two seconds that `close` has: all of it, and the part for what is still to be written back.
_CLOSE_S, _FLUSH_S = 1.9, 1.0
#: How long a slower tier's "yes" waits for what a faster one says.
_PATIENCE_S = 0.02
_MAX_UNDECIDED = 10_000


class ECTieredMetadata(ECConnectorMetadata, array_like=True):
    """`loads` say where; the tiers' own orders are beside them."""

    candidates: list[list[tuple[int, ECConnectorMetadata]]] = field(default_factory=list)  # of each load, best first
    steps: list[tuple[int, ECConnectorMetadata]] = field(default_factory=list)  # whatever else the tiers order
    distrusted: list[str] = field(default_factory=list)


class ECTieredConnector(ECConnectorBase):
    """Worker's methods: any one thread at a time."""

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        super().__init__(config, side)
        options = self._options = parse_options(TieredOptions, config.extra, EC_EXTRA)
        if options.tiers[0].write is not Write.THROUGH:
            reason = f"the first tier is written to first, so its write is {Write.THROUGH}"
            raise ConfigError(f"{EC_EXTRA} tiers[0] write", options.tiers[0].write.value, reason)
        self._rung = threading.Event()
        self._labels = labels_of(options.tiers)
        self._tiers = self._make_tiers()
        self._orders: list[list[tuple[int, ECConnectorMetadata]]] = []
        self._steps: list[tuple[int, ECConnectorMetadata]] = []
        self._undecided_since_s: OrderedDict[str, float] = OrderedDict()  # monotonic
        self._distrusted: list[str] = []
        self._worker: TieredWorker | None = None
        self._closed = False

    # ---- scheduler side ----

    def has_cache_item(self, key: str) -> bool | None:
        found, undecided = False, False
        for tier in self._tiers:
            answer = tier.has_cache_item(key)
            if answer:
                found = True
                break
            undecided = undecided or answer is None
        if undecided and not (found and self._waited_long_for(key)):
            return None
        self._undecided_since_s.pop(key, None)
        return found

    def _waited_long_for(self, key: str) -> bool:
        now_s = time.monotonic()
        since_s = self._undecided_since_s.setdefault(key, now_s)
        if len(self._undecided_since_s) > _MAX_UNDECIDED:
            self._undecided_since_s.popitem(last=False)
        return now_s - since_s >= _PATIENCE_S

    def ensure_cache_available(self, keys: Sequence[str]) -> bool:
        for tier in self._tiers:
            if tier.ensure_cache_available(keys):
                return True
        answers = [self.has_cache_item(key) for key in keys]  # of each, not only up to the first that is absent
        return all(answers)

    def item_source(self, key: str) -> str:
        sources: dict[str, str] = {}
        text = ""
        for label, tier in zip(self._labels, self._tiers, strict=True):
            if source := tier.item_source(key):
                longer = json.dumps({**sources, label: source}, separators=(",", ":"))
                if len(longer) > MAX_SOURCE_CHARS:
                    log.warning("%s's source of an item does not fit beside those of the other tiers", label)
                    continue
                sources[label], text = source, longer
        return text

    def add_item_source(self, key: str, source: str) -> None:
        try:
            sources = msgspec.json.decode(source[: MAX_SOURCE_CHARS + 1], type=dict[str, str])
        except (msgspec.MsgspecError, UnicodeError):
            log.warning("an item source is not one of tiers: %.100r", source)
            return
        for label, tier in zip(self._labels, self._tiers, strict=True):
            if label in sources:
                tier.add_item_source(key, sources[label])

    def set_handshake(self, handshake: str) -> None:
        if not handshake:
            return
        for tier, theirs in zip(self._tiers, msgspec.json.decode(handshake, type=list[str]), strict=True):
            tier.set_handshake(theirs)

    def update_state_after_alloc(self, item: ECItem, where: BufferSlice) -> None:
        super().update_state_after_alloc(item, where)
        found, undecided = len(self._tiers), []
        for i, tier in enumerate(self._tiers):
            answer = tier.has_cache_item(item.key)
            if answer:
                found = i
                break
            if answer is None:
                undecided.append(i)
        # Tiers behind the first that has it are not asked: that would be a look-up in each for every load. They are
        # tried if it fails, and an order for what is absent fails at once. So are those that have said nothing yet.
        candidates = []
        for i in dict.fromkeys((*range(found, len(self._tiers)), *undecided)):
            tier = self._tiers[i]
            self._add_step(i, tier.build_connector_meta())
            tier.update_state_after_alloc(item, where)
            candidates.append((i, tier.build_connector_meta()))
        self._orders.append(candidates)

    def build_connector_meta(self) -> ECTieredMetadata:
        for i, tier in enumerate(self._tiers):
            self._add_step(i, tier.build_connector_meta())
        metadata = ECTieredMetadata(super().build_connector_meta().loads, self._orders, self._steps, self._distrusted)
        self._orders, self._steps, self._distrusted = [], [], []
        return metadata

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        if output.worker_metadata:
            for i, report in msgspec.msgpack.decode(output.worker_metadata, type=TierReports):
                self._tiers[i].update_connector_output(report)
            return
        # Not a report of ours: the engine tells what a consumer said. What the first tier took does not help him.
        if self.config.role.produces:
            self._distrusted.extend(output.failed_loading)
        for tier in self._tiers:
            tier.update_connector_output(output)

    def request_finished(self, request_id: str) -> None:
        for tier in self._tiers:
            tier.request_finished(request_id)

    def _add_step(self, i: int, metadata: ECConnectorMetadata) -> None:
        # Most tiers order nothing but loads, and those have been taken out.
        if metadata.loads or type(metadata) is not ECConnectorMetadata:
            self._steps.append((i, metadata))

    # ---- worker side ----

    def register_caches(self, buffer: torch.Tensor) -> None:
        super().register_caches(buffer)
        for tier in self._tiers:
            tier.register_caches(buffer)
        copies = DeviceCopies(buffer.device)
        self._host = HostCopies(self._options.copy_bytes, copies, self._wake)
        tiers = [Tier(tier, label) for tier, label in zip(self._tiers, self._labels, strict=True)]
        writes = [tier.write for tier in self._options.tiers]
        self._worker = TieredWorker(tiers, writes, self._options.promote, copies, self._host)
        self._tier_workers = tiers

    def handshake(self) -> str:
        return json.dumps([tier.handshake() for tier in self._tiers])

    def start_load_caches(self) -> None:
        metadata = self._metadata
        if self._worker is None or not isinstance(metadata, ECTieredMetadata):
            return
        self._worker.distrust(metadata.distrusted)
        for i, theirs in metadata.steps:
            self._tier_workers[i].bind_and_start(theirs)
        for load, candidates in zip(metadata.loads, metadata.candidates, strict=True):
            self._worker.load(load.key, self._slice_of(load), candidates)

    def save_caches(self, key: str, embeds: torch.Tensor) -> None:
        if self._worker is not None:
            self._worker.save(key, embeds)

    def get_finished(self) -> ECConnectorOutput:
        if self._worker is None:
            return ECConnectorOutput()
        self._worker.collect()
        return self._worker.take_output()

    def num_leased(self) -> int:
        return sum(tier.num_leased() for tier in self._tiers)

    def _slice_of(self, load: ECLoad) -> torch.Tensor:
        return self._buffer[load.where.start : load.where.start + load.where.num_rows]  # [num_embeds, width]

    # ---- both ----

    def take_counters(self) -> Mapping[str, int]:
        total: dict[str, int] = {}
        for tier in self._tiers:
            for name, count in tier.take_counters().items():
                total[name] = total.get(name, 0) + count
        if self._worker is not None:
            total["tier_failures"] = total.get("tier_failures", 0) + self._worker.take_tier_failures()
        return total

    def close(self) -> None:
        """What is still to be written back is written as far as the time allows."""
        if self._closed:
            return
        self._closed = True
        now_s = time.monotonic()
        deadline_s = now_s + _CLOSE_S
        if self._worker is not None:
            self._worker.flush(self._rung, now_s + _FLUSH_S)
            self._host.close(0.1)
        _close_all(self._tiers, deadline_s)

    def _wake(self) -> None:
        self._rung.set()
        self.config.notify()

    def _make_tiers(self) -> list[ECConnectorBase]:
        tiers: list[ECConnectorBase] = []
        try:
            for i in range(len(self._options.tiers)):
                tiers.append(self._make_tier(i))
        except BaseException:
            _close_all(tiers, time.monotonic() + _CLOSE_S)
            raise
        return tiers

    def _make_tier(self, i: int) -> ECConnectorBase:
        """Raises ConfigError that names the tier."""
        options = self._options.tiers[i]
        config = msgspec.structs.replace(self.config, role=self._role_of(i), extra=options.extra, notify=self._wake)
        where = f"{EC_EXTRA} tiers[{i}]"
        if options.connector == type(self).__name__:
            raise ConfigError(where, options.connector, "tiers within tiers are not supported")
        try:
            tier = make_ec_connector(
                ConnectorConfig(options.connector, options.module_path, options.extra), config, self.side
            )
        except ConfigError as error:
            raise ConfigError(f"{where} ({options.connector}) {error.name}", error.value, error.reason) from error
        if isinstance(tier, ECTieredConnector):
            with contextlib.suppress(Exception):
                tier.close()
            raise ConfigError(where, options.connector, "tiers within tiers are not supported")
        return tier

    def _role_of(self, i: int) -> ECRole:
        """A consumer writes too where it promotes, so such a tier has to do what a producer's does."""
        slower = self._options.tiers[i + 1 :]
        promotes = self._options.promote and any(tier.write is not Write.FALLBACK for tier in slower)
        if self.config.role is ECRole.CONSUMER and promotes and self._options.tiers[i].write is not Write.FALLBACK:
            return ECRole.BOTH
        return self.config.role


def _close_all(tiers: Sequence[ECConnectorBase], deadline_s: float) -> None:
    """Each has two seconds of its own, so all at once."""

    def close(tier: ECConnectorBase) -> None:
        try:
            tier.close()
        except Exception:  # a stranger's
            log.exception("%s could not be closed", type(tier).__name__)

    threads = [threading.Thread(target=close, args=(tier,), name="ec-tier-close", daemon=True) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
