"""Frames that are kept show what the cache holds now, are made once, and are not kept for ever."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import zmq

from connectors.kv import frames
from connectors.kv.frames import RowFrames
from connectors.kv.rows import Bytes
from core.types import KVRole
from tests.connectors.support import LAYOUT, KVPair, same_bits


def rows_of(num_bytes: int) -> Bytes:
    return np.zeros((2, num_bytes // 2), dtype=np.uint8)


@pytest.mark.parametrize("num_bytes", [1024, zmq.COPY_THRESHOLD, zmq.COPY_THRESHOLD + 2])
def test_a_frame_shows_what_is_there_now(num_bytes: int) -> None:
    ours, rows = RowFrames(), rows_of(num_bytes)
    for value in (1, 2):
        rows[:] = value
        frame = ours.of(rows)
        assert bytes(frame.buffer if isinstance(frame, zmq.Frame) else frame) == rows.tobytes()


def test_a_frame_is_made_once_for_each_stretch() -> None:
    ours, rows = RowFrames(), rows_of(4 * zmq.COPY_THRESHOLD)
    assert ours.of(rows) is ours.of(rows.view())
    assert ours.of(rows[:1]) is not ours.of(rows)


def test_the_least_used_frames_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MAX_FRAMES", 2)
    ours, arrays = RowFrames(), [rows_of(4 * zmq.COPY_THRESHOLD) for _ in range(3)]
    first, second = ours.of(arrays[0]), ours.of(arrays[1])
    assert ours.of(arrays[0]) is first
    ours.of(arrays[2])
    assert ours.of(arrays[0]) is first
    assert ours.of(arrays[1]) is not second


@pytest.mark.parametrize("head_dim", [4, 4096])
def test_blocks_that_were_sent_before_are_sent_as_they_are_now(
    closing: Callable[[KVPair], KVPair], head_dim: int
) -> None:
    layout = msgspec.structs.replace(LAYOUT, head_dim=head_dim)
    prefill = closing(KVPair(KVRole.PRODUCER, layout))
    decode = closing(KVPair(KVRole.CONSUMER, layout, same_host="never"))
    for n in range(3):
        prefill.blocks += 1
        decode.pull(f"d{n}", prefill.lease(f"r{n}", [1, 5, 2]), [3, 1, 0])
        output = decode.report()
        assert (output.finished_recving, output.num_retries) == ([f"d{n}"], 0)
        assert same_bits(decode.blocks[[3, 1, 0]], prefill.blocks[[1, 5, 2]])
        prefill.report()
