"""Stretches of a cache as ZeroMQ's frames, made once.

For a frame that is made anew for each message, pyzmq has a thread told when ZeroMQ is done with the memory: one more
message, one more thread that wakes up and wants the interpreter's lock, for each run of blocks that is sent. The memory
of a cache stays, so its frames can, and go out as often as they are wanted.
"""

from __future__ import annotations

from collections import OrderedDict

import zmq

from connectors.kv.rows import Bytes

#: Some hundred bytes each.
_MAX_FRAMES = 4096


class RowFrames:
    """The serving thread only."""

    def __init__(self) -> None:
        self._frames: OrderedDict[tuple[int, int], zmq.Frame] = OrderedDict()  # by address and length

    def of(self, array: Bytes) -> zmq.Frame | memoryview:
        """The frame of a contiguous view of the cache; what ZeroMQ copies anyway is handed to it as it is now."""
        if array.nbytes <= zmq.COPY_THRESHOLD:
            return memoryview(array.reshape(-1).data)
        place = array.__array_interface__["data"][0], array.nbytes
        frame = self._frames.get(place)
        if frame is None:
            frame = self._frames[place] = zmq.Frame(array.reshape(-1).data, track=False, copy=False)
            if len(self._frames) > _MAX_FRAMES:
                self._frames.popitem(last=False)
        else:
            self._frames.move_to_end(place)
        return frame
