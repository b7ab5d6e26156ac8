"""vLLM's JSON spellings of the connector options, `--ec-transfer-config` and `--kv-transfer-config`.

A key either means here what it means in vLLM or is refused by name; none is ignored.
"""

from __future__ import annotations

from typing import Any

from core.errors import ConfigError
from core.types import ECRole, KVRole

# Key -> the parameter it stands for, and what it must be.
_EC_KEYS: dict[str, tuple[str, type]] = {
    "ec_connector": ("ec_connector", str),
    "ec_role": ("ec_role", ECRole),
    "ec_connector_module_path": ("ec_connector_module_path", str),
    "ec_connector_extra_config": ("ec_connector_extra_config", dict),
    "engine_id": ("where", str),
}
_KV_KEYS: dict[str, tuple[str, type]] = {
    "kv_connector": ("kv_connector", str),
    "kv_role": ("kv_role", KVRole),
    "kv_connector_module_path": ("kv_connector_module_path", str),
    "kv_connector_extra_config": ("kv_connector_extra_config", dict),
    "kv_load_failure_policy": ("kv_load_failure_policy", str),
    "engine_id": ("where", str),
}
# What vLLM knows besides.
_EC_REFUSED = frozenset({"ec_ip", "ec_port", "ec_buffer_size", "ec_buffer_device", "ec_rank", "ec_parallel_size"})
_KV_REFUSED = frozenset(
    {"kv_ip", "kv_port", "kv_buffer_size", "kv_buffer_device", "kv_rank", "kv_parallel_size", "enable_permute_local_kv"}
)


def merge_transfer_configs(options: dict[str, Any]) -> dict[str, Any]:
    """`options` by parameter name, with the two JSON objects taken apart into the options that their keys stand for.

    Raises ConfigError for a key that is unknown or not supported, a value of the wrong kind, and a key that contradicts
    its option.
    """
    merged = {key: value for key, value in options.items() if key not in ("ec_transfer_config", "kv_transfer_config")}
    _merge(merged, "--ec-transfer-config", options.get("ec_transfer_config"), _EC_KEYS, _EC_REFUSED)
    _merge(merged, "--kv-transfer-config", options.get("kv_transfer_config"), _KV_KEYS, _KV_REFUSED)
    return merged


def _merge(
    merged: dict[str, Any],
    option: str,
    given: dict[str, Any] | None,
    keys: dict[str, tuple[str, type]],
    refused: frozenset[str],
) -> None:
    for key, value in (given or {}).items():
        if key in refused:
            raise ConfigError(option, given, f"{key} is not supported")
        if key not in keys:
            raise ConfigError(option, given, f"{key} is unknown; the keys are {', '.join(keys)}")
        parameter, kind = keys[key]
        if value is None:
            continue  # vLLM's default of every one of these keys
        value = _checked(option, given, key, value, kind)
        before = merged[parameter]
        if before is not None and before != value:
            other = "--" + parameter.replace("_", "-")
            raise ConfigError(option, given, f"{key}={value!r} contradicts {other}={before!r}")
        merged[parameter] = value


def _checked(option: str, given: Any, key: str, value: Any, kind: type) -> Any:
    limit = 64 if key == "engine_id" else 1024
    if kind is ECRole or kind is KVRole:
        roles = [role.value for role in kind]
        if value not in roles:
            raise ConfigError(option, given, f"{key} is to be one of {', '.join(roles)}")
    elif kind is dict:
        if not isinstance(value, dict):
            raise ConfigError(option, given, f"{key} is to be an object")
    elif not isinstance(value, str) or not 1 <= len(value) <= limit or not value.isprintable():
        raise ConfigError(option, given, f"{key} is to be a text of 1 to {limit} printable characters")
    if key == "kv_load_failure_policy" and value not in ("recompute", "fail"):
        raise ConfigError(option, given, f"{key} is to be recompute or fail")
    return value
