"""A request's stages as aligned bars of text."""

from __future__ import annotations

from collections.abc import Sequence

from core.types import Span

_BAR_WIDTH = 40


def render(spans: Sequence[Span], *, bar_width: int = _BAR_WIDTH, block: str = "█") -> str:
    """One line a span, in the order given: name, where, a bar over the time of them all, milliseconds, note.

    `block` is the character that bars are made of; pass "#" where the terminal has no other. Spans measured on other
    hosts are drawn by those hosts' clocks. No spans give an empty string; else there is no newline at the end.
    """
    if not spans:
        return ""
    start_s = min(span.start_s for span in spans)
    total_s = max(max(span.end_s for span in spans) - start_s, 1e-9)
    name_width = max(len(span.name) for span in spans)
    where_width = max(len(span.where) for span in spans)
    lines = []
    for span in spans:
        first = int((span.start_s - start_s) / total_s * bar_width)
        last = int((span.end_s - start_s) / total_s * bar_width)
        # Every span shows, the shortest one and one at the very end too.
        first = min(first, bar_width - 1)
        length = max(1, min(last, bar_width) - first)
        bar = (" " * first + block * length).ljust(bar_width)
        milliseconds = max(0.0, span.end_s - span.start_s) * 1000
        line = f"{span.name:<{name_width}}  {span.where:<{where_width}}  |{bar}|  {milliseconds:9.1f} ms  {span.note}"
        lines.append(line.rstrip())
    return "\n".join(lines)
