"""Harnesses that only tests need: a Redis that wants TLS and a password, the folder of the ported example."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from connectors.conformance import Harness
from connectors.conformance.harnesses.redis import RedisHarness
from tests.connectors.redis_server import TlsFiles

_PASSWORD = "correct-horse"
#: What connectors/ec/redis_connector.py says that a user must be allowed.
_COMMANDS = "exists getex getrange set pexpire renamenx unlink watch unwatch multi exec eval zadd zscore zrem zrange"
_MORE = "zrangebyscore time"


class TlsRedisHarness(RedisHarness):
    """TLS alone, no default user, and one for the connector that may do what the connector needs and no more."""

    def __init__(self, folder: Path, extra: Mapping[str, Any]) -> None:
        super().__init__(folder, extra)
        self._tls = TlsFiles(folder)
        (folder / "password").write_text(_PASSWORD)

    def server_options(self) -> Sequence[str]:
        allowed = " ".join(f"+{command}" for command in f"{_COMMANDS} {_MORE}".split())
        return [
            "port 0",
            f"tls-port {self.port}",
            "tls-auth-clients no",
            f"tls-ca-cert-file {self._tls.ca}",
            f"tls-cert-file {self._tls.cert}",
            f"tls-key-file {self._tls.key}",
            "user default off",
            "user keeper on >keeper ~* &* +@all",
            f"user cache on >{_PASSWORD} ~triptych:* {allowed}",
        ]

    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}"

    def extra(self) -> Mapping[str, Any]:
        login = {"username": "cache", "password_file": str(self.folder / "password")}
        return {**super().extra(), **login, "tls_ca_file": str(self._tls.ca)}

    def client(self) -> redis.Redis:
        secure: dict[str, Any] = {"ssl": True, "ssl_ca_certs": str(self._tls.ca)}
        login = {"username": "keeper", "password": "keeper"}
        return redis.Redis("127.0.0.1", self.port, socket_timeout=5, protocol=2, **secure, **login)


class FileHarness(Harness):
    """The folder of `examples.ported_connector`, which can be moved away."""

    def __init__(self, folder: Path, extra: Mapping[str, Any]) -> None:
        super().__init__(folder, extra)
        self._root, self._away = folder / "items", folder / "away"

    def open(self) -> None:
        self._root.mkdir()

    def extra(self) -> Mapping[str, Any]:
        return {"folder": str(self._root)}

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return {"timeout_s": seconds}

    def stop(self) -> None:
        self._root.rename(self._away)

    def start(self) -> None:
        self._away.rename(self._root)

    def left_overs(self) -> list[str]:
        return [name for name in os.listdir(self._root) if name.endswith(".tmp")]

    def restore(self) -> None:
        if self._away.exists():
            self.start()
        for path in self._root.iterdir():  # temporaries of killed writers among them: nobody sweeps here
            path.unlink()

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
