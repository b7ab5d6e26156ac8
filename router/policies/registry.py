"""Policies by name, or by the module path of somebody else's."""

from __future__ import annotations

import importlib

from core.errors import ConfigError
from router.policies.base import Policy
from router.policies.consistent_hash import ConsistentHash
from router.policies.expected_cost import ExpectedCost
from router.policies.free_kv import FreeKv
from router.policies.simple import LeastLoaded, Random, RoundRobin

POLICIES: dict[str, type[Policy]] = {
    "consistent-hash": ConsistentHash,
    "expected-cost": ExpectedCost,
    "free-kv": FreeKv,
    "least-loaded": LeastLoaded,
    "random": Random,
    "round-robin": RoundRobin,
}


def make_policy(option: str, name: str) -> Policy:
    """A new policy: one of `POLICIES`, or `MODULE:CLASS` of a `Policy` that takes no arguments.

    Raises ConfigError that names `option`, the value and what is wrong with it.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module_path, colon, class_name = name.partition(":")
    if not colon:
        raise ConfigError(option, name, f"none of {', '.join(POLICIES)}, and no MODULE:CLASS")
    try:
        found = getattr(importlib.import_module(module_path), class_name)
    except ImportError as error:
        raise ConfigError(option, name, f"module {module_path!r} cannot be imported: {error}") from error
    except AttributeError as error:
        raise ConfigError(option, name, f"module {module_path!r} has no {class_name!r}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(option, name, "no subclass of router.policies.base.Policy")
    try:
        return found()
    except Exception as error:  # a stranger's constructor
        raise ConfigError(option, name, f"cannot be made: {type(error).__name__}: {error}") from error
