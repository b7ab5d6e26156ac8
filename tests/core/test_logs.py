"""The form of a log line, which people and scripts read."""

from __future__ import annotations

import asyncio
import json
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


async def test_json_lines_are_one_object_each_and_name_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("INFO", "decode-0", "json")

    async def handle(request_id: str) -> None:
        logs.request_id.set(request_id)
        await asyncio.sleep(0)  # the other one runs meanwhile
        logging.getLogger("m").warning("two\nlines of %s", request_id)

    await asyncio.gather(handle("a"), handle("b"))
    logging.getLogger("m").info("of nobody: \udce4")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("m").exception("failed")
    first, second, third, last = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "WARNING", "where": "decode-0", "logger": "m", "message": "two\nlines of a", "request_id": "a"
    }  # fmt: skip
    assert second["request_id"] == "b"
    assert third["message"] == "of nobody: ?"
    assert "request_id" not in third
    assert "RuntimeError: broken" in last["traceback"]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="xml"):
        logs.setup("INFO", "a", "xml")
