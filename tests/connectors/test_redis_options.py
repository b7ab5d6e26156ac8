"""What an operator may write for ECRedisConnector, and that no error shows a password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.ec.base import ECConnectorConfig, ECSide
from connectors.ec.redis_connector import ECRedisConnector
from connectors.ec.redis_url import Address, Login, RedisLocation, parse_url, read_password
from connectors.factory import make_ec_connector
from core.config import ConnectorConfig
from core.errors import ConfigError
from core.types import ECRole
from tests.connectors.redis_server import TlsFiles
from tests.connectors.support import NAMESPACE, connector_threads

SECRET = "hunter2"


def make(extra: dict[str, Any]) -> None:
    config = ECConnectorConfig(ECRole.BOTH, NAMESPACE, torch.float32, 6, extra, lambda: None)
    make_ec_connector(ConnectorConfig("ECRedisConnector", None, extra), config, ECSide.WORKER).close()


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("redis://cache", RedisLocation("single", (Address("cache", 6379),))),
        (
            "rediss://ada:p%40ss@cache.example:7000/5",
            RedisLocation("single", (Address("cache.example", 7000),), tls=True, db=5, login=Login("ada", "p@ss")),
        ),
        ("redis://:s3cret@[::1]:1", RedisLocation("single", (Address("::1", 1),), login=Login(None, "s3cret"))),
        ("redis://ada:a@b@h/", RedisLocation("single", (Address("h", 6379),), login=Login("ada", "a@b"))),
        ("unix:///run/redis.sock?db=2", RedisLocation("single", path="/run/redis.sock", db=2)),
        ("unix://:pw@/a%20b", RedisLocation("single", path="/a b", login=Login(None, "pw"))),
        (
            "redis+sentinel://a,b:1/mymaster/3",
            RedisLocation("sentinel", (Address("a", 26379), Address("b", 1)), service="mymaster", db=3),
        ),
        ("rediss+cluster://a,b:7001", RedisLocation("cluster", (Address("a", 6379), Address("b", 7001)), tls=True)),
    ],
)
def test_urls(url: str, location: RedisLocation) -> None:
    assert parse_url(url) == location


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cache:6379",
        f"http://u:{SECRET}@h",
        f"redis://u:{SECRET}@",
        f"redis://u:{SECRET}@h:0",
        f"redis://u:{SECRET}@h:65536",
        f"redis://u:{SECRET}@h:port",
        f"redis://u:{SECRET}@h/one",
        f"redis://u:{SECRET}@h/1/2",
        f"redis://u:{SECRET}@h/99999",
        f"redis://u:{SECRET}@h?socket_timeout=1",
        f"redis://u:{SECRET}#2@h",
        f"redis://u:{SECRET}@h,i",
        f"redis://u:{SECRET}@::1",
        f"redis://u:{SECRET}@[::1",
        f"redis://u:{SECRET}@h h",
        f"redis://u:{SECRET}@h\n",
        f"redis://u:{SECRET}@" + "h" * 5000,
        f"unix://u:{SECRET}@host/path",
        f"unix://u:{SECRET}@/path?x=1",
        f"redis+sentinel://u:{SECRET}@h",
        f"redis+sentinel://u:{SECRET}@h/my%20master",
        f"redis+cluster://u:{SECRET}@h/1",
        f"redis+cluster://u:{SECRET}@" + ",".join("h" * 33),
        [f"redis://u:{SECRET}@h"],
        {"password": SECRET},
        None,
    ],
)
def test_bad_urls_are_refused_without_showing_the_password(url: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make({"url": url})
    assert "--ec-connector-extra-config url" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value)
    assert connector_threads() == []


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"url": None}, "url"),
        ({"password": SECRET}, "password"),
        ({"sentinel_password": SECRET}, "sentinel_password"),
        ({"url": f"redis://ada:{SECRET}@h", "username": "ada", "password_env": "SECRET_OF_TEST"}, "username"),
        ({"url": f"redis://:{SECRET}@h", "password_env": "SECRET_OF_TEST"}, "password_env"),
        ({"username": "ada"}, "username"),
        ({"password_env": "NO_SUCH_VARIABLE_OF_TEST"}, "password_env"),
        ({"password_file": "/no/such/file"}, "password_file"),
        ({"password_file": "/"}, "password_file"),
        ({"password_file": "/dev/null"}, "password_file"),
        ({"password_file": "/dev/zero"}, "password_file"),
        ({"password_file": "a\0b"}, "password_file"),
        ({"password_file": "a", "password_env": "b"}, "password_file"),
        ({"sentinel_username": "ada"}, "sentinel_username"),
        ({"url": "redis+sentinel://h/s", "sentinel_username": "ada"}, "sentinel_username"),
        ({"tls_ca_file": "/dev/null"}, "tls_ca_file"),
        ({"url": "rediss://h", "tls_ca_file": "/no/such/file"}, "tls_ca_file"),
        ({"url": "rediss://h", "tls_ca_file": "/dev/null"}, "tls_ca_file"),
        ({"url": "rediss://h", "tls_cert_file": "/dev/null"}, "tls_cert_file"),
        ({"url": "rediss://h", "tls_key_file": "/dev/null"}, "tls_key_file"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": float("inf")}, "ttl_s"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": 1.5}, "max_bytes"),
        ({"chunk_bytes": 100}, "chunk_bytes"),
        ({"max_connections": 1}, "max_connections"),
        ({"max_connections": 4, "num_threads": 4}, "max_connections"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"urls": "redis://h"}, "urls"),
    ],
)
def test_bad_options_are_refused_by_name(extra: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", SECRET)
    with pytest.raises(ConfigError) as caught:
        make({"url": "redis://h", **extra})
    assert caught.value.name == f"--ec-connector-extra-config {name}"
    assert SECRET not in str(caught.value)
    assert connector_threads() == []


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_line_end_is_no_part_of_a_password(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Secret made of a file has the file's last one, as a variable and as a file."""
    (tmp_path / "password").write_bytes(f'a "{SECRET}\\{end}'.encode())
    monkeypatch.setenv("SECRET_OF_TEST", f'a "{SECRET}\\{end}')
    assert read_password("password_file", None, "password_env", "SECRET_OF_TEST") == f'a "{SECRET}\\'
    assert read_password("password_file", str(tmp_path / "password"), "password_env", None) == f'a "{SECRET}\\'


def test_a_password_of_nothing_but_a_line_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", "\r\n")
    with pytest.raises(ConfigError, match="it is empty"):
        read_password("password_file", None, "password_env", "SECRET_OF_TEST")


def test_tls_files_that_fit_are_accepted(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    names = {"tls_ca_file": files.ca, "tls_cert_file": files.cert, "tls_key_file": files.key}
    make({"url": "rediss://127.0.0.1:1", **{name: str(path) for name, path in names.items()}})
    with pytest.raises(ConfigError, match="tls_cert_file"):
        make({"url": "rediss://h", "tls_cert_file": str(files.cert), "tls_key_file": str(files.ca)})


def test_no_repr_shows_the_password() -> None:
    location = parse_url(f"redis://ada:{SECRET}@h")
    assert SECRET not in repr(location)
    assert ECRedisConnector.options_type.__name__ == "RedisOptions"
