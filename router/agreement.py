"""Which workers fit together: what each says in GetServerInfo, compared before it gets a request.

All stages must run the same release, model family, weights with their preprocessing and dtype (one digest) and width of
embeddings; prefill and decode the same layout of KV blocks. The first such set of workers that has all three stages is
the reference, the largest one where there are several. Whoever differs is refused by name, with both values, and the
others go on. Where the reference has lost a stage altogether and another set is whole (new weights were rolled out),
that one takes over.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from core.errors import IncompatibleError
from core.types import Stage
from protos import common_pb2

logger = logging.getLogger(__name__)

_STAGES = (Stage.ENCODER, Stage.PREFILL, Stage.DECODE)
_WITH_KV = (Stage.PREFILL, Stage.DECODE)
_NAMES = {"family": "model family"}  # of fields, where an error calls them something else
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Party(Protocol):
    """What is looked at of a worker; `refusal` is written. `router.workers.Worker` is one."""

    refusal: str | None

    @property
    def stage(self) -> Stage: ...
    @property
    def info(self) -> common_pb2.ServerInfo | None: ...
    @property
    def serving(self) -> bool: ...
    @property
    def leaving(self) -> bool: ...
    @property
    def label(self) -> str: ...


class Identity(msgspec.Struct, frozen=True):
    """What must be equal. `kv_layout` is None for an encoder, which has none."""

    release: str  # major.minor
    family: str
    namespace_digest: str
    embed_width: int
    kv_layout: str | None

    @staticmethod
    def of(stage: Stage, info: common_pb2.ServerInfo) -> Identity:
        return Identity(
            release=".".join(info.version.split(".")[:2]),
            family=info.family,
            namespace_digest=info.namespace_digest,
            embed_width=info.embed_width,
            kv_layout=info.kv_layout if stage in _WITH_KV else None,
        )

    def difference(self, other: Identity) -> str | None:
        """The first field in which they differ, None where they fit together."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and mine is not None and theirs is not None:
                return name
        return None


class Agreement:
    """The reference of one fleet. Event loop only."""

    def __init__(self) -> None:
        self._reference: Identity | None = None
        self._label = ""  # of a worker that is the reference

    @property
    def namespace(self) -> str | None:
        """The namespace digest that all stages agreed on; None before they did."""
        return self._reference.namespace_digest if self._reference is not None else None

    def settle(self, workers: Iterable[Party]) -> None:
        """Choose or keep the reference, and write every worker's `refusal`. Called after each change; cheap."""
        sound: list[tuple[Party, Identity]] = []
        processes: dict[tuple[Stage, str], Party] = {}
        for worker in workers:
            if worker.info is None or worker.leaving:
                continue
            fault = _fault(worker.stage, worker.info)
            if worker.serving and worker.info.instance_id:
                same = processes.setdefault((worker.stage, worker.info.instance_id), worker)
                if same is not worker:
                    fault = f"it is the same process as {same.label}"
            if fault is not None:
                _refuse(worker, fault)
            else:
                sound.append((worker, Identity.of(worker.stage, worker.info)))
        best = _largest_whole_set(sound)
        if best is not None and (self._reference is None or not _is_whole(self._reference, sound)):
            if self._reference is not None and self._reference.difference(best) is not None:
                logger.warning("the workers changed: %s -> %s", self._reference, best)
            self._reference = best
        if self._reference is None:
            return
        fitting = [worker.label for worker, identity in sound if self._reference.difference(identity) is None]
        self._label = fitting[0] if fitting else self._label
        for worker, identity in sound:
            field = self._reference.difference(identity)
            _refuse(worker, None if field is None else _explain(field, self._reference, self._label, identity, worker))

    def check_possible(self, workers: Sequence[Party]) -> None:
        """Raise IncompatibleError where these, which all have answered, can never serve together: no stage is to be
        refused altogether. For the start, and workers of which there will be no others."""
        sound: list[tuple[Party, Identity]] = []
        for worker in workers:
            if worker.info is None:
                if worker.refusal is None:
                    return  # it may still say what would fit
                continue
            if _fault(worker.stage, worker.info) is None:
                sound.append((worker, Identity.of(worker.stage, worker.info)))
        if _largest_whole_set(sound, serving=False) is not None:
            return
        for stage in _STAGES:
            if not any(worker.stage is stage for worker, _ in sound):
                refused = [worker for worker in workers if worker.stage is stage and worker.refusal is not None]
                if refused:
                    raise IncompatibleError.from_message(f"{refused[0].label}: {refused[0].refusal}")
        for i, (one, ours) in enumerate(sound):
            for other, theirs in sound[i + 1 :]:
                field = ours.difference(theirs)
                if field is not None:
                    raise IncompatibleError.from_message(_explain(field, ours, one.label, theirs, other))


def _fault(stage: Stage, info: common_pb2.ServerInfo) -> str | None:
    """What makes a worker unfit by itself."""
    if info.stage != stage.value:
        return f"it says that it is {info.stage[:100]!r}, not {stage.value!r}"
    if not _DIGEST.fullmatch(info.namespace_digest):
        return f"its namespace_digest {info.namespace_digest[:100]!r} is not 64 hexadecimal digits"
    if stage in _WITH_KV and not info.max_model_len:
        return "its max_model_len is 0"
    return None


def _refuse(worker: Party, reason: str | None) -> None:
    if reason is not None and reason != worker.refusal:
        logger.error("%s is left out: %s", worker.label, reason)
    elif reason is None and worker.refusal is not None:
        logger.warning("%s fits again", worker.label)
    worker.refusal = reason


def _explain(field: str, ours: Identity, label: str, theirs: Identity, other: Party) -> str:
    mine, other_value = getattr(ours, field), getattr(theirs, field)
    return str(IncompatibleError(_NAMES.get(field, field), f"{mine!r} ({label})", f"{other_value!r} ({other.label})"))


def _largest_whole_set(sound: Sequence[tuple[Party, Identity]], *, serving: bool = True) -> Identity | None:
    """What the largest set that has all stages agrees on; among equals the one that came first."""
    found: dict[Identity, int] = {}
    for worker, identity in sound:
        if worker.stage in _WITH_KV and _is_whole(identity, sound, serving=serving):
            found[identity] = found.get(identity, 0) + 1
    return max(found, key=found.__getitem__) if found else None


def _is_whole(reference: Identity, sound: Sequence[tuple[Party, Identity]], *, serving: bool = True) -> bool:
    stages = {
        worker.stage
        for worker, identity in sound
        if (worker.serving or not serving) and reference.difference(identity) is None
    }
    return len(stages) == len(_STAGES)
