"""The worker side of ECTieredConnector: loads that go on to the next tier, saves into several, copies between them.

Everything happens on the worker's thread, within its calls; the tiers and `HostCopies` have the threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import msgspec
import torch

from connectors.device_copy import DeviceCopies
from connectors.ec.base import ECConnectorMetadata, ECConnectorOutput
from connectors.ec.tiered_copies import HostCopies, HostCopy
from connectors.ec.tiered_options import Write
from connectors.ec.tiered_tier import Tier

TierReports = list[tuple[int, ECConnectorOutput]]

_MAX_DISTRUSTED = 10_000


class _Load:
    __slots__ = ("candidates", "failures", "key", "slice_", "started_s")

    def __init__(self, key: str, slice_: torch.Tensor, candidates: Sequence[tuple[int, ECConnectorMetadata]]) -> None:
        self.key = key
        self.slice_ = slice_  # [num_embeds, width]
        self.candidates = list(candidates)  # still to be tried
        self.failures: list[str] = []
        self.started_s = time.monotonic()


class _Save:
    __slots__ = ("copy", "embeds", "failures", "key", "num_pending", "others", "saved", "started_s")

    def __init__(self, key: str, embeds: torch.Tensor) -> None:
        self.key = key
        self.embeds = embeds
        self.num_pending = 0
        self.saved: list[int] = []  # tiers that have it
        self.others: list[int] = []  # tiers to be tried, in this order, if none of the first has it
        self.copy: HostCopy | None = None  # for the tiers that are written back
        self.failures: list[str] = []
        self.started_s = time.monotonic()


class TieredWorker:
    """`writes` says for each tier when it is written to; `notify` is the engine's. The worker's thread only."""

    def __init__(
        self, tiers: Sequence[Tier], writes: Sequence[Write], promote: bool, copies: DeviceCopies, host: HostCopies
    ) -> None:
        self._tiers = tiers
        self._writes = writes
        self._promote = promote
        self._copies = copies
        self._host = host
        self._copying: dict[HostCopy, _Load | _Save] = {}  # before they can be reported
        self._promotions: dict[HostCopy, list[int]] = {}
        self._num_background = 0  # saves that nobody waits for
        self._distrusted: dict[str, None] = {}
        self._output = ECConnectorOutput()
        self._reports: TierReports = []
        self._num_orders = 0  # not reported yet
        self._tier_failures = 0

    def load(self, key: str, slice_: torch.Tensor, candidates: Sequence[tuple[int, ECConnectorMetadata]]) -> None:
        """Load from the first of the candidates that can; each comes with its tier's orders for it."""
        self._num_orders += 1
        self._try_next(_Load(key, slice_, candidates))

    def distrust(self, keys: Sequence[str]) -> None:
        """Somebody could not load these though they were saved: their next saves go to every tier."""
        self._distrusted.update(dict.fromkeys(keys))
        while len(self._distrusted) > _MAX_DISTRUSTED:
            del self._distrusted[next(iter(self._distrusted))]

    def save(self, key: str, embeds: torch.Tensor) -> None:
        """Save into the tiers that this one's `write` and what happens ask for."""
        self._num_orders += 1
        save = _Save(key, embeds)
        everywhere = key in self._distrusted
        self._distrusted.pop(key, None)
        first = [i for i, write in enumerate(self._writes) if everywhere or write is Write.THROUGH]
        save.others = [i for i in range(len(self._tiers)) if i not in first]
        backs = [i for i in save.others if self._writes[i] is Write.BACK]
        if backs:
            save.copy = self._host.begin(embeds, self._copies.mark())
            if save.copy is not None:
                self._copying[save.copy] = save
            else:  # no room to remember it: then it is written now, and whoever saves waits, which slows him down
                first += backs
                save.others = [i for i in save.others if i not in backs]
        self._save_to(save, first)

    def collect(self) -> None:
        """See what the tiers and the copies did, and go on from there."""
        for i, tier in enumerate(self._tiers):
            output = tier.collect()
            if output:
                self._reports.append((i, output))
        for copy in self._host.take_done():
            self._take_copy(copy)

    def take_output(self) -> ECConnectorOutput:
        """What is to be reported since the last call, and the tiers' own reports for their scheduler sides."""
        output, self._output = self._output, ECConnectorOutput()
        self._num_orders -= len(output.finished_loading) + len(output.finished_saving)
        self._num_orders -= len(output.failed_loading) + len(output.failed_saving)
        # What one tier did of an order that another one goes on with is told together with how it ended.
        if self._reports and (output or not self._num_orders):
            reports, self._reports = self._reports, []
            output.worker_metadata = msgspec.msgpack.encode(reports)
        return output

    def take_tier_failures(self) -> int:
        failures, self._tier_failures = self._tier_failures, 0
        return failures

    def flush(self, rung: threading.Event, deadline_s: float) -> None:
        """Wait for the saves in the background, until `deadline_s` on the monotonic clock. `rung` is set by every
        `notify`."""
        while (self._num_background or not self._host.is_idle) and time.monotonic() < deadline_s:
            rung.wait(max(0.0, deadline_s - time.monotonic()))
            rung.clear()
            self.collect()

    # ---- loads ----

    def _try_next(self, load: _Load) -> None:
        if not load.candidates:
            self._output.failed_loading[load.key] = "; ".join(load.failures) or "no tier has the item"
            return
        i, metadata = load.candidates.pop(0)
        self._tiers[i].load(load.key, metadata, partial(self._loaded, load, i))

    def _loaded(self, load: _Load, i: int, reason: str | None) -> None:
        if reason is not None:
            load.failures.append(f"{self._tiers[i].label}: {reason}")
            self._try_next(load)
            return
        self._tier_failures += len(load.failures)
        for other, _ in load.candidates:  # was told of the order, and need not wait for it
            told = ECConnectorOutput(failed_loading={load.key: "not tried: another tier had it"})
            self._reports.append((other, told))
        # What came over a way round is not promoted: its tier is no slower one, and the first ones may be down.
        targets = [j for j in range(i) if self._writes[j] is not Write.FALLBACK]
        if self._promote and targets and self._writes[i] is not Write.FALLBACK and self._host.is_idle:
            copy = self._host.begin(load.slice_)
            if copy is not None:
                self._copying[copy] = load
                self._promotions[copy] = targets
                return
        self._finish_load(load)

    def _finish_load(self, load: _Load) -> None:
        self._output.finished_loading.append(load.key)
        self._output.seconds_loading.append(time.monotonic() - load.started_s)
        self._output.bytes_loaded += load.slice_.nbytes

    # ---- saves ----

    def _save_to(self, save: _Save, indices: Sequence[int]) -> None:
        save.num_pending += len(indices)
        for i in indices:
            self._tiers[i].save(save.key, save.embeds, partial(self._saved, save, i))

    def _saved(self, save: _Save, i: int, reason: str | None) -> None:
        save.num_pending -= 1
        if reason is None:
            save.saved.append(i)
        else:
            save.failures.append(f"{self._tiers[i].label}: {reason}")
        self._go_on(save)

    def _go_on(self, save: _Save) -> None:
        if save.num_pending or save.copy in self._copying:
            return
        if not save.saved and save.others:
            self._save_to(save, [save.others.pop(0)])
            return
        if save.saved:
            ways_round = [i for i in save.saved if self._writes[i] is Write.FALLBACK]
            if len(ways_round) < len(save.saved):  # a store has it too
                for i in ways_round:
                    self._tiers[i].connector.lease_over(save.key)
            self._tier_failures += len(save.failures)
            self._output.finished_saving.append(save.key)
            self._output.seconds_saving.append(time.monotonic() - save.started_s)
            self._output.bytes_saved += save.embeds.nbytes
        else:
            self._output.failed_saving[save.key] = "; ".join(save.failures)
        if save.copy is not None:
            backs = [i for i in save.others if self._writes[i] is Write.BACK] if save.saved else []
            self._save_copy(save.key, save.copy, backs)

    # ---- copies ----

    def _take_copy(self, copy: HostCopy) -> None:
        """It is made: what it was made of may be reported."""
        order = self._copying.pop(copy)
        if isinstance(order, _Save):
            self._go_on(order)
        else:
            self._finish_load(order)
            self._save_copy(order.key, copy, self._promotions.pop(copy))

    def _save_copy(self, key: str, copy: HostCopy, indices: Sequence[int]) -> None:
        if copy.tensor is None:
            self._tier_failures += len(indices)
            indices = []
        copy.users = len(indices)
        if not indices:
            self._host.release(copy)
        self._num_background += len(indices)
        for i in indices:
            assert copy.tensor is not None
            self._tiers[i].save(key, copy.tensor, partial(self._copy_saved, copy))

    def _copy_saved(self, copy: HostCopy, reason: str | None) -> None:
        self._num_background -= 1
        self._tier_failures += reason is not None
        copy.users -= 1
        if not copy.users:
            self._host.release(copy)
