"""`triptych connector check` as a person runs it: table, exit status, errors that name what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import triptych

_SQLITE = "examples.sqlite_connector:ECSqliteConnector"
_HARNESS = ("--harness", "examples.sqlite_harness:SqliteHarness")


async def _check(*args: str) -> tuple[int, str, str]:
    return await triptych("connector", "check", *args, timeout_s=100)


async def test_all_tried_and_passed_is_0() -> None:
    code, out, _ = await _check(_SQLITE, *_HARNESS, "--only", "round_trip/absent", "--only", "damage/flipped_bit")
    assert code == 0, out
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [
        ["round_trip/absent", "passed"],
        ["damage/flipped_bit", "passed"],
    ]
    assert "\033" not in out, "colours where nobody looks"
    assert lines[-1].startswith("ECSqliteConnector: 2 passed")


async def test_what_failed_is_1_and_says_why() -> None:
    mutant = "tests.connectors.mutants:ShortKeys"
    code, out, _ = await _check(mutant, *_HARNESS, "--only", "keys/similar", "--only", "faults/full")
    assert code == 1
    assert "keys/similar" in out
    assert "failed" in out
    assert "one digit" in out


async def test_what_was_not_tried_is_3(tmp_path: Path) -> None:
    extra = f'{{"path": "{tmp_path / "items.db"}"}}'
    only = [word for name in ("round_trip/absent", "round_trip/256", "damage/garbage") for word in ("--only", name)]
    code, out, _ = await _check(_SQLITE, "--extra-config", extra, "--max-item-mib", "255", *only)
    assert code == 3, out
    assert [line.split()[1:3] for line in out.splitlines()].count(["not", "tried"]) == 2
    assert "larger than --max-item-mib 255" in out
    assert "no harness" in out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["ECNoSuchConnector"], "ECNoSuchConnector"),
        ([_SQLITE, "--harness", "no.such:Harness"], "no.such:Harness"),
        ([_SQLITE, "--extra-config", "{"], "--extra-config"),
    ],
)
async def test_a_wrong_command_line_is_2_and_named(args: list[str], named: str) -> None:
    code, _, err = await _check(*args)
    assert code == 2
    assert named in err
    assert "Traceback" not in err
