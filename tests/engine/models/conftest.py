"""Checkpoints of every supported family, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.random_checkpoint import make_checkpoint
from engine.models.registry import FAMILIES
from tests.reference import Reference


class Families:
    """Made when first asked for, then kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[str, Reference] = {}

    def model_dir(self, family: str) -> Path:
        path = self._folder / family
        return path if path.exists() else make_checkpoint(path, family=family)

    def reference(self, family: str) -> Reference:
        if family not in self._references:
            self._references[family] = Reference(self.model_dir(family))
        return self._references[family]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)
