"""The factory finds connectors by name and by module path, and names the option for whatever is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECConnectorOutput, ECSide
from connectors.ec.shared_storage import ECSharedStorageConnector
from connectors.factory import make_ec_connector, make_kv_connector
from connectors.kv.base import KVConnectorBase, KVConnectorConfig, KVSide
from connectors.kv.peer import KVPeerConnector
from core.config import ConnectorConfig
from core.errors import ConfigError
from core.types import ECRole, KVRole
from tests.connectors.support import LAYOUT, NAMESPACE


class PluginConnector(ECConnectorBase):
    """What a stranger's module might hold."""

    def has_cache_item(self, key: str) -> bool | None:
        return False

    def start_load_caches(self) -> None:
        pass

    def save_caches(self, key: str, embeds: torch.Tensor) -> None:
        pass

    def get_finished(self) -> ECConnectorOutput:
        return ECConnectorOutput()

    def close(self) -> None:
        pass


class UnfinishedConnector(ECConnectorBase):
    def close(self) -> None:
        pass


class FailingConnector(PluginConnector):
    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        raise KeyError("whatever")


class RefusingConnector(PluginConnector):
    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        raise ConfigError("mine", 3, "is odd")


NOT_A_CLASS = 3


def ec_config(**extra: Any) -> ECConnectorConfig:
    return ECConnectorConfig(ECRole.BOTH, NAMESPACE, torch.float32, 6, extra, lambda: None)


def kv_config(**extra: Any) -> KVConnectorConfig:
    return KVConnectorConfig(KVRole.BOTH, LAYOUT, "instance-0", extra, lambda: None)


@pytest.mark.parametrize("side", ECSide)
def test_our_ec_connector_by_name(tmp_path: Path, side: ECSide) -> None:
    config = ec_config(shared_storage_path=str(tmp_path))
    connector = make_ec_connector(ConnectorConfig("ECSharedStorageConnector"), config, side)
    assert type(connector) is ECSharedStorageConnector
    assert connector.side is side
    assert connector.config is config
    connector.close()


@pytest.mark.parametrize("side", KVSide)
def test_our_kv_connector_by_name(side: KVSide) -> None:
    connector = make_kv_connector(ConnectorConfig("KVPeerConnector"), kv_config(), side)
    assert type(connector) is KVPeerConnector
    assert connector.side is side
    connector.close()


def test_a_plugin_by_module_path() -> None:
    connector = make_ec_connector(ConnectorConfig("PluginConnector", __name__), ec_config(), ECSide.WORKER)
    assert type(connector) is sys.modules[__name__].PluginConnector
    assert connector.has_cache_item("x") is False


def test_a_plugin_may_have_the_name_of_ours() -> None:
    """A module path is always looked into, whatever the name."""
    with pytest.raises(ConfigError, match="has no such class"):
        make_ec_connector(ConnectorConfig("ECSharedStorageConnector", "json"), ec_config(), ECSide.WORKER)


@pytest.mark.parametrize(
    ("connector", "option", "value", "reason"),
    [
        (
            ConnectorConfig("ECSharedStorage"),
            "--ec-connector",
            "ECSharedStorage",
            "known ones are ECPeerConnector, ECRedisConnector, ECSharedMemoryConnector, ECSharedStorageConnector",
        ),
        (ConnectorConfig(""), "--ec-connector", "", "unknown connector"),
        (ConnectorConfig("A", "no.such.module"), "--ec-connector-module-path", "no.such.module", "ModuleNotFoundError"),
        (ConnectorConfig("A", ""), "--ec-connector-module-path", "", "cannot be imported"),
        (ConnectorConfig("A", ".x"), "--ec-connector-module-path", ".x", "cannot be imported"),
        (ConnectorConfig("Absent", __name__), "--ec-connector", "Absent", "has no such class"),
        (
            ConnectorConfig("NOT_A_CLASS", __name__),
            "--ec-connector",
            "NOT_A_CLASS",
            "not a subclass of ECConnectorBase",
        ),
        (ConnectorConfig("Path", __name__), "--ec-connector", "Path", "not a subclass of ECConnectorBase"),
        (ConnectorConfig("KVPeerConnector", __name__), "--ec-connector", "KVPeerConnector", "not a subclass"),
        (ConnectorConfig("UnfinishedConnector", __name__), "--ec-connector", "UnfinishedConnector", "has_cache_item"),
        (ConnectorConfig("FailingConnector", __name__), "--ec-connector", "FailingConnector", "KeyError"),
        (ConnectorConfig("RefusingConnector", __name__), "mine", 3, "is odd"),
    ],
)
def test_what_is_wrong_is_named(connector: ConnectorConfig, option: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_ec_connector(connector, ec_config(), ECSide.SCHEDULER)
    assert caught.value.name == option
    assert caught.value.value == value
    assert reason in caught.value.reason


def test_a_module_that_fails_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"--ec-connector-module-path='broken_plugin'.*not today"):
        make_ec_connector(ConnectorConfig("A", "broken_plugin"), ec_config(), ECSide.SCHEDULER)


@pytest.mark.parametrize(
    ("make", "known"), [(make_ec_connector, "ECSharedStorageConnector"), (make_kv_connector, "KVPeerConnector")]
)
def test_an_unknown_name_lists_the_known_ones(
    make: Callable[..., ECConnectorBase | KVConnectorBase], known: str
) -> None:
    with pytest.raises(ConfigError, match=f"-connector='Nope'.*{known}"):
        make(ConnectorConfig("Nope"), None, None)
