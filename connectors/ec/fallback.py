"""A way round a store that is down or full: the encoder keeps what it has just made, and consumers pull it from there.

Any EC connector, a stranger's too, becomes the first of two tiers, `ECPeerConnector` the second, which is written to
only where the first did not take an item, and asked only about items that were. While the store
is well it does nothing.
"""

from __future__ import annotations

from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECSide
from connectors.factory import ec_connector_class, make_ec_connector
from connectors.options import EC_EXTRA
from core.config import ConnectorConfig
from core.errors import ConfigError

#: These have peers of their own, or say themselves what their tiers are.
_WITHOUT = ("ECPeerConnector", "ECTieredConnector")


def make_with_fallback(
    connector: ConnectorConfig, peer: ConnectorConfig | None, config: ECConnectorConfig, side: ECSide
) -> ECConnectorBase:
    """One side of `connector`, with `peer` behind it if there is one. Raises ConfigError."""
    if peer is None or any(base.__name__ in _WITHOUT for base in ec_connector_class(connector).__mro__):
        return make_ec_connector(connector, config, side)
    tiers = [
        {"connector": connector.name, "module_path": connector.module_path, "extra": connector.extra},
        {"connector": peer.name, "module_path": peer.module_path, "extra": peer.extra, "write": "fallback"},
    ]
    both = ConnectorConfig("ECTieredConnector", None, {"tiers": tiers})
    config = type(config)(config.role, config.namespace, config.dtype, config.width, both.extra, config.notify)
    try:
        return make_ec_connector(both, config, side)
    except ConfigError as error:
        # Nobody has written `tiers`: the error is to name what was.
        for i, (one, option) in enumerate(((connector, ""), (peer, "--ec-peer-fallback "))):
            where = f"{EC_EXTRA} tiers[{i}] ({one.name}) "
            if error.name.startswith(where):
                raise ConfigError(option + error.name.removeprefix(where), error.value, error.reason) from error
        raise
