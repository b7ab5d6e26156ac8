"""Loads rest beside a step that needs all processors, and only there."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from connectors.device_copy import DeviceCopies
from connectors.ec import rests, store
from connectors.ec.store import CHUNK_BYTES, LoadTarget


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each rest was meant to take. What this thread loaded in other tests is forgotten."""
    monkeypatch.setattr(store, "_RESTS", rests.Rests())
    sleep, seen = time.sleep, list[float]()

    def note(seconds: float) -> None:
        seen.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(rests.time, "sleep", note)
    return seen


def load(num_chunks: int, crowded: list[bool], piece_bytes: int = CHUNK_BYTES) -> LoadTarget:
    """Fill a target of so many chunks; before each, `crowded` says one by one whether the engine needs it all."""
    slice_ = torch.zeros(num_chunks * CHUNK_BYTES, dtype=torch.uint8).view(num_chunks, -1)
    answers = iter(crowded)
    target = LoadTarget(slice_, DeviceCopies(slice_.device), is_crowded=lambda: next(answers))
    data = memoryview(bytearray([7]) * piece_bytes)
    for offset in range(0, target.num_bytes, piece_bytes):
        target.write(data, offset)
    target.commit()
    assert int(slice_.min()) == 7
    assert next(answers, None) is None, "was asked less often"
    return target


def test_a_load_rests_once_a_chunk_and_as_long_as_is_bounded(slept: list[float]) -> None:
    load(4, [True] * 4)
    assert len(slept) == 4
    assert all(0 < seconds <= rests._LONGEST_REST_S for seconds in slept)


def test_a_rest_is_in_proportion_to_the_work(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.0003, 0.0003, 0.0303, 0.0303])
    monkeypatch.setattr(rests.time, "thread_time", lambda: next(ticks))
    one = rests.Rests()
    one.after(CHUNK_BYTES, lambda: True)
    one.after(CHUNK_BYTES, lambda: True)
    assert slept == [pytest.approx(rests._REST_RATIO * 0.0003), rests._LONGEST_REST_S]


def test_only_beside_a_crowded_engine(slept: list[float]) -> None:
    load(4, [False, True, False, False])
    assert len(slept) == 1


def test_what_a_store_reads_into_the_target_counts_like_what_it_writes(slept: list[float]) -> None:
    slice_ = torch.zeros(2, CHUNK_BYTES, dtype=torch.uint8)
    target = LoadTarget(slice_, DeviceCopies(slice_.device), is_crowded=lambda: True)
    for offset in (0, CHUNK_BYTES):
        target.fill(offset, CHUNK_BYTES, lambda into: None)
    assert len(slept) == 2


def test_small_pieces_add_up(slept: list[float]) -> None:
    load(2, [True] * 2, piece_bytes=CHUNK_BYTES // 8)
    assert len(slept) == 2


def test_each_thread_counts_its_own_work(slept: list[float]) -> None:
    """A thread that has just begun owes nothing for the bytes of others."""
    one = rests.Rests()
    one.after(CHUNK_BYTES - 1, lambda: True)
    other = threading.Thread(target=one.after, args=(1, lambda: True))
    other.start()
    other.join(30)
    assert slept == []
    one.after(1, lambda: True)
    assert len(slept) == 1
