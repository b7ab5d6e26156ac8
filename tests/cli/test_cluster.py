"""Processes of a local cluster: none outlives it, and a start that fails says which one and why.

A cluster of real services is the end-to-end tests' subject.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from cli import reaper
from cli.cluster import ClusterError, LocalCluster, _names_a_store, _without_kv
from cli.process import Child
from tests.cli.program import ROOT, environment, triptych
from tests.cli.stub_stage import StubCluster

# Says that it is ready, with a grandchild that ignores SIGTERM.
READY = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
print("some log line", file=sys.stderr, flush=True)
print(f"ready thing grpc=127.0.0.1:5 metrics=127.0.0.1:6 child={child.pid}", flush=True)
signal.pause()
"""


def child_of(code: str, log_path: Path | None = None) -> Child:
    return Child("thing", [sys.executable, "-c", code], env=dict(os.environ), log_path=log_path)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def await_gone(pid: int, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)  # not our child: there is nothing to wait on


def soon(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def test_a_child_is_ready_logs_and_takes_its_children_along(tmp_path: Path) -> None:
    child = child_of(READY, tmp_path / "thing.log")
    for _ in range(2):  # it can be started again
        child.start()
        assert child.wait_ready(soon())
        assert (child.grpc, child.metrics) == ("127.0.0.1:5", "127.0.0.1:6")
        child.terminate()
        assert child.wait_ended(soon())
        await_gone(int(child.addresses["child"]))
    assert "some log line" in child.tail()
    assert (tmp_path / "thing.log").read_text().count("some log line") == 2


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    child = child_of("import signal; signal.signal(15, signal.SIG_IGN); print('ready x', flush=True); signal.pause()")
    child.start()
    assert child.wait_ready(soon())
    child.terminate()
    assert not child.wait_ended(soon(0.2))
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_that_dies_early_leaves_its_last_words() -> None:
    child = child_of("import sys; print('error: no', file=sys.stderr); sys.exit(3)")
    child.start()
    assert not child.wait_ready(soon())
    assert child.wait_ended(soon())
    assert child.process.returncode == 3
    assert child.tail() == ["error: no"]


def test_the_reaper_ends_what_its_starter_left_behind(tmp_path: Path) -> None:
    left, ended = child_of(READY), child_of(READY)
    groups = [left.start(), ended.start()]
    assert left.wait_ready(soon())
    assert ended.wait_ready(soon())
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "item").write_bytes(b"x")
    argv = [sys.executable, "-I", "-S", reaper.__file__, "0.3"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, text=True) as process:
        process.stdin.write(f"+{groups[0]}\n+{groups[1]}\nd{folder}\n-{groups[1]}\n")
        process.stdin.flush()
        assert folder.exists()
        process.stdin.close()  # as when the starter is killed
        assert left.process.wait(60) == -signal.SIGTERM
        # The grandchild ignores SIGTERM and is killed after the grace.
        await_gone(int(left.addresses["child"]))
    assert not folder.exists()
    assert ended.process.poll() is None
    ended.kill_group()
    ended.wait_ended(soon())


def test_a_cluster_that_cannot_start_says_which_and_why(tmp_path: Path) -> None:
    cluster = LocalCluster(service_args=["--dtype", "float12"], log_dir=tmp_path)
    with pytest.raises(ClusterError) as error:
        cluster.start(100)
    assert "ended with exit code 2 before everything was ready" in str(error.value)
    assert "--dtype='float12'" in str(error.value)
    assert cluster.dead() is not None
    assert all(gone(pid) for pid in cluster.pids.values())
    assert "float12" in (tmp_path / f"{error.value.name}.log").read_text()


async def test_up_reports_a_wrong_option_in_one_line_and_exits_with_2() -> None:
    code, out, err = await triptych("up", "--router-port", "0", "--http-port", "0", "--dtype", "float12")
    assert (code, out) == (2, "")
    [said] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "ended with exit code 2 before everything was ready: --dtype='float12'" in said


def test_encoders_do_not_get_kv_options() -> None:
    args = ["--dtype=float32", "--kv-connector", "Mine", "--kv-connector-extra-config={}", "--device", "cpu"]
    assert _without_kv(args) == ["--dtype=float32", "--device", "cpu"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--dtype", "float32", "--ec-role=ec_both"], False),
        (["--ec-connector", "ECSharedStorageConnector"], False),
        (["--ec-connector=ECRedisConnector"], True),
        (["--ec-connector-extra-config", '{"shared_storage_path": "/store"}'], True),
        (["--ec-transfer-config={}"], True),
    ],
)
def test_the_private_store_is_the_default_only(args: list[str], expected: bool, monkeypatch) -> None:
    monkeypatch.delenv("TRIPTYCH_EC_CONNECTOR", raising=False)
    assert _names_a_store(args) is expected
    monkeypatch.setenv("TRIPTYCH_EC_CONNECTOR", "ECRedisConnector")
    assert _names_a_store([]) is True


@pytest.mark.faults("a decode worker is killed")
async def test_a_cluster_serves_restarts_and_stops() -> None:
    cluster = StubCluster(encoders=2)
    store = None
    try:
        await asyncio.to_thread(cluster.start, 100)
        assert list(cluster.pids) == ["router", "encoder-0", "encoder-1", "prefill-0", "decode-0"]
        argv = cluster.workers["prefill"][0].argv
        (extra,) = (arg for arg in argv if arg.startswith("--ec-connector-extra-config="))
        store = Path(json.loads(extra.partition("=")[2])["shared_storage_path"]).parent
        assert store.stat().st_mode & 0o077 == 0
        generate = ("generate", "--router", cluster.router, "--prompt", "hi", "--max-tokens", "2")
        assert (await triptych(*generate))[:2] == (0, "<0><1>\n")
        before = cluster.workers["decode"][0].process
        before.kill()
        before.wait()
        assert cluster.dead() is cluster.workers["decode"][0]
        assert (await triptych(*generate))[0] == 1
        again = await asyncio.to_thread(cluster.restart, "decode", 0)
        assert again.process.pid != before.pid
        code = 1
        async with asyncio.timeout(60):
            while code:  # until the router has seen that it is back
                code, out, err = await triptych(*generate)
        assert out == "<0><1>\n", err
    finally:
        pids = cluster.pids
        await asyncio.to_thread(cluster.stop)
    assert [child.process.returncode for child in cluster._children()] == [0] * 5
    assert all(gone(pid) for pid in pids.values())
    assert not store.exists()


def test_no_child_outlives_a_starter_that_is_killed() -> None:
    code = "\n".join(
        [
            "import signal",
            "from tests.cli.stub_stage import StubCluster",
            "cluster = StubCluster().start(100)",
            "print(*cluster.pids.values(), cluster._folder, flush=True)",
            "signal.pause()",
        ]
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        *pids, folder = starter.stdout.readline().split()
        starter.kill()
    assert len(pids) == 4
    for pid in pids:
        await_gone(int(pid))
    deadline = soon()
    while Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the reaper is not our child


@pytest.mark.parametrize("ended_by", ["SIGTERM", "SIGINT", "a dead worker"])
async def test_up_prints_one_line_and_ends_with_everything_it_started(ended_by: str, tmp_path: Path) -> None:
    code = "import cli.up, cli.__main__, tests.cli.stub_stage as s; cli.up.LocalCluster = s.StubCluster; "
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code + "cli.__main__.main()",
        "up", "--router-port", "0", "--http-port", "0", "--log-dir", str(tmp_path), "--", "--max-waiting", "7",
        cwd=ROOT, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(100):
        line = (await process.stdout.readline()).decode()
        where = dict(word.split("=") for word in line.split()[1:])
        assert line.startswith("ready router=127.0.0.1:")
        assert list(where) == ["router", "http"]
        async with aiohttp.ClientSession() as http, http.get(f"http://{where['http']}/ready") as response:
            assert response.status == 200
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 5  # four and the reaper
        if ended_by == "a dead worker":
            victim = next(child for child in children if "--where=prefill-0" in child.cmdline())
            assert "--max-waiting" in victim.cmdline()
            victim.kill()
        else:
            process.send_signal(signal.Signals[ended_by])
        out, err = await process.communicate()
    assert out == b""
    if ended_by == "a dead worker":
        assert process.returncode == 1
        assert b"error: prefill-0 ended with exit code -9; stopping the others" in err
    else:
        assert process.returncode == 0, err
    assert not any(child.is_running() for child in children)
    assert (tmp_path / "router.log").read_text()
