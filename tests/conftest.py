"""What all tests share: one small checkpoint, and its reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.failure_watch import FailureWatch

# Small models, many processes, two cores: one thread each is fastest. The services inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in each run, whatever the clock says: a change is refused for what it does, not by chance. With
# `--hypothesis-profile=others` each run has others.
settings.register_profile(
    "others", max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("same", settings.get_profile("others"), derandomize=True)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults(what): failures that the test's own faults cause may be counted")
    config.pluginmanager.register(FailureWatch(), "failure-watch")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight qwen3_vl checkpoint in float32, laid out like a downloaded one."""
    from demo.random_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> object:
    from tests.reference import Reference

    return Reference(tiny_model)
