"""Real Redis servers on free loopback ports, no persistence: one alone, with TLS, with users, cluster, Sentinel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from core.ports import free_ports

_START_S = 60.0


class RedisServer:
    """One `redis-server` process in a folder of its own; ended by `stop`. `options` are lines of its configuration.

    `port` is the plain port, or the only one that speaks TLS where `tls` is given.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int | None = None,
        password: str | None = None,
        tls: TlsFiles | None = None,
        sentinel: bool = False,
    ) -> None:
        self.folder = folder
        self.port = port or free_ports(1)[0]
        self.password = password
        self.tls = tls
        folder.mkdir(exist_ok=True)
        self._config = folder / "redis.conf"
        lines = ["bind 127.0.0.1", "dir .", 'save ""', "appendonly no", "protected-mode no", "loglevel warning"]
        lines += ["enable-debug-command local"] if not sentinel else []
        if sentinel:
            lines = ["bind 127.0.0.1", "dir .", "protected-mode no"]
        if tls is None:
            lines.append(f"port {self.port}")
        else:
            lines += [f"port 0\ntls-port {self.port}", "tls-auth-clients no", f"tls-ca-cert-file {tls.ca}"]
            lines += [f"tls-cert-file {tls.cert}", f"tls-key-file {tls.key}"]
        if password is not None:
            lines.append(f"requirepass {password}")
        self._config.write_text("\n".join([*lines, *options]) + "\n")
        self._arguments = ["--sentinel"] if sentinel else []
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"{'rediss' if self.tls else 'redis'}://{login}127.0.0.1:{self.port}"

    @property
    def extra(self) -> dict[str, Any]:
        """For the connector's extra config."""
        return {"url": self.url, **({"tls_ca_file": str(self.tls.ca)} if self.tls else {})}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self, **given: Any) -> redis.Redis:
        """To look inside. To be closed by the caller; `with` does it."""
        secure = {"ssl": True, "ssl_ca_certs": str(self.tls.ca)} if self.tls else {}
        options: dict[str, Any] = {"password": self.password, "socket_timeout": 30, "protocol": 2, **secure, **given}
        options.setdefault("retry", Retry(NoBackoff(), 0))
        return redis.Redis("127.0.0.1", self.port, **options)

    def start(self) -> None:
        """Start (again) on the same port, empty, and wait until it answers."""
        assert self._process is None
        end_s = time.monotonic() + _START_S
        with (self.folder / "log").open("ab") as log:
            command = ["redis-server", str(self._config), *self._arguments]
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        while True:
            try:
                with self.client() as client:
                    client.ping()
                    return
            except redis.AuthenticationError:
                return  # it is up, and wants what we do not have
            except redis.ConnectionError:
                pass
            if self._process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                raise AssertionError("redis-server did not start: " + (self.folder / "log").read_text())
            time.sleep(0.01)  # a server that starts tells nobody

    def kill(self) -> None:
        """As a crash does it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill

    def freeze(self) -> None:
        """Connections stay, and the kernel goes on accepting; nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class TlsFiles:
    """A certificate authority of the test's own, a server's certificate for 127.0.0.1, and another authority."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        server = authority.issue_cert("127.0.0.1")
        self.ca, self.cert, self.key, self.other_ca = (folder / name for name in ("ca", "cert", "key", "other"))
        authority.cert_pem.write_to_path(str(self.ca))
        server.cert_chain_pems[0].write_to_path(str(self.cert))
        server.private_key_pem.write_to_path(str(self.key))
        trustme.CA().cert_pem.write_to_path(str(self.other_ca))


@contextlib.contextmanager
def redis_server(*options: str, **given: Any) -> Iterator[RedisServer]:
    """A server for a `with` block."""
    with tempfile.TemporaryDirectory(prefix="triptych-redis-") as folder:
        server = RedisServer(Path(folder) / "server", *options, **given)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def redis_cluster(num_masters: int = 3, num_replicas: int = 0) -> Iterator[list[RedisServer]]:
    """Masters that share the slots, in order, then one replica of each of the first `num_replicas`; all of it known to
    every node."""
    # Where nobody can take over, nobody is to be thought dead because the machine is busy.
    node_timeout_ms = 2000 if num_replicas else 60_000
    settings = ("cluster-enabled yes", f"cluster-node-timeout {node_timeout_ms}", "repl-diskless-sync-delay 0")
    with tempfile.TemporaryDirectory(prefix="triptych-redis-") as folder, contextlib.ExitStack() as stack:
        nodes = []
        for number in range(num_masters + num_replicas):
            server = RedisServer(Path(folder) / f"node-{number}", *settings, port=free_ports(1, beside=10_000)[0])
            stack.callback(server.stop)
            nodes.append(server)
        masters, replicas = nodes[:num_masters], nodes[num_masters:]
        clients = [stack.enter_context(node.client()) for node in nodes]
        share = 16384 // num_masters
        for number, client in enumerate(clients[:num_masters]):
            last = 16383 if number == num_masters - 1 else (number + 1) * share - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for client in clients[1:]:
            client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
        _wait(lambda: all(_is_settled(client, len(nodes)) for client in clients), "the cluster did not form")
        for number, client in enumerate(clients[num_masters:]):
            client.execute_command("CLUSTER REPLICATE", clients[number].execute_command("CLUSTER MYID").decode())
        for client in clients[num_masters:]:
            _wait(lambda client=client: client.info("replication").get("master_link_status") == "up", "no replication")
        if replicas:
            _wait(lambda: all(b"slave" in _nodes(client) for client in clients), "nobody heard of the replica")
        yield [*masters, *replicas]


@contextlib.contextmanager
def redis_sentinel(service: str, num_sentinels: int = 3) -> Iterator[tuple[list[RedisServer], list[RedisServer]]]:
    """A master and a replica of it, and sentinels that watch them and know each other."""
    with tempfile.TemporaryDirectory(prefix="triptych-redis-") as folder, contextlib.ExitStack() as stack:

        def start(name: str, *options: str, **given: Any) -> RedisServer:
            server = RedisServer(Path(folder) / name, *options, **given)
            stack.callback(server.stop)
            return server

        master = start("master", "repl-diskless-sync-delay 0")
        replica = start("replica", f"replicaof 127.0.0.1 {master.port}", "repl-diskless-sync-delay 0")
        watch = (
            f"sentinel monitor {service} 127.0.0.1 {master.port} {num_sentinels // 2 + 1}",
            f"sentinel down-after-milliseconds {service} 1000",
            f"sentinel failover-timeout {service} 3000",
        )
        sentinels = [start(f"sentinel-{n}", *watch, sentinel=True) for n in range(num_sentinels)]
        clients = [stack.enter_context(sentinel.client()) for sentinel in sentinels]

        def know_each_other() -> bool:
            states = [_pairs(client.execute_command("SENTINEL MASTER", service)) for client in clients]
            return all(
                int(state["num-other-sentinels"]) == num_sentinels - 1 and int(state["num-slaves"]) == 1
                for state in states
            )

        _wait(know_each_other, "the sentinels did not find each other")
        yield [master, replica], sentinels


def await_replicas(client: redis.Redis) -> None:
    """Until they have all that the master has. WAIT is no help: it counts what its own connection wrote."""

    def have_all() -> bool:
        told = client.info("replication")
        replicas = [told[f"slave{number}"] for number in range(told["connected_slaves"])]
        return bool(replicas) and all(each["offset"] >= told["master_repl_offset"] for each in replicas)

    _wait(have_all, "the replica lags behind")


def _is_settled(client: redis.Redis, num_nodes: int) -> bool:
    info: Any = client.execute_command("CLUSTER INFO")
    state = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().splitlines() if line)
    return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == num_nodes


def _nodes(client: redis.Redis) -> bytes:
    nodes: Any = client.execute_command("CLUSTER NODES")
    return nodes if isinstance(nodes, bytes) else repr(nodes).encode()


def _pairs(reply: Any) -> dict[str, str]:
    if isinstance(reply, dict):
        return {str(k): str(v) for k, v in reply.items()}
    texts: Sequence[str] = [item.decode() if isinstance(item, bytes) else str(item) for item in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _wait(condition: Any, complaint: str, within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, complaint
        time.sleep(0.02)  # a cluster that forms tells nobody
