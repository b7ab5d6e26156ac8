"""The form of a log line, which people and scripts read."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from core import logs


@pytest.fixture(autouse=True)
def own_root() -> Iterator[None]:
    """Gives the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_has_utc_time_level_place_logger_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", "prefill-0 100%s")
    logging.getLogger("some.module").info("loaded %d bytes", 7)
    logging.getLogger("some.module").debug("not shown")
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO prefill-0 100%s some\.module: loaded 7 bytes\n", line
    )


def test_a_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("INFO", "a")
    logs.setup("WARNING", "b")
    logging.getLogger("m").info("not shown")
    logging.getLogger("m").warning("shown")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        logs.setup("LOUD", "a")
