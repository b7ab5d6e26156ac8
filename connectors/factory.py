"""Makes the connector that an engine's configuration names: one of ours, or a class found by module path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECSide
from connectors.kv.base import KVConnectorBase, KVConnectorConfig, KVSide
from core.config import ConnectorConfig
from core.errors import ConfigError

# Imported only when named, so that a connector's libraries are needed only by those who use it.
_EC_CONNECTORS: Mapping[str, str] = {
    "ECPeerConnector": "connectors.ec.peer",
    "ECRedisConnector": "connectors.ec.redis_connector",
    "ECSharedMemoryConnector": "connectors.ec.shared_memory",
    "ECSharedStorageConnector": "connectors.ec.shared_storage",
    "ECTieredConnector": "connectors.ec.tiered",
}
_KV_CONNECTORS: Mapping[str, str] = {
    "KVPeerConnector": "connectors.kv.peer",
    "KVSharedMemoryConnector": "connectors.kv.shared_memory",
}

Connector = TypeVar("Connector")


def make_ec_connector(connector: ConnectorConfig, config: ECConnectorConfig, side: ECSide) -> ECConnectorBase:
    """One side of an EC connector. `connector.extra` must be `config.extra`'s source: only `config` is handed on.

    Raises ConfigError, naming the option and its value, whatever is wrong with the name, the module, the class or the
    settings.
    """
    cls = ec_connector_class(connector)
    return _construct(cls, "--ec-connector", connector.name, config, side)


def ec_connector_class(connector: ConnectorConfig) -> type[ECConnectorBase]:
    """The class that the configuration names. Raises ConfigError."""
    base: type[ECConnectorBase] = ECConnectorBase  # type: ignore[type-abstract]
    return _find_class(connector, "--ec-connector", _EC_CONNECTORS, base)


def make_kv_connector(connector: ConnectorConfig, config: KVConnectorConfig, side: KVSide) -> KVConnectorBase:
    """One side of a KV connector. As `make_ec_connector`."""
    cls = kv_connector_class(connector)
    return _construct(cls, "--kv-connector", connector.name, config, side)


def kv_connector_class(connector: ConnectorConfig) -> type[KVConnectorBase]:
    """The class that the configuration names. Raises ConfigError."""
    base: type[KVConnectorBase] = KVConnectorBase  # type: ignore[type-abstract]
    return _find_class(connector, "--kv-connector", _KV_CONNECTORS, base)


def _find_class(
    connector: ConnectorConfig, option: str, ours: Mapping[str, str], base: type[Connector]
) -> type[Connector]:
    module_path = connector.module_path
    if module_path is None:
        module_path = ours.get(connector.name)
        if module_path is None:
            reason = f"unknown connector; the known ones are {', '.join(ours)}; others need {option}-module-path"
            raise ConfigError(option, connector.name, reason)
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # a plugin's module may fail in any way while it is imported
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(f"{option}-module-path", module_path, reason) from error
    cls = getattr(module, connector.name, None)
    if cls is None:
        raise ConfigError(option, connector.name, f"module {module_path!r} has no such class")
    if not inspect.isclass(cls) or not issubclass(cls, base):
        raise ConfigError(option, connector.name, f"in module {module_path!r} is not a subclass of {base.__name__}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__")))  # noqa: B009 - mypy does not know it
        raise ConfigError(option, connector.name, f"in module {module_path!r} lacks {missing}")
    return cls


def _construct(cls: type[Connector], option: str, name: str, config: Any, side: Any) -> Connector:
    try:
        return cls(config, side)  # type: ignore[call-arg]
    except ConfigError:
        raise
    except Exception as error:  # as above: a stranger's constructor
        reason = f"cannot be constructed: {type(error).__name__}: {error}"
        raise ConfigError(option, name, reason) from error
