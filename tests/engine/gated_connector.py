"""Connectors such as strangers would write, for tests of executors: found by this module's path."""

from __future__ import annotations

import threading
from typing import Any

import torch

from connectors.ec.base import ECConnectorBase, ECConnectorMetadata, ECConnectorOutput
from core.struct import field

#: Closed, every step waits where its loads would begin; no real connector may.
GATE = threading.Event()
GATE.set()
DEADLINE_S = 30.0


class NoItems(ECConnectorBase):
    """A store that holds nothing and forgets what it is given."""

    def has_cache_item(self, key: str) -> bool | None:
        return False

    def start_load_caches(self) -> None: ...

    def save_caches(self, key: str, embeds: torch.Tensor) -> None: ...

    def get_finished(self) -> ECConnectorOutput:
        return ECConnectorOutput()

    def close(self) -> None: ...


class GatedConnector(NoItems):
    """Fails the step with `extra["fail"]`, once the gate is open."""

    def start_load_caches(self) -> None:
        assert GATE.wait(DEADLINE_S)
        if self.config.extra.get("fail"):
            raise RuntimeError("a fault of the connector")


class StepMetadata(ECConnectorMetadata, array_like=True):
    """More than the base has, and metadata of another connector."""

    number: int = 0
    marks: set[str] = field(default_factory=set)
    inner: list[tuple[int, ECConnectorMetadata]] = field(default_factory=list)


class CountingConnector(NoItems):
    """The worker side tells what it was ordered, as the scheduler side's own message."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.number = 0
        self.heard: list[str] = []

    def build_connector_meta(self) -> ECConnectorMetadata:
        self.number += 1
        return StepMetadata(number=self.number, marks={"m"}, inner=[(7, StepMetadata(number=-self.number))])

    def get_finished(self) -> ECConnectorOutput:
        bound = self._metadata
        assert isinstance(bound, StepMetadata)
        ((seven, inner),) = bound.inner
        assert isinstance(inner, StepMetadata)
        return ECConnectorOutput(worker_metadata=f"{bound.number} {bound.marks} {seven} {inner.number}".encode())

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        self.heard.append(output.worker_metadata.decode())


class TensorMetadata(ECConnectorMetadata, array_like=True):
    """Works within one process only."""

    rows: torch.Tensor | None = None


class TensorConnector(NoItems):
    def build_connector_meta(self) -> ECConnectorMetadata:
        return TensorMetadata()
