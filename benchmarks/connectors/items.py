"""Items of the sizes measured, and the memory that they are moved between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from connectors.device_copy import DeviceCopies
from connectors.ec.store import LoadTarget, SaveSource, bytes_of

NAMESPACE = "0123456789abcdef" * 4
DTYPE = torch.bfloat16
WIDTH = 2048
ROW_BYTES = WIDTH * DTYPE.itemsize

HOST = DeviceCopies(torch.device("cpu"))


def key_of(number: int) -> str:
    return f"{number:064x}"


def random_item(size_bytes: int) -> torch.Tensor:
    """`[size_bytes / ROW_BYTES, WIDTH]` of DTYPE: random bytes, so that nothing can be saved on them. They lie in
    torch's memory, as an engine's tensors do: numpy's is aligned to less, and copies of it take longer."""
    raw = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)
    return torch.from_numpy(raw).clone().view(DTYPE).view(-1, WIDTH)


def empty_item(size_bytes: int) -> torch.Tensor:
    """As `random_item`, zero, every page touched."""
    return torch.zeros(size_bytes, dtype=torch.uint8).view(DTYPE).view(-1, WIDTH)


def memcpy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    """The C library's, by way of numpy. (torch's `copy_` is a loop of its own, slower for most sizes.)"""
    into, out_of = (np.frombuffer(bytes_of(tensor), np.uint8) for tensor in (target, source))
    return lambda: np.copyto(into, out_of)


def source_of(embeds: torch.Tensor) -> SaveSource:
    return SaveSource(embeds, lambda: False)


def targets_in(buffer: torch.Tensor) -> Callable[[], LoadTarget]:
    """Makes the targets of loads into `buffer`, whose bytes are at hand as they are in a connector."""
    data = bytes_of(buffer)
    return lambda: LoadTarget(buffer, HOST, data)


def expect_same(what: str, arrived: torch.Tensor, sent: torch.Tensor) -> None:
    """Clears `arrived` for whoever is next. Raises RuntimeError: what moves wrong bytes is not worth measuring."""
    if not torch.equal(arrived.view(torch.uint8), sent.view(torch.uint8)):
        raise RuntimeError(f"{what}: what arrived is not what was sent")
    arrived.zero_()
