"""Every pair of connector sides that a test makes is closed, and leaves no thread behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.connectors.support import ECSides, KVPair, connector_threads, poll_until

Pair = TypeVar("Pair", bound=ECSides | KVPair)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def closing() -> Iterator[Callable[[Pair], Pair]]:
    """Hands a pair through and closes it, twice, after the test."""
    pairs: list[ECSides | KVPair] = []

    def keep(pair: Pair) -> Pair:
        pairs.append(pair)
        return pair

    yield keep
    for pair in pairs:
        pair.close()
        pair.close()
    poll_until(lambda: connector_threads() == [])


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """A fresh folder in memory that processes share."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="triptych-test-"))
    yield folder
    shutil.rmtree(folder)
