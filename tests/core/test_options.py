"""The services' options: defaults, environment, vLLM's JSON spellings, and what is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest

from core import options as core_options
from core.config import ConnectorConfig, EngineConfig
from core.errors import ConfigError
from core.options import ServeSettings, serve_options, settings_from_options
from core.types import ECRole, KVRole, Stage

INTERFACE = [
    "--host",
    "--port",
    "--metrics-port",
    "--device",
    "--dtype",
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--block-size",
    "--num-gpu-blocks",
    "--gpu-memory-utilization",
    "--encoder-cache-bytes",
    "--limit-mm-per-prompt",
    "--tensor-parallel-size",
    "--log-level",
    "--ec-connector",
    "--ec-connector-module-path",
    "--ec-connector-extra-config",
    "--kv-connector",
    "--kv-connector-module-path",
    "--kv-connector-extra-config",
    "--ec-transfer-config",
    "--kv-transfer-config",
    "--model",
    "--ec-role",
    "--kv-role",
]


@pytest.fixture(autouse=True)
def own_temp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder of the encoder cache lies in the system's temporary folder; tests have their own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in list(os.environ):
        if name.startswith("TRIPTYCH_"):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def parse(stage: Stage, *arguments: str) -> tuple[EngineConfig, ServeSettings]:
    @click.command()
    @serve_options(stage)
    def serve(**values: Any) -> Any:
        return settings_from_options(stage, values)

    result: tuple[EngineConfig, ServeSettings] = serve.main(list(arguments), standalone_mode=False)
    return result


def test_every_option_of_the_interface_exists_and_has_its_variable() -> None:
    @serve_options(Stage.PREFILL)
    def serve() -> None: ...

    found = {option.opts[0]: option.envvar for option in click.command()(serve).params}
    for name in INTERFACE:
        assert found[name] == "TRIPTYCH_" + name[2:].upper().replace("-", "_")


def test_the_defaults_of_each_stage(model: str, tmp_path: Path) -> None:
    shared = ConnectorConfig(
        "ECSharedStorageConnector", extra={"shared_storage_path": str(tmp_path / f"triptych-ec-{os.getuid()}")}
    )
    peer = ConnectorConfig("KVPeerConnector")
    expected = {
        Stage.ENCODER: (ECRole.PRODUCER, None, None, 50061, 9101),
        Stage.PREFILL: (ECRole.CONSUMER, KVRole.PRODUCER, peer, 50062, 9102),
        Stage.DECODE: (ECRole.CONSUMER, KVRole.CONSUMER, peer, 50063, 9103),
    }
    for stage, (ec_role, kv_role, kv_connector, port, metrics_port) in expected.items():
        config, settings = parse(stage, "--model", model)
        assert config == EngineConfig(
            model=model,
            ec_role=ec_role,
            ec_connector=shared,
            ec_fallback=ConnectorConfig("ECPeerConnector"),
            kv_role=kv_role,
            kv_connector=kv_connector,
            where=f"{stage.value}-0",
        )
        assert settings == ServeSettings(
            host="127.0.0.1",
            port=port,
            metrics_port=metrics_port,
            drain_timeout_s=60.0,
            log_level="INFO",
            where=f"{stage.value}-0",
            model="some-model",
        )


def test_every_engine_option_arrives(model: str) -> None:
    given = {
        "--model": model,
        "--host": "::1",
        "--port": "0",
        "--metrics-port": "0",
        "--device": "cpu",
        "--dtype": "Float32",
        "--max-model-len": "100",
        "--max-num-seqs": "2",
        "--max-num-batched-tokens": "3",
        "--max-waiting": "4",
        "--long-prefill-token-threshold": "9",
        "--max-num-partial-prefills": "3",
        "--advertise-host": "10.0.0.7",
        "--block-size": "5",
        "--num-gpu-blocks": "6",
        "--gpu-memory-utilization": "0.5",
        "--encoder-cache-bytes": "7",
        "--tensor-parallel-size": "1",
        "--distributed-executor-backend": "MP",
        "--ec-role": "ec_both",
        "--ec-connector": "A",
        "--ec-connector-module-path": "a.b",
        "--kv-role": "kv_both",
        "--kv-connector": "B",
        "--kv-connector-module-path": "c.d",
        "--kv-load-failure-policy": "fail",
        "--where": "d-7",
        "--drain-timeout": "1.5",
        "--log-level": "debug",
        "--ec-connector-extra-config": '{"x": 1}',
        "--kv-connector-extra-config": '{"y": 2}',
        "--limit-mm-per-prompt": '{"image": 4, "video": 0}',
    }
    config, settings = parse(
        Stage.DECODE,
        *(word for pair in given.items() for word in pair),
        "--async-scheduling",
        "--enforce-eager",
        "--no-enable-prefix-caching",
    )
    assert config == EngineConfig(
        model=model,
        ec_role=ECRole.BOTH,
        ec_connector=ConnectorConfig("A", "a.b", {"x": 1}),
        ec_fallback=ConnectorConfig("ECPeerConnector", extra={"host": "10.0.0.7"}),
        enable_prefix_caching=False,
        long_prefill_token_threshold=9,
        max_num_partial_prefills=3,
        kv_role=KVRole.BOTH,
        kv_connector=ConnectorConfig("B", "c.d", {"y": 2}),
        where="d-7",
        device="cpu",
        dtype="float32",
        max_model_len=100,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        max_waiting=4,
        block_size=5,
        num_gpu_blocks=6,
        gpu_memory_utilization=0.5,
        encoder_cache_bytes=7,
        max_images_per_prompt=4,
        distributed_executor_backend="mp",
        async_scheduling=True,
        enforce_eager=True,
        kv_load_failure_policy="fail",
        log_level="DEBUG",
    )
    assert settings == ServeSettings("::1", 0, 0, 1.5, "DEBUG", "d-7", "some-model")


def test_vllm_s_spellings_say_the_same(model: str) -> None:
    ec = {
        "ec_connector": "A",
        "ec_role": "ec_both",
        "ec_connector_module_path": "a.b",
        "ec_connector_extra_config": {"x": 1},
        "engine_id": "p-1",
    }
    kv = {
        "kv_connector": "B",
        "kv_role": "kv_both",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {},
        "kv_load_failure_policy": "fail",
        "engine_id": "p-1",
    }
    config, settings = parse(
        Stage.PREFILL,
        *("--model", model, "--ec-transfer-config", json.dumps(ec), "--kv-transfer-config", json.dumps(kv)),
        *("--kv-connector", "B"),  # both ways, the same value
    )
    assert config.ec_connector == ConnectorConfig("A", "a.b", {"x": 1})
    assert config.kv_connector == ConnectorConfig("B")
    assert (config.ec_role, config.kv_role, config.kv_load_failure_policy) == (ECRole.BOTH, KVRole.BOTH, "fail")
    assert settings.where == config.where == "p-1"


BAD = [
    (Stage.PREFILL, ["--port", "x"], "--port='x': expected an integer from 0 to 65535"),
    (Stage.PREFILL, ["--port", "65536"], "--port='65536'"),
    (Stage.PREFILL, ["--max-num-seqs", "0"], "--max-num-seqs='0': expected an integer, at least 1"),
    (Stage.PREFILL, ["--gpu-memory-utilization", "0"], "--gpu-memory-utilization='0'"),
    (Stage.PREFILL, ["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization='nan'"),
    (Stage.PREFILL, ["--dtype", "int8"], "--dtype='int8': expected one of auto, float32, bfloat16, float16"),
    (Stage.PREFILL, ["--device", "tpu"], "--device='tpu'"),
    (Stage.PREFILL, ["--log-level", "LOUD"], "--log-level='LOUD'"),
    (Stage.PREFILL, ["--where", "a\nb"], r"--where='a\nb': expected 1 to 64 printable characters"),
    (Stage.PREFILL, ["--distributed-executor-backend", "ray"], "expected one of uni, mp"),
    (Stage.PREFILL, ["--tensor-parallel-size", "2"], "--tensor-parallel-size=2: not supported yet, only 1"),
    (Stage.PREFILL, ["--limit-mm-per-prompt", "image=4"], "--limit-mm-per-prompt='image=4': expected a JSON object"),
    (Stage.PREFILL, ["--limit-mm-per-prompt", '{"image": -1}'], "image is to be an integer"),
    (Stage.PREFILL, ["--limit-mm-per-prompt", '{"image": true}'], "image is to be an integer"),
    (Stage.PREFILL, ["--limit-mm-per-prompt", '{"video": 1}'], "video is not supported, only 0"),
    (Stage.PREFILL, ["--limit-mm-per-prompt", '{"smell": 0}'], "'smell' is no modality"),
    (Stage.ENCODER, ["--ec-role", "ec_consumer"], "--ec-role='ec_consumer': an encoder fills"),
    (Stage.PREFILL, ["--ec-role", "ec_producer"], "--ec-role='ec_producer': prefill reads"),
    (Stage.PREFILL, ["--kv-role", "kv_consumer"], "--kv-role='kv_consumer': prefill gives"),
    (Stage.DECODE, ["--kv-role", "kv_producer"], "--kv-role='kv_producer': decode pulls"),
    (Stage.ENCODER, ["--kv-role", "kv_both"], "--kv-role='kv_both': an encoder holds no KV cache"),
    (Stage.ENCODER, ["--kv-connector", "X"], "--kv-connector='X': an encoder holds no KV cache"),
    (Stage.ENCODER, ["--kv-transfer-config", "{}"], "--kv-transfer-config={}: an encoder holds no KV cache"),
    (Stage.PREFILL, ["--ec-connector-module-path", "a.b"], "--ec-connector-module-path='a.b': needs --ec-connector"),
    (Stage.PREFILL, ["--kv-connector-module-path", "a.b"], "--kv-connector-module-path='a.b': needs --kv-connector"),
    (
        Stage.PREFILL,
        ["--ec-connector-extra-config", "[1]"],
        "--ec-connector-extra-config='[1]': expected a JSON object",
    ),
    (Stage.PREFILL, ["--kv-transfer-config", '{"kv_role": "both"}'], "kv_role is to be one of kv_producer"),
    (Stage.PREFILL, ["--kv-transfer-config", '{"kv_connector": 1}'], "kv_connector is to be a text"),
    (Stage.PREFILL, ["--kv-transfer-config", '{"kv_connector_extra_config": []}'], "is to be an object"),
    (Stage.PREFILL, ["--kv-transfer-config", '{"kv_load_failure_policy": "pray"}'], "recompute or fail"),
    (Stage.PREFILL, ["--ec-transfer-config", '{"ec_colour": 1}'], "ec_colour is unknown"),
    (
        Stage.PREFILL,
        ["--ec-transfer-config", '{"ec_role": "ec_both"}', "--ec-role", "ec_consumer"],
        "ec_role='ec_both' contradicts --ec-role='ec_consumer'",
    ),
    (
        Stage.PREFILL,
        ["--ec-transfer-config", '{"engine_id": "a"}', "--kv-transfer-config", '{"engine_id": "b"}'],
        "engine_id='b' contradicts --where='a'",
    ),
]
BAD += [
    (Stage.PREFILL, ["--ec-transfer-config", json.dumps({key: 1})], f"{key} is not supported")
    for key in ("ec_ip", "ec_port", "ec_buffer_size", "ec_buffer_device")
]
BAD += [
    (Stage.DECODE, ["--kv-transfer-config", json.dumps({key: 1})], f"{key} is not supported")
    for key in ("kv_ip", "kv_port", "kv_buffer_size", "kv_buffer_device", "kv_rank", "kv_parallel_size")
]


@pytest.mark.parametrize(("stage", "arguments", "message"), BAD, ids=[" ".join(case[1])[:60] for case in BAD])
def test_refused_with_the_option_s_name_and_value(model: str, stage: Stage, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(stage, "--model", model, *arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("TRIPTYCH_PORT", "tcp://10.0.0.1:80"), ("TRIPTYCH_EC_CONNECTOR_EXTRA_CONFIG", "{"), ("TRIPTYCH_EC_ROLE", "both")],
)
def test_a_variable_that_does_not_parse_is_named(
    model: str, variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError) as caught:
        parse(Stage.DECODE, "--model", model)
    option = "--" + variable.removeprefix("TRIPTYCH_").lower().replace("_", "-")
    assert str(caught.value).startswith(f"{option}={text!r}: expected")
    assert str(caught.value).endswith(f"(from {variable})")


def test_the_environment_gives_way_to_the_command_line(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_MODEL", model)
    monkeypatch.setenv("TRIPTYCH_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("TRIPTYCH_BLOCK_SIZE", "8")
    config, _ = parse(Stage.DECODE, "--max-num-seqs", "9")
    assert (config.model, config.max_num_seqs, config.block_size) == (model, 9, 8)


def test_the_demo_model_is_the_default_once_it_is_there(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_options, "_DEMO_MODEL", Path(model))
    assert parse(Stage.ENCODER)[0].model == model
    monkeypatch.setattr(core_options, "_DEMO_MODEL", Path(model) / "absent")
    with pytest.raises(ConfigError, match="no --model given, and the demo model is not in"):
        parse(Stage.ENCODER)


def test_a_model_folder_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model='/nowhere': not a folder"):
        parse(Stage.ENCODER, "--model", "/nowhere")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        parse(Stage.ENCODER, "--model", str(tmp_path))


def test_the_default_folder_is_this_user_s_alone(tmp_path: Path) -> None:
    folder = core_options.default_storage_folder()
    assert folder == tmp_path / f"triptych-ec-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert core_options.default_storage_folder() == folder


def test_a_default_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"triptych-ec-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="not a folder of this user's alone"):
        core_options.default_storage_folder()


def test_a_default_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"triptych-ec-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder of this user's alone"):
        core_options.default_storage_folder()


def test_a_given_path_or_another_connector_makes_no_default_folder(model: str, tmp_path: Path) -> None:
    given, _ = parse(Stage.ENCODER, "--model", model, "--ec-connector-extra-config", '{"shared_storage_path": "/x"}')
    other, _ = parse(Stage.ENCODER, "--model", model, "--ec-connector", "ECRedisConnector")
    assert given.ec_connector.extra == {"shared_storage_path": "/x"}
    assert other.ec_connector.extra == {}
    assert not (tmp_path / f"triptych-ec-{os.getuid()}").exists()


def test_the_address_that_others_pull_from_is_told_to_our_own_connectors(model: str) -> None:
    options = ["--model", model, "--advertise-host", "10.0.0.7"]
    config, _ = parse(Stage.PREFILL, *options, "--ec-connector", "ECPeerConnector")
    assert config.ec_connector.extra == {"host": "10.0.0.7"}
    assert config.kv_connector is not None
    assert config.kv_connector.extra == {"host": "10.0.0.7"}
    config, _ = parse(Stage.PREFILL, *options, "--kv-connector-extra-config", '{"host": "10.0.0.8"}')
    assert config.kv_connector is not None
    assert config.kv_connector.extra == {"host": "10.0.0.8"}, "what is said of one connector wins"
    config, _ = parse(Stage.PREFILL, *options, "--no-ec-peer-fallback")
    assert config.ec_fallback is None
