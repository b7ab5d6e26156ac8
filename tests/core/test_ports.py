"""Ports that are free, and that nobody else is given by chance."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from core import ports
from core.ports import free_ports


def given_by_the_system() -> range:
    lowest, highest = map(int, ports._HANDED_OUT.read_text().split())
    return range(lowest, highest + 1)


def test_the_system_hands_them_to_nobody_else() -> None:
    found = free_ports(8)
    assert len(set(found)) == 8
    if given_by_the_system().start >= 25_000:  # as Linux has it by default
        assert not set(found) & set(given_by_the_system())
    for port in found:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_what_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free, taken, other = free_ports(3)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", taken))
        monkeypatch.setattr(ports, "_candidates", lambda: iter([taken, 70_000, free, other]))
        assert free_ports(1) == [free]
        with pytest.raises(OSError, match="3 free ports"):
            free_ports(3)
        monkeypatch.setattr(ports, "_candidates", lambda: iter([taken - 1, free]))
        assert free_ports(1, beside=1) == [free]


def test_where_there_is_no_room_below_the_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("1024 65535", "no numbers", None):
        file = tmp_path / "range"
        if text is not None:
            file.write_text(text)
        else:
            file.unlink()
        monkeypatch.setattr(ports, "_HANDED_OUT", file)
        assert next(ports._candidates()) == 0
        assert all(port > 0 for port in free_ports(2))
