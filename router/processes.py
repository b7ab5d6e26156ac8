"""Several router processes on one port: `--processes N`.

The kernel spreads connections over all that listen with SO_REUSEPORT. The processes share nothing: each knows the
workers for itself. Their starter serves no requests; it keeps the ports, starts a process again that dies, adds up
nothing but the Admin service's answers, and stops all of them. Counts lie in files that /metrics of any process adds up
(prometheus_client's multiprocess mode).

Starter and process talk in lines of JSON: the starter writes a `Start` and then `Command`s to the process's standard
input, the process prints `ready …` once and then `Answer`s. When that input closes, the starter is gone, and the
process drains and ends as at a SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from core import logs
from core.errors import EXIT_CONFIG, StageUnavailableError
from core.server import address, check_bindable, wait_for_signal
from core.types import Stage
from router.admin import start_admin
from router.metrics import MULTIPROCESS_VARIABLE
from router.policies.registry import make_policy
from router.roster import Roster, Row
from router.serve import Among, serve
from router.settings import RouterSettings

logger = logging.getLogger(__name__)

_PROGRAM = str(Path(__file__).resolve().parent)  # `python router process`
_ANSWER_TIMEOUT_S = 5.0
_KILL_AFTER_S = 10.0  # of a drain that should be over
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_MAX_LINE_BYTES = 16 * 1024 * 1024


class Start(msgspec.Struct, frozen=True):
    """What a process is told first."""

    settings: RouterSettings
    number: int


class Command(msgspec.Struct, frozen=True):
    """What the Admin service wants of it."""

    number: int
    what: Literal["list", "add", "remove"]
    stage: str = ""
    address: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What became of the command of that number."""

    number: int
    done: bool = False
    rows: list[Row] = []


# -- in a process --


async def run_process() -> int:
    """Be one of the processes. Raises what `serve` does."""
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    start = msgspec.json.decode(await reader.readline(), type=Start)
    logs.setup(start.settings.log_level, f"router-{start.number}", start.settings.log_format)

    async def obey(roster: Roster) -> None:
        while line := await reader.readline():
            command = msgspec.json.decode(line, type=Command)
            answer = Answer(command.number)
            if command.what == "list":
                answer = Answer(command.number, rows=await roster.rows())
            else:
                change = roster.add if command.what == "add" else roster.remove
                answer = Answer(command.number, done=await change(Stage(command.stage), command.address))
            logs.say(msgspec.json.encode(answer).decode(), sys.stdout)
        logger.warning("the starter of this process is gone")

    try:
        return await serve(start.settings, Among(start.number, obey))
    finally:
        if reader.at_eof():  # nobody else will
            shutil.rmtree(os.environ[MULTIPROCESS_VARIABLE], ignore_errors=True)


# -- in their starter --


class _Process:
    """One process and the answers that it owes."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process
        self.is_ready = False
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def tell(self, message: Start | Command) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is ending; whoever follows it finds out
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def ask(self, command: Command) -> Answer:
        """Raises StageUnavailableError where it does not answer."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[command.number] = answer
        try:
            self.tell(command)
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise StageUnavailableError(Stage.ROUTER, f"process {self.number} does not answer") from None
        finally:
            del self._waiting[command.number]

    def close(self) -> None:
        """It has ended: nobody need wait for its answers."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(StageUnavailableError(Stage.ROUTER, f"process {self.number} has ended"))

    def heard(self, line: bytes) -> None:
        answer = msgspec.json.decode(line, type=Answer)
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class Supervisor:
    """The processes of one router, and their Admin service's `Workers`. Event loop only."""

    def __init__(self, settings: RouterSettings, folder: str) -> None:
        self._settings = settings
        self._folder = folder
        self._processes: dict[int, _Process] = {}
        self._numbers = itertools.count()
        # What the admin call has changed, for processes that are started again.
        self._changes: dict[tuple[Stage, str], Literal["add", "remove"]] = {}
        self._all_ready = asyncio.Event()
        self._is_stopping = False

    async def wait_until_ready(self) -> None:
        """Return once every process serves."""
        await self._all_ready.wait()

    async def keep(self, number: int) -> int:
        """Run process `number`, again whenever it dies. Returns its exit code once it was stopped, or at once where
        its options are wrong."""
        pause_s = _FIRST_PAUSE_S
        while True:
            code = await self._run(number)
            if self._is_stopping or (code == EXIT_CONFIG and not self._all_ready.is_set()):
                return code
            logger.error("router process %d ended with %d; it is started again", number, code)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def stop(self) -> None:
        """Let all of them drain."""
        self._is_stopping = True
        for each in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                each.process.terminate()

    async def _run(self, number: int) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            _PROGRAM,
            "process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, MULTIPROCESS_VARIABLE: self._folder},
            limit=_MAX_LINE_BYTES,
        )
        mine = self._processes[number] = _Process(number, process)
        try:
            mine.tell(Start(self._settings, number))
            for (stage, where), what in self._changes.items():
                mine.tell(Command(next(self._numbers), what, stage.value, where))
            assert process.stdout is not None
            while line := await process.stdout.readline():
                if line.startswith(b"ready "):
                    mine.is_ready = True
                    if sum(each.is_ready for each in self._processes.values()) == self._settings.processes:
                        self._all_ready.set()
                else:
                    mine.heard(line)
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            del self._processes[number]
            mine.close()
            mark_process_dead(process.pid, self._folder)  # type: ignore[no-untyped-call]

    # -- `router.roster.Workers` --

    async def rows(self) -> list[Row]:
        answers = await asyncio.gather(
            *(each.ask(Command(next(self._numbers), "list")) for _, each in sorted(self._processes.items()))
        )
        return [row for answer in answers for row in answer.rows]

    async def add(self, stage: Stage, address: str) -> bool:
        return await self._change("add", stage, address)

    async def remove(self, stage: Stage, address: str) -> bool:
        return await self._change("remove", stage, address)

    async def _change(self, what: Literal["add", "remove"], stage: Stage, where: str) -> bool:
        self._changes[(stage, where)] = what
        answers = await asyncio.gather(
            *(each.ask(Command(next(self._numbers), what, stage.value, where)) for each in self._processes.values())
        )
        return any(answer.done for answer in answers)


async def supervise(settings: RouterSettings) -> int:
    """Run `settings.processes` routers on the same ports until SIGTERM or SIGINT, and print the same line as `serve`
    once all of them are ready. Returns the exit code: 0, or that of a process that was wrong from the start.

    Raises ConfigError where a port cannot be had or a policy be made.
    """
    for option, policy in settings.policies():
        make_policy(option, policy)  # here once, and not in each of them
    folder = tempfile.mkdtemp(prefix="triptych-router-")
    async with AsyncExitStack() as at_end:
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        port = at_end.enter_context(_reserved(settings.host, settings.port, "--port"))
        http_port = at_end.enter_context(_reserved(settings.host, settings.http_port, "--http-port"))
        supervisor = Supervisor(msgspec.structs.replace(settings, port=port, http_port=http_port), folder)
        ready = f"ready router grpc={address(settings.host, port)} http={address(settings.host, http_port)}"
        if settings.admin_port is not None:
            admin = await start_admin(settings.admin_host, settings.admin_port, supervisor)
            at_end.push_async_callback(admin.drain, 0)
            ready += f" admin={admin.bound}"
        async with _stopped_at_end(supervisor, settings) as keepers:
            stop = asyncio.create_task(wait_for_signal())
            is_ready = asyncio.create_task(supervisor.wait_until_ready())
            try:
                await asyncio.wait({stop, is_ready, *keepers}, return_when=asyncio.FIRST_COMPLETED)
                if is_ready.done():
                    logs.say(ready, sys.stdout)
                    await asyncio.wait({stop, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stop.cancel()
                is_ready.cancel()
        return max((keeper.result() for keeper in keepers if not keeper.cancelled()), default=0)


@asynccontextmanager
async def _stopped_at_end(supervisor: Supervisor, settings: RouterSettings) -> AsyncIterator[set[asyncio.Task[int]]]:
    keepers = {asyncio.create_task(supervisor.keep(number)) for number in range(settings.processes)}
    try:
        yield keepers
    finally:
        supervisor.stop()
        _, late = await asyncio.wait(keepers, timeout=settings.drain_timeout_s + _KILL_AFTER_S)
        for keeper in late:
            keeper.cancel()
        if late:
            await asyncio.wait(late)


@contextlib.contextmanager
def _reserved(host: str, port: int, option: str) -> Iterator[int]:
    """A port that nobody else has, for as long as it is wanted: bound, so that it stays ours while no process listens,
    and not listened on, so that no connection comes here."""
    check_bindable(host, port, port_option=option)
    family, kind, protocol, _, where = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(where)
        yield held.getsockname()[1]
