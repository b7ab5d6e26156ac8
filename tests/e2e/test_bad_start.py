"""Programs that cannot start: one line on standard error that names what is wrong with its value, and exit code 2.

The programs are the real ones. Those that end by themselves run side by side, since a service that gets as far as its
engine takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file, save_file

from cli.process import Child
from core.errors import EXIT_CONFIG
from protos import common_pb2, decode_pb2_grpc, router_pb2_grpc
from tests.e2e.conftest import TIMEOUT_S, Cluster, chat_request, wait_until

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ["--encoder=127.0.0.1:1", "--prefill=127.0.0.1:2", "--decode=127.0.0.1:3"]
FREE_PORTS = {"router": ["--port=0", "--http-port=0"], "service": ["--port=0", "--metrics-port=0"]}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Start:
    """A command line, its environment, and what the one line must hold."""

    program: str
    options: list[str]
    expected: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def run(self) -> Outcome:
        module = {"router": "router", "triptych": "cli"}.get(self.program, f"services.{self.program}")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
        done = subprocess.run(
            [sys.executable, "-m", module, *self.options],
            cwd=ROOT,
            env={**variables, **self.variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)


def check(start: Start, outcome: Outcome) -> None:
    assert outcome.code == EXIT_CONFIG, outcome
    assert outcome.out == ""
    # No traceback, no warning, no usage text: the line is all there is.
    [line] = outcome.err.splitlines()
    assert line.startswith("error: ")
    for text in start.expected:
        assert text in line


def service(stage: str, model: Path | str, *options: str, expected: list[str], **variables: str) -> Start:
    fixed = ["serve", "--log-level=ERROR", *FREE_PORTS["service"]]
    return Start(stage, [*fixed, *([f"--model={model}"] if model else []), *options], expected, variables)


def router(*options: str, expected: list[str], workers: list[str] | None = None, **variables: str) -> Start:
    named = WORKERS if workers is None else workers
    return Start("router", ["serve", *named, *FREE_PORTS["router"], *options], expected, variables)


# ---- options ----


def options(model: Path) -> dict[str, Start]:
    def encoder(*given: str, expected: list[str], **variables: str) -> Start:
        return service("encoder", model, *given, expected=expected, **variables)

    def prefill(*given: str, expected: list[str], **variables: str) -> Start:
        return service("prefill", model, *given, expected=expected, **variables)

    def triptych(*given: str, expected: list[str]) -> Start:
        return Start("triptych", list(given), expected)

    storage = json.dumps({"shared_storage_path": "/tmp", "colour": 1})
    return {
        "integer": encoder("--max-num-seqs=few", expected=["--max-num-seqs='few'", "an integer, at least 1"]),
        "integer from the environment": encoder(
            expected=["--max-num-seqs='0'", "(from TRIPTYCH_MAX_NUM_SEQS)"], TRIPTYCH_MAX_NUM_SEQS="0"
        ),
        "number": encoder("--gpu-memory-utilization=nan", expected=["--gpu-memory-utilization='nan'", "at most 1"]),
        "number from the environment": encoder(
            expected=["--drain-timeout='soon'", "(from TRIPTYCH_DRAIN_TIMEOUT)"], TRIPTYCH_DRAIN_TIMEOUT="soon"
        ),
        "choice": encoder("--dtype=int8", expected=["--dtype='int8'", "auto, float32, bfloat16, float16"]),
        "choice from the environment": encoder(
            expected=["--device='tpu'", "(from TRIPTYCH_DEVICE)"], TRIPTYCH_DEVICE="tpu"
        ),
        "text": encoder("--where=a\nb", expected=[r"--where='a\nb'", "printable characters"]),
        "text from the environment": encoder(expected=["--where=", "(from TRIPTYCH_WHERE)"], TRIPTYCH_WHERE="x" * 65),
        "JSON": encoder("--limit-mm-per-prompt={", expected=["--limit-mm-per-prompt='{'", "a JSON object"]),
        "JSON from the environment": encoder(
            expected=["--ec-connector-extra-config='[]'", "(from TRIPTYCH_EC_CONNECTOR_EXTRA_CONFIG)"],
            TRIPTYCH_EC_CONNECTOR_EXTRA_CONFIG="[]",
        ),
        "a port that Kubernetes injected": router(
            expected=["--max-inflight='tcp://10.0.0.1:80'", "(from TRIPTYCH_MAX_INFLIGHT)"],
            TRIPTYCH_MAX_INFLIGHT="tcp://10.0.0.1:80",
        ),
        "router's integer": router("--max-inflight=0", expected=["--max-inflight='0'", "at least 1"]),
        "router's number": router("--request-timeout=inf", expected=["--request-timeout='inf'"]),
        "router's choice": router("--log-level=LOUD", expected=["--log-level='LOUD'", "DEBUG, INFO, WARNING, ERROR"]),
        "router's address": router(
            "--decode=localhost", expected=["--decode='localhost'", "is neither HOST:PORT nor dns:NAME:PORT"]
        ),
        "router's address twice": router("--decode=a:1,a:1", expected=["--decode='a:1,a:1'", "twice"]),
        "no address": router(workers=WORKERS[:2], expected=["--decode"]),
        "unknown option": encoder("--colour=red", expected=["--colour"]),
        "no value": encoder("--ec-role", expected=["--ec-role"]),
        "up's choice": triptych("up", f"--model={model}", "--encoders=0", expected=["--encoders"]),
        "up's folder": triptych("up", "--model=/nowhere", expected=["'/nowhere'"]),
        "generate's address": triptych("generate", "--prompt=x", expected=["--router"]),
        "bench's number": triptych(
            "bench", "--target=http://127.0.0.1:1", "--request-rate=x", expected=["request-rate"]
        ),
        # ---- each right by itself ----
        "two roles": prefill(
            '--ec-transfer-config={"ec_role": "ec_both"}',
            "--ec-role=ec_consumer",
            expected=["ec_role='ec_both' contradicts --ec-role='ec_consumer'"],
        ),
        "two names": prefill(
            '--ec-transfer-config={"engine_id": "a"}',
            '--kv-transfer-config={"engine_id": "b"}',
            expected=["engine_id='b' contradicts --where='a'"],
        ),
        "a role of another stage": prefill(
            "--ec-role=ec_producer", expected=["--ec-role='ec_producer'", "prefill reads"]
        ),
        "KV at an encoder": encoder("--kv-connector=KVPeerConnector", expected=["an encoder holds no KV cache"]),
        "a module without a class": prefill(
            "--kv-connector-module-path=a.b", expected=["'a.b'", "needs --kv-connector"]
        ),
        "vLLM's key that we lack": prefill(
            '--ec-transfer-config={"ec_ip": "1.2.3.4"}', expected=["ec_ip is not supported"]
        ),
        "a key that the connector lacks": encoder(
            f"--ec-connector-extra-config={storage}",
            expected=[
                "--ec-connector-extra-config colour='1'",
                "unknown key; the known ones are",
                "shared_storage_path",
            ],
        ),
        "a module that is none": prefill(
            "--kv-connector=Mine",
            "--kv-connector-module-path=no.such.module",
            expected=["--kv-connector-module-path='no.such.module'", "cannot be imported"],
        ),
        "too few blocks": prefill(
            "--num-gpu-blocks=2", "--max-model-len=64", expected=["--num-gpu-blocks='2'", "--max-model-len 64 needs 4"]
        ),
    }


# ---- model folders ----


def changed(model: Path, to: Path, change: Callable[[Path], None]) -> Path:
    """A copy of the model with something wrong."""
    shutil.copytree(model, to)
    change(to)
    return to


def without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            for path in folder.glob(name):
                path.unlink()

    return change


def rewritten(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for key, value in values.items():
            *path, last = key.split("__")
            place = content
            for step in path:
                place = place[step]
            place[last] = value
        (folder / name).write_text(json.dumps(content))

    return change


def broken(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text("{ not JSON") and None


def cut_short(folder: Path) -> None:
    shard = max(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def one_weight_less(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if tensors.pop("model.language_model.norm.weight", None) is not None:
            save_file(tensors, shard)


def no_template(folder: Path) -> None:
    without("chat_template*")(folder)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text())
    content.pop("chat_template", None)
    path.write_text(json.dumps(content))


FOLDERS: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "no config": ("prefill", without("config.json"), ["holds no config.json"]),
    "a broken config": ("prefill", broken("config.json"), ["config.json cannot be read"]),
    "no weights": ("prefill", without("*.safetensors*"), ["has no weight file model.safetensors"]),
    "weights cut short": ("prefill", cut_short, ["model-00004-of-00004.safetensors cannot be read"]),
    "a weight too few": ("decode", one_weight_less, ["has no weights for language.norm.weight (1 missing)"]),
    "weights that do not fit": (
        "prefill",
        rewritten("config.json", text_config__intermediate_size=160),
        ["mlp.down_proj.weight has shape [64, 192], the configuration asks for [64, 160]"],
    ),
    "no tokenizer": ("prefill", without("tokenizer.json"), ["has no tokenizer.json"]),
    "a broken tokenizer": ("decode", broken("tokenizer.json"), ["tokenizer.json cannot be read"]),
    "no template": ("prefill", no_template, ["has no chat template"]),
    "a broken template": (
        "prefill",
        lambda folder: (folder / "chat_template.jinja").write_text("{% for %}") and None,
        ["chat template: line 1: Expected an expression"],
    ),
    "no processor": ("encoder", without("preprocessor_config.json"), ["has no preprocessor_config.json"]),
    "a broken processor": ("encoder", broken("preprocessor_config.json"), ["preprocessor_config.json cannot be read"]),
    "no image token": ("prefill", rewritten("config.json", image_token_id=None), ["has no image_token_id"]),
    "another family": (
        "prefill",
        rewritten("config.json", model_type="paligemma"),
        ["'paligemma' is not supported", "qwen3_vl"],
    ),
}

# ---- folders of the encoder cache, and ports ----


def storage(path: Path | str, **more: int) -> str:
    return f"--ec-connector-extra-config={json.dumps({'shared_storage_path': str(path), **more})}"


def places(model: Path, folder: Path, port: str) -> dict[str, Start]:
    missing = folder / "no" / "ec"
    shared = "--ec-connector-extra-config shared_storage_path"
    taken = [f"={port}", "in use on 127.0.0.1"]
    kv = json.dumps({"port": int(port)})
    return {
        "a shared folder that is missing": service(
            "encoder", model, storage(missing), expected=[f"{shared}='{missing}'", "No such file or directory"]
        ),
        **{
            f"{stage}'s {option}": service(stage, model, f"{option}={port}", expected=[option, *taken])
            for stage in ("encoder", "prefill", "decode")
            for option in ("--port", "--metrics-port")
        },
        **{
            f"router's {option}": router(f"{option}={port}", expected=[option, *taken])
            for option in ("--port", "--http-port")
        },
        **{
            f"up's {option}": Start("triptych", ["up", f"--model={model}", f"{option}={port}"], [option, *taken])
            for option in ("--router-port", "--http-port")
        },
        "KV port": service(
            "prefill",
            model,
            f"--kv-connector-extra-config={kv}",
            expected=["--kv-connector-extra-config", port, "cannot bind"],
        ),
    }


# ---- all of them, side by side ----

NOWHERE = Path("/nowhere")
NAMES = [*options(NOWHERE), *FOLDERS, *places(NOWHERE, NOWHERE, "1")]


@pytest.fixture(scope="module")
def outcomes(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Start, Future[Outcome]]]]:
    folder = tmp_path_factory.mktemp("starts")
    with socket.socket() as taken, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        starts = options(tiny_model)
        for name, (stage, change, expected) in FOLDERS.items():
            wrong = changed(tiny_model, folder / name.replace(" ", "-"), change)
            starts[name] = service(stage, wrong, expected=[f"--model='{wrong}'", *expected])
        starts |= places(tiny_model, folder, str(taken.getsockname()[1]))
        yield {name: (start, pool.submit(start.run)) for name, start in starts.items()}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_a_start_that_fails_is_one_line(outcomes: dict[str, tuple[Start, Future[Outcome]]], name: str) -> None:
    start, outcome = outcomes[name]
    check(start, outcome.result())


# ---- stages that do not fit together, or are not there ----


def test_stages_of_different_models_or_layouts_are_refused_with_both_values(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Beside the running cluster: a decode worker of another checkpoint, and one whose blocks have another size."""
    from demo.random_checkpoint import make_checkpoint

    other = make_checkpoint(tmp_path / "tiny", seed=1)
    ours = {stage: f"--{stage}={cluster.local.workers[stage][0].grpc}" for stage in ("encoder", "prefill")}
    decodes = {
        "namespace_digest": decode_worker(tmp_path, "other", f"--model={other}"),
        "kv_layout": decode_worker(tmp_path, "layout", f"--model={tiny_model}", "--block-size=8"),
    }
    try:
        for child in decodes.values():
            child.start()
        for value, child in decodes.items():
            assert child.wait_ready(deadline()), child.tail()
            with grpc.insecure_channel(child.grpc) as channel:
                info = decode_pb2_grpc.DecodeStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=10)
            theirs, ours_value = getattr(info, value), getattr(cluster.info("prefill"), value)
            assert theirs != ours_value
            start = router(
                "--log-level=ERROR",
                workers=[*ours.values(), f"--decode={child.grpc}"],
                expected=[f"{value} differs between stages", theirs, ours_value],
            )
            check(start, start.run())
    finally:
        for child in decodes.values():
            child.terminate()
            child.wait_ended(deadline(10))
    cluster.wait_empty()


def decode_worker(tmp_path: Path, name: str, *given: str) -> Child:
    argv = [sys.executable, "-P", "-m", "services.decode", "serve", *FREE_PORTS["service"], "--dtype=float32"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return Child(name, [*argv, "--max-model-len=2048", *given], env=env, log_path=tmp_path / f"{name}.log")


def deadline(seconds: float = TIMEOUT_S) -> float:
    return time.monotonic() + seconds


def test_a_router_says_which_worker_it_cannot_reach(cluster: Cluster, tmp_path: Path) -> None:
    """It waits, not ready, and refuses requests with the stage's name, until the worker is there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [f"--{stage}={cluster.local.workers[stage][0].grpc}" for stage in ("encoder", "prefill")]
    argv = [sys.executable, "-m", "router", "serve", *workers, f"--decode={nobody}", f"--port={port}", "--http-port=0"]
    child = Child("router", argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, log_path=tmp_path / "router.log")
    child.start()
    try:
        said = f"waiting for decode ({nobody} cannot be reached)"
        wait_until(lambda: any(said in line for line in child.tail()), TIMEOUT_S, child.tail)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(chat_request([("user", ["Hello."])]), timeout=TIMEOUT_S))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "decode is unavailable: none of its workers serves yet"
        assert not child.ready
        child.terminate()
        assert child.wait_ended(deadline(10))
        assert child.process.returncode == 0
    finally:
        child.kill_group()
