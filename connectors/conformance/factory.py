"""How the kit makes connectors: by what can be written down as JSON, since most of them are made in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECSide
from connectors.factory import ec_connector_class, kv_connector_class
from connectors.kv.base import KVConnectorBase, KVConnectorConfig, KVSide
from core.config import ConnectorConfig
from core.errors import ConfigError


class ConnectorFactory(msgspec.Struct, frozen=True):
    """Makes both sides of engines' connectors: one of ours by its name, another by module path and class.

    `extra` is the operator's extra config, to which a harness and the checks add. A class whose name begins with KV is
    a KV connector, any other an EC connector.
    """

    name: str
    module_path: str | None = None
    extra: Mapping[str, Any] = {}

    @property
    def is_kv(self) -> bool:
        return self.name.startswith("KV")

    @classmethod
    def from_text(cls, text: str, extra: Mapping[str, Any] | None = None) -> ConnectorFactory:
        """`MODULE:CLASS`, or the name of one of ours."""
        module, _, name = text.rpartition(":")
        return cls(name, module or None, extra or {})

    def find_class(self) -> type[ECConnectorBase] | type[KVConnectorBase]:
        """Raises ConfigError where there is no such module, no such class, or it is no connector."""
        connector = ConnectorConfig(self.name, self.module_path)
        return kv_connector_class(connector) if self.is_kv else ec_connector_class(connector)

    def make(self, config: ECConnectorConfig, side: ECSide) -> ECConnectorBase:
        """One side. Raises whatever the constructor raises: an engine would make a ConfigError of it, the kit looks."""
        return ec_connector_class(ConnectorConfig(self.name, self.module_path))(config, side)

    def make_kv(self, config: KVConnectorConfig, side: KVSide) -> KVConnectorBase:
        """As `make`."""
        return kv_connector_class(ConnectorConfig(self.name, self.module_path))(config, side)

    def options(self) -> frozenset[str]:
        """Names of the options where the class says them as ours do, in a struct `options_type`; else none."""
        try:
            kind = getattr(self.find_class(), "options_type", None)
        except ConfigError:
            return frozenset()
        return frozenset(getattr(kind, "__struct_fields__", ()))
