"""The stage timeline as text."""

from __future__ import annotations

from cli.timeline import render
from core.types import Span


def test_bars_are_aligned_and_proportional() -> None:
    lines = render(
        [
            Span("request", 100.0, 101.0, "router", "first token after 0.600 s"),
            Span("encode", 100.0, 100.5, "encoder-0"),
            Span("kv_transfer", 100.5, 100.75, "decode-0", "2 blocks"),
            Span("decode", 101.0, 101.0, "decode-0"),
        ],
        bar_width=20,
        block="#",
    ).splitlines()
    bars = [line.split("|")[1] for line in lines]
    assert bars == ["#" * 20, "#" * 10 + " " * 10, " " * 10 + "#" * 5 + " " * 5, " " * 19 + "#"]
    assert len({line.index("|") for line in lines}) == 1
    assert lines[0].endswith("1000.0 ms  first token after 0.600 s")
    assert lines[1].endswith("500.0 ms")


def test_odd_spans_do_no_harm() -> None:
    assert render([]) == ""
    assert "|#" in render([Span("encode", 5.0, 5.0)], block="#")
    assert "0.0 ms" in render([Span("encode", 5.0, 4.0)], block="#")  # another host's clock was set back
