"""Between requests and the encoder buffer: which items a request may use now, and loads for those it may not yet."""

from __future__ import annotations

import time
from collections.abc import Iterable

from connectors.ec.base import EC_COUNTERS, ECConnectorBase, ECConnectorOutput, ECItem
from core.types import PlacedFeature, Span
from engine.encode_queue import EncodeQueue
from engine.encoder_cache_manager import EncoderCacheManager
from engine.request import Request
from engine.request_lists import RequestLists
from engine.room_claims import RoomClaims, Side
from engine.scheduler_output import ItemUse
from engine.settings import SchedulerSettings
from engine.stats import StatsCollector


class ItemGate:
    """Part of the scheduler. Step thread only.

    Where a request finds no room for the item that it needs next, requests that rank after it and do not run lose
    theirs; where the vision tower finds none for the next image, all that do not run do, but the first in rank.
    """

    def __init__(
        self,
        cache: EncoderCacheManager,
        connector: ECConnectorBase,
        encodes: EncodeQueue,
        stats: StatsCollector,
        settings: SchedulerSettings,
        lists: RequestLists,
    ) -> None:
        self._cache = cache
        self._connector = connector
        self._encodes = encodes
        self._stats = stats
        self._settings = settings
        self._lists = lists
        self._claims = RoomClaims()
        self._is_short = False  # a request lacks room: who ranks after it takes none in this step
        self._needs_tower = False  # a request waits for its image to be encoded: who ranks after it makes no claim
        self._load_started: dict[str, float] = {}  # item key -> time
        self._lost: dict[str, set[str]] = {}  # request id -> keys that could not be loaded while it waited for them

    @property
    def is_loading(self) -> bool:
        return bool(self._load_started)

    def add_sources(self, request: Request) -> None:
        """Tell the connector where a new request's items can be had. Also where their keys and values come from another
        engine: once they are lost here, the items are looked up."""
        for placed in request.features:
            if placed.feature.source:
                self._connector.add_item_source(placed.feature.key, placed.feature.source)

    def look_ahead(self, request: Request, num_computed: int) -> None:
        """Begin the look-ups of a new request, so that their answers are there when its turn comes. The first
        `num_computed` tokens have their KV already."""
        wanted = [
            placed.feature
            for placed in request.features
            if placed.end > num_computed and not self._cache.is_ready(placed.feature.key)
        ]
        if wanted:
            self._connector.ensure_cache_available([feature.key for feature in wanted])

    def begin_step(self) -> None:
        """`make_room_to_encode` follows for the images that are prepared, then `check` for the parked requests, by
        rank."""
        self._claims.begin_step()
        self._is_short = self._needs_tower = False

    def end_step(self) -> bool:
        """Whether the next step may give rows to those that this one refused."""
        return self._claims.end_step()

    def make_room_to_encode(self, num_rows: int) -> bool:
        """Whether the oldest image that is prepared may have so many rows now, and there is room for them."""
        claims = self._claims
        if claims.may_take(Side.ENCODER) and (
            self._cache.has_room(num_rows) or self._take_room(num_rows, self._lists.idle()[:-1])
        ):
            claims.take(Side.ENCODER)
            return True
        claims.claim(Side.ENCODER)
        return False

    def holds_off(self, request: Request) -> bool:
        """Whether a request must not begin, since it needs items and others have lacked room for long: else newcomers
        to an item that all of them share could keep it in the buffer for ever."""
        return self._claims.is_long and request.num_computed_tokens < request.items_end

    def fit(self, request: Request, num_tokens: int) -> tuple[int, list[ItemUse]]:
        """Cut a chunk off at its first item that is not in the buffer. The items within the chunk are held."""
        start = request.num_computed_tokens
        uses: list[ItemUse] = []
        for placed in request.features:
            if placed.end <= start:
                continue
            if placed.offset >= start + num_tokens:
                break
            key = placed.feature.key
            if not self._cache.is_ready(key):
                num_tokens = max(placed.offset - start, 0)
                break
            self._hold(request, key)
            first = max(placed.offset, start)
            last = min(placed.end, start + num_tokens)
            row = self._cache.where(key).start + first - placed.offset
            uses.append(ItemUse(request.request_id, first, last - first, row))
        return num_tokens, uses

    def is_patient(self, request: Request) -> bool:
        """Whether it is too new to spend a step on a part of it."""
        return not request.scheduled_s and time.monotonic() - request.added_s < self._settings.item_patience_s

    def check(self, request: Request) -> tuple[bool, list[str]]:
        """Look at the items that a parked request still needs, and order loads. Returns whether it can go on, and the
        keys that are missing for good; those only once every look-up has answered, so that all are named together."""
        needed = [placed for placed in request.features if placed.end > request.num_computed_tokens]
        undecided, missing = False, []
        self._let_go_but(request, needed[0].feature.key if needed else "")
        for i, placed in enumerate(needed):
            key = placed.feature.key
            if self._cache.is_ready(key):
                if i == 0:
                    self._hold(request, key)
            elif self._cache.is_filling(key):
                continue
            elif self._encodes.makes(key):
                self._needs_tower |= i == 0
            else:
                # One that could not be loaded is missing, whatever the store says: else a file that is listed but
                # cannot be read would be loaded for ever.
                lost = key in self._lost.get(request.request_id, ())
                present = False if lost else self._connector.has_cache_item(key)
                if present is None:
                    undecided = True
                elif present:
                    self._order_load(request, placed, first=i == 0)
                elif key not in missing:
                    missing.append(key)
        if missing:
            return False, [] if undecided else missing
        ready = [self._cache.is_ready(placed.feature.key) for placed in needed]
        if self.is_patient(request):
            return all(ready), []
        return not needed or ready[0] or needed[0].offset > request.num_computed_tokens, []

    def let_go_computed(self, request: Request) -> None:
        """Let go of the items that all of the request's remaining tokens are behind."""
        if request.held_items:
            needed = {p.feature.key for p in request.features if p.end > request.num_executed_tokens}
            for key in request.held_items - needed:
                self._cache.let_go(key, request.request_id)
            request.held_items &= needed

    def _let_go_but(self, request: Request, key: str) -> None:
        """Let go of what it holds besides `key` and what steps under way read. A parked request that kept an item for
        later, or for a second time, would wait for itself where the buffer has no room for both."""
        if not request.held_items.difference((key,)):
            return
        begin, end = request.num_executed_tokens, request.num_computed_tokens
        # Without a step under way nothing is read, also where what is computed ends inside an item.
        read = {p.feature.key for p in request.features if begin < end and p.end > begin and p.offset < end}
        for other in request.held_items - read - {key}:
            self._cache.let_go(other, request.request_id)
            request.held_items.discard(other)

    def let_go(self, request: Request) -> None:
        """Let go of everything that it holds."""
        for key in request.held_items:
            self._cache.let_go(key, request.request_id)
        request.held_items.clear()

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.let_go(request)
        self._lost.pop(request.request_id, None)
        self._connector.request_finished(request.request_id)

    def take_output(self, made: ECConnectorOutput, parked: Iterable[Request]) -> None:
        """What the connector's worker side reported; saves are the encode queue's."""
        self._connector.update_connector_output(made)
        self._stats.count("ec_bytes_total", made.bytes_loaded + made.bytes_saved)
        for counters in (made.counters, self._connector.take_counters()):
            for name, by in counters.items():
                if name in EC_COUNTERS:  # else a stranger's connector counts what this version does not know
                    self._stats.count(f"ec_store_{name}_total", by)
        for seconds in made.seconds_loading:
            self._stats.observe("ec_load_seconds", seconds)
        for seconds in made.seconds_saving:
            self._stats.observe("ec_save_seconds", seconds)
        for key in (*made.finished_loading, *made.failed_loading):
            started_s = self._load_started.pop(key, None)
            if started_s is None:
                continue  # a connector that reports what nobody ordered, or twice, must not end the engine
            failed = key in made.failed_loading
            if failed:
                self._stats.count("ec_load_failures_total")
                self._cache.drop(key)
            else:
                self._cache.set_ready(key)
            span = Span("ec_load", started_s, time.time(), self._settings.where, "failed" if failed else "")
            for request in parked:
                if any(placed.feature.key == key for placed in request.features):
                    request.spans.append(span)
                    if failed:
                        self._lost.setdefault(request.request_id, set()).add(key)

    def _hold(self, request: Request, key: str) -> None:
        self._cache.hold(key, request.request_id)
        request.held_items.add(key)

    def _order_load(self, request: Request, placed: PlacedFeature, *, first: bool) -> None:
        feature = placed.feature
        if self._is_short:
            return
        may_take = self._claims.may_take(Side.REQUESTS)
        if first and not (may_take and self._make_room(request, feature.num_embeds)):
            self._is_short = True
            if not self._needs_tower:
                self._claims.claim(Side.REQUESTS)
            return
        where = self._cache.allocate(feature.key, feature.num_embeds) if may_take else None
        if where is None:
            return  # tried again in the next step
        if first:
            self._claims.take(Side.REQUESTS)
            self._hold(request, feature.key)
        self._connector.update_state_after_alloc(ECItem(feature.key, feature.num_embeds), where)
        self._load_started[feature.key] = time.time()
        self._stats.count("ec_hits_total")

    def _make_room(self, request: Request, num_rows: int) -> bool:
        """Whether an item of so many rows can be allocated. Who ranks after the request may lose theirs."""
        return self._cache.has_room(num_rows) or self._take_room(num_rows, self._lists.idle_after(request))

    def _take_room(self, num_rows: int, others: Iterable[Request]) -> bool:
        """Whether an item can be allocated once `others` have let go of theirs, one after the other."""
        for other in others:
            if other.held_items:
                self._let_go_but(other, "")
                if self._cache.has_room(num_rows):
                    return True
        return False
