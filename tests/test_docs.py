"""The prose names nothing that is not there: links, modules, make targets, files, options, families."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import click
import pytest

from core.options import serve_options
from core.types import Stage
from router.__main__ import serve_command

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_SOURCE_FOLDERS = ("core", "connectors", "engine", "kernels", "services", "router", "cli", "protos", "examples", "demo")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, by GitHub's rule."""
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


def test_there_are_pages() -> None:
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_modules_that_commands_run_exist(page: Path) -> None:
    for module in re.findall(r"python -m ([\w.]+)", page.read_text()):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^\$ )make ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_source_files_named_with_their_folder_exist(page: Path) -> None:
    for name in re.findall(rf"`((?:{'|'.join(_SOURCE_FOLDERS)})/[\w/]+\.\w+)`", page.read_text()):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("folder", ["core", "connectors", "engine", "router", "cli"])
def test_modules_listed_in_the_architecture_exist(folder: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = re.search(rf"^\*\*{folder}\*\*(.*?)(?=^\*\*|^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    known = {file.name for file in (ROOT / folder).rglob("*.py")}
    listed = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", section[1])}
    assert listed, folder
    assert listed <= known


def _options(command: click.Command) -> dict[str, click.Option]:
    return {option.opts[0]: option for option in command.params if isinstance(option, click.Option)}


@pytest.mark.parametrize("stage", ["encoder", "prefill", "decode", "router"])
def test_every_option_is_listed_with_variable_and_default(stage: str) -> None:
    services, router = (ROOT / "docs" / "options.md").read_text().split("## The router")
    command = serve_command if stage == "router" else serve_options(Stage(stage))(click.Command("serve"))
    options = _options(command)
    rows = {cells[0]: cells for cells in _rows(router if stage == "router" else services) if cells[0].startswith("`--")}
    listed = {name.strip("`") for name in rows}
    assert listed == set(options)
    for name, option in options.items():
        _, variable, default, _ = rows[f"`{name}`"]
        assert variable == f"`{option.envvar}`", name
        if isinstance(option.default, str | int | float):
            assert f"`{option.default}`" in default, name


def _rows(text: str) -> list[list[str]]:
    rows = [re.split(r" +\| +", line.strip("| ")) for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) == 4]


def test_the_readme_names_every_family() -> None:
    families = _dictionary(ROOT / "engine" / "models" / "registry.py", "FAMILIES")
    row = re.search(r"^\| model families \|(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert row is not None
    assert re.findall(r"`(\w+)`", row[1]) == list(families)


def _dictionary(file: Path, name: str) -> dict[str, str]:
    """A module's dictionary of literals, read without importing the module (this one would bring torch)."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value = ast.literal_eval(node.value)
            assert isinstance(value, dict)
            return value
    raise AssertionError(f"{file.name} has no {name}")
