"""docs/connectors.md shows the code that is there, names every check's subject, and lists every option."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from connectors.conformance.checks import CHECKS
from connectors.ec.store_connector import StoreOptions
from connectors.factory import _EC_CONNECTORS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "connectors.md").read_text()


def test_the_listing_is_the_file() -> None:
    listings = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert (ROOT / "examples" / "sqlite_connector.py").read_text() in listings


def test_the_rules_name_the_checks() -> None:
    section = PAGE[PAGE.index("## The rules") : PAGE.index("## Port a plugin")]
    for row in re.findall(r"^\|.*\| (`.*) \|$", section, re.MULTILINE):
        subject = ""
        for name in re.findall(r"`([\w/]+)`", row):
            subject = name.partition("/")[0] if "/" in name else subject
            full = name if "/" in name else f"{subject}/{name}"
            assert any(each.startswith(full) for each in CHECKS), full
    assert {name.partition("/")[0] for name in CHECKS} <= set(re.findall(r"`(\w+)/", section))


@pytest.mark.parametrize("name", _EC_CONNECTORS)
def test_options_are_listed(name: str) -> None:
    module = importlib.import_module(_EC_CONNECTORS[name])
    if name == "ECTieredConnector":
        options = set(importlib.import_module("connectors.ec.tiered_options").TieredOptions.__struct_fields__)
    else:
        options = set(getattr(module, name).options_type.__struct_fields__) - set(StoreOptions.__struct_fields__)
    section = PAGE[PAGE.index("## Options") : PAGE.index("## Write one")]
    rows = section[section.index(f"| `{name}` |") :]
    end = re.search(r"\n\| `EC|\n\n", rows)
    assert end is not None
    listed = set(re.findall(r"`(\w+)`", rows[: end.start()])) | {
        part for cell in re.findall(r"\| \| (`[^|]*`) \|", rows[: end.start()]) for part in re.findall(r"`(\w+)`", cell)
    }
    assert options <= listed


def test_common_options_are_listed() -> None:
    section = PAGE[PAGE.index("## Options") : PAGE.index("## Write one")]
    for name in StoreOptions.__struct_fields__:
        assert f"| `{name}` |" in section, name
