"""Whose request it is. Tenants share limits fairly, and nothing of one is found in another's cache."""

from __future__ import annotations

from collections.abc import Iterable

from core.convert import tenant_from_proto
from core.errors import InvalidRequestError

HEADER = "x-tenant-id"


def tenant_of(metadata: Iterable[tuple[str, str | bytes]], *, trust_header: bool) -> str:
    """The tenant that a call's metadata names, empty where none is, or where nobody's word is taken for it.

    The header is trusted only where the operator says so: what stands before the router must set it, and remove what
    clients send. Raises InvalidRequestError for a name that is none, or two of them.
    """
    if not trust_header:
        return ""
    named = [value for key, value in metadata if key == HEADER]
    if not named:
        return ""
    if len(named) > 1:
        raise InvalidRequestError(f"{HEADER}: given {len(named)} times")
    value = named[0]
    return tenant_from_proto(value.decode("latin-1") if isinstance(value, bytes) else value, name=HEADER)
