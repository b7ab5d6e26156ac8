"""What crosses between an engine and its worker process, as msgpack."""

from __future__ import annotations

import msgspec

from connectors.ec.base import ECConnectorOutput
from connectors.kv.base import KVConnectorOutput
from core.errors import ConfigError, EngineError
from engine.executor.base import Handshakes, WorkerReport, WorkerSpec
from engine.executor.metadata import decode_metadata, encode_metadata, type_name
from engine.memory import CacheSizes
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


class WorkerStart(msgspec.Struct, array_like=True):
    """The first message. Answered with a report."""

    spec: WorkerSpec
    metadata: list[str]  # names of the classes that will come; unknown ones stop the start


class StepOrder(msgspec.Struct, array_like=True):
    """A step. Answered with what the runner made."""

    out: SchedulerOutput  # without the connectors' orders
    ec: bytes
    kv: bytes


class ToWorker(msgspec.Struct, array_like=True):
    """One of its parts is set."""

    start: WorkerStart | None = None
    sizes: CacheSizes | None = None  # answered with handshakes
    step: StepOrder | None = None
    shutdown: bool = False  # not answered: the process ends


class Problem(msgspec.Struct, array_like=True):
    """What an order ended in. With a `name` it is a ConfigError's parts."""

    name: str
    value: str
    reason: str


class FromWorker(msgspec.Struct, array_like=True):
    """The answer to an order, in the order of the orders. One of its parts is set."""

    report: WorkerReport | None = None
    handshakes: Handshakes | None = None
    made: ModelRunnerOutput | None = None
    problem: Problem | None = None


def pack_step(out: SchedulerOutput) -> StepOrder:
    """`out` itself stays as it is."""
    bare = msgspec.structs.replace(out, ec_metadata=None, kv_metadata=None)
    return StepOrder(bare, encode_metadata(out.ec_metadata), encode_metadata(out.kv_metadata))


def unpack_step(order: StepOrder) -> SchedulerOutput:
    order.out.ec_metadata = decode_metadata(order.ec)
    order.out.kv_metadata = decode_metadata(order.kv)
    return order.out


def error_of(problem: Problem, worker: str) -> Exception:
    """What the engine raises for it."""
    if problem.name:
        return ConfigError(problem.name, problem.value, problem.reason)
    return EngineError(f"{worker}: {problem.reason}")


def check_made(made: ModelRunnerOutput) -> ModelRunnerOutput:
    """Raises EngineError where a connector reported a subclass, whose own fields would be lost on the way."""
    for report, base in ((made.ec, ECConnectorOutput), (made.kv, KVConnectorOutput)):
        if report is not None and type(report) is not base:
            raise EngineError(f"a connector reported a {type_name(type(report))}; only {base.__name__} can cross")
    return made
