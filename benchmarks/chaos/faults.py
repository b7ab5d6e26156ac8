"""What is done to one worker, and how it is undone."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from benchmarks.chaos.cluster import ChaosCluster

#: Undoes a fault. Raises ClusterError where a worker does not come back.
Heal = Callable[[], object]
Fault = Callable[[ChaosCluster, str, int], Heal]

_SLOW_S = 0.02


def kill_front(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """SIGKILL to the process that speaks gRPC; its engine ends by itself."""
    _signal(cluster.workers[stage][index].process.pid, signal.SIGKILL)
    return lambda: cluster.restart(stage, index)


def kill_engine(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """SIGKILL to the process that holds the tensors; its front says so and ends."""
    _signal(cluster.engine_pid(stage, index), signal.SIGKILL)
    return lambda: cluster.restart(stage, index)


def terminate(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """SIGTERM: it drains."""
    _signal(cluster.workers[stage][index].process.pid, signal.SIGTERM)
    return lambda: cluster.restart(stage, index)


def replace(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """It leaves by the admin call and drains; another process takes its place and joins in the same way."""
    cluster.leave(stage, index)
    _signal(cluster.workers[stage][index].process.pid, signal.SIGTERM)

    def heal() -> None:
        cluster.restart(stage, index)
        cluster.join(stage, index)

    return heal


def stop_front(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """SIGSTOP to the process that speaks gRPC: sockets stand, nothing is said."""
    return _stopped(cluster.workers[stage][index].process.pid)


def stop_engine(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """SIGSTOP to the engine: its front goes on saying that it serves."""
    return _stopped(cluster.engine_pid(stage, index))


def close_port(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """Its port refuses connections, those that were are broken."""
    relay = cluster.relays[stage][index]
    relay.close_port()
    return relay.heal


def cut(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """Its connections break once."""
    relay = cluster.relays[stage][index]
    relay.cut()
    return relay.heal


def stall(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """Its connections stand and pass nothing, as where a network has gone."""
    relay = cluster.relays[stage][index]
    relay.stall()
    return relay.heal


def slow(cluster: ChaosCluster, stage: str, index: int) -> Heal:
    """Whatever it sends or gets is late."""
    relay = cluster.relays[stage][index]
    relay.slow(_SLOW_S)
    return relay.heal


FAULTS: dict[str, Fault] = {
    "kill": kill_front,
    "kill engine": kill_engine,
    "terminate": terminate,
    "replace": replace,
    "stop": stop_front,
    "stop engine": stop_engine,
    "close port": close_port,
    "cut": cut,
    "stall": stall,
    "slow": slow,
}

#: Those that only silence gives away: they must last longer than the router waits for a word.
SILENT = frozenset(("stop", "stop engine", "stall"))


def _stopped(pid: int) -> Heal:
    _signal(pid, signal.SIGSTOP)
    return lambda: _signal(pid, signal.SIGCONT)


def _signal(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, which)
