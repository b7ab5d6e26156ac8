"""Which Triptych this is."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def version() -> str:
    """The installed distribution's version; "unknown" where a checkout runs without having been installed."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "unknown"
