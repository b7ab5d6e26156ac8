"""The options that the three services share, and what they become: one `EngineConfig` and one `ServeSettings`.

Every option may come from the environment instead (`--max-model-len` from TRIPTYCH_MAX_MODEL_LEN); the command line
wins. vLLM's JSON spellings `--ec-transfer-config` and `--kv-transfer-config` say the same as the options they name; see
`core.transfer_config`. Whatever is wrong raises ConfigError here, before anything is started.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from core.config import ConnectorConfig, EngineConfig
from core.errors import ConfigError
from core.logs import FORMATS, LEVELS
from core.option_types import Parsed, choice, env_var, integer, json_object, number, text
from core.transfer_config import merge_transfer_configs
from core.types import ECRole, KVRole, Stage

_F = TypeVar("_F", bound=Callable[..., Any])

DEFAULT_PORTS = {Stage.ENCODER: 50061, Stage.PREFILL: 50062, Stage.DECODE: 50063}
DEFAULT_METRICS_PORTS = {Stage.ENCODER: 9101, Stage.PREFILL: 9102, Stage.DECODE: 9103}
_EC_ROLES = {Stage.ENCODER: ECRole.PRODUCER, Stage.PREFILL: ECRole.CONSUMER, Stage.DECODE: ECRole.CONSUMER}
_KV_ROLES = {Stage.PREFILL: KVRole.PRODUCER, Stage.DECODE: KVRole.CONSUMER}

_STORAGE_CONNECTOR = "ECSharedStorageConnector"
_EC_PEER_CONNECTOR = "ECPeerConnector"
_PEER_CONNECTOR = "KVPeerConnector"
_PULLED_FROM = (_EC_PEER_CONNECTOR, _PEER_CONNECTOR, "KVSharedMemoryConnector")
#: Trained on drawn pictures; see its README.
_DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
_MAX_IMAGES_LIMIT = 1024


class ServeSettings(msgspec.Struct, frozen=True):
    """What the process around the engine is told."""

    host: str
    port: int  # 0: any free one
    metrics_port: int  # 0: any free one
    drain_timeout_s: float
    log_level: str
    where: str  # the name that logs and timelines show
    model: str  # the served model's name
    log_format: str = "text"


def _option(name: str, kind: Parsed, help_text: str, default: Any = None) -> Callable[[_F], _F]:
    return click.option(
        name,
        type=kind,
        default=default,
        envvar=env_var(name),
        show_envvar=True,
        show_default=default is not None,
        help=help_text,
    )


def _flag(name: str, help_text: str, default: bool) -> Callable[[_F], _F]:
    return click.option(
        f"{name}/--no-{name.removeprefix('--')}",
        default=default,
        envvar=env_var(name),
        show_envvar=True,
        show_default=True,
        help=help_text,
    )


def serve_options(stage: Stage) -> Callable[[_F], _F]:
    """Decorator for the `serve` command of `stage`. Options without a default arrive as None."""
    has_kv = stage in _KV_ROLES
    kv_note = "" if has_kv else " Refused here: an encoder holds no KV cache."
    ec_role_default = f" [default: {_EC_ROLES[stage].value}]"
    kv_role_default = f" [default: {_KV_ROLES[stage].value}]" if has_kv else ""
    options: list[Callable[[Any], Any]] = [
        _option("--model", text(4096), "Folder of the model; without it, the demo model."),
        _option("--host", text(255), "Address to listen on.", "127.0.0.1"),
        _option("--port", integer(0, 65535), "gRPC port; 0: any free one.", DEFAULT_PORTS[stage]),
        _option(
            "--metrics-port",
            integer(0, 65535),
            "HTTP port of /metrics; 0: any free one.",
            DEFAULT_METRICS_PORTS[stage],
        ),
        _option("--device", choice("auto", "cpu", "cuda"), "Where to compute.", "auto"),
        _option(
            "--dtype", choice("auto", "float32", "bfloat16", "float16"), "Type of weights and activations.", "auto"
        ),
        _option("--max-model-len", integer(1), "Longest prompt and answer together, in tokens [default: the model's]."),
        _option("--max-num-seqs", integer(1), "Most requests in one batch.", 64),
        _option("--max-num-batched-tokens", integer(1), "Most tokens in one step.", 2048),
        _option("--max-waiting", integer(0), "Most requests that wait; more are refused.", 1024),
        _flag("--enable-prefix-caching", "Keep the KV of ended requests for others that begin alike.", True),
        _option(
            "--long-prefill-token-threshold",
            integer(0),
            "Most tokens of one prompt in a step that others decode in; 0: no limit.",
            512,
        ),
        _option("--max-num-partial-prefills", integer(1), "Prompts that may be computed in part at a time.", 2),
        _option("--block-size", integer(1, 1024), "Tokens in a KV block.", 16),
        _option("--num-gpu-blocks", integer(1), "KV blocks [default: what memory leaves]."),
        _option(
            "--gpu-memory-utilization", number(0, 1, above=True), "Share of the device's memory that may be used.", 0.9
        ),
        _option("--encoder-cache-bytes", integer(1), "Bytes of the encoder buffer [default: what memory leaves]."),
        _option("--limit-mm-per-prompt", json_object(), """Images in a prompt, as '{"image": 16}'."""),
        _option("--tensor-parallel-size", integer(1), "Only 1 so far.", 1),
        _option(
            "--distributed-executor-backend",
            choice("uni", "mp"),
            "Where the model runs: in the engine's process, or in one of its own.",
            "uni",
        ),
        _flag("--async-scheduling", "Schedule a step while the one before it runs.", False),
        _flag("--enforce-eager", "Launch each kernel by itself, without CUDA graphs.", False),
        _option("--ec-role", choice(*ECRole), f"Part in the encoder cache.{ec_role_default}"),
        _option("--ec-connector", text(256), f"Class of the EC connector. [default: {_STORAGE_CONNECTOR}]"),
        _option("--ec-connector-module-path", text(1024), "Module of a connector that is not one of ours."),
        _option("--ec-connector-extra-config", json_object(), "Settings of the EC connector."),
        _flag("--ec-peer-fallback", "Consumers pull from the encoder what its store did not take.", True),
        _option(
            "--advertise-host",
            text(255),
            "Address of this machine under which other stages pull from it [default: 127.0.0.1].",
        ),
        _option("--ec-transfer-config", json_object(), "vLLM's spelling of role, connector, module path and settings."),
        _option("--kv-role", choice(*KVRole), f"Part in moving KV blocks.{kv_note or kv_role_default}"),
        _option(
            "--kv-connector", text(256), f"Class of the KV connector.{kv_note or f' [default: {_PEER_CONNECTOR}]'}"
        ),
        _option("--kv-connector-module-path", text(1024), f"Module of a connector that is not one of ours.{kv_note}"),
        _option("--kv-connector-extra-config", json_object(), f"Settings of the KV connector.{kv_note}"),
        _option(
            "--kv-load-failure-policy",
            choice("recompute", "fail"),
            f"When KV blocks cannot be pulled.{kv_note or ' [default: recompute]'}",
        ),
        _option("--kv-transfer-config", json_object(), f"vLLM's spelling of the five options above.{kv_note}"),
        _option("--where", text(64), f"This worker's name in logs and timelines. [default: {stage.value}-0]"),
        _option(
            "--drain-timeout", number(0, 86400), "Seconds that requests in flight and leases have after SIGTERM.", 60.0
        ),
        _option("--log-level", choice(*LEVELS), "Lowest level that is logged.", "INFO"),
        _option("--log-format", choice(*FORMATS), "Log lines for people, or one JSON object each.", "text"),
    ]

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def settings_from_options(stage: Stage, options: dict[str, Any]) -> tuple[EngineConfig, ServeSettings]:
    """What `serve`'s parameters, by their names, amount to. Raises ConfigError.

    Makes the default folder of the encoder cache where that is used and not there yet.
    """
    if stage is Stage.ENCODER:
        _refuse_kv_options(options)
    merged = merge_transfer_configs(options)
    model = _model_folder(merged["model"])
    where = merged["where"] or f"{stage.value}-0"
    config = _engine_config(stage, merged, model, where)
    settings = ServeSettings(
        host=merged["host"],
        port=merged["port"],
        metrics_port=merged["metrics_port"],
        drain_timeout_s=merged["drain_timeout"],
        log_level=merged["log_level"],
        log_format=merged["log_format"],
        where=where,
        model=model.name,
    )
    return config, settings


def engine_config(stage: Stage, **options: Any) -> EngineConfig:
    """`settings_from_options`, the engine's part."""
    return settings_from_options(stage, options)[0]


def _engine_config(stage: Stage, options: dict[str, Any], model: Path, where: str) -> EngineConfig:
    if options["tensor_parallel_size"] != 1:
        raise ConfigError("--tensor-parallel-size", options["tensor_parallel_size"], "not supported yet, only 1")
    images = _max_images(options["limit_mm_per_prompt"])
    kv_role = _kv_role(stage, options["kv_role"])
    return EngineConfig(
        model=str(model),
        ec_role=_ec_role(stage, options["ec_role"]),
        ec_connector=_ec_connector(options),
        ec_fallback=_ec_fallback(options),
        kv_role=kv_role,
        kv_connector=_kv_connector(options) if kv_role is not None else None,
        where=where,
        device=options["device"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_waiting=options["max_waiting"],
        enable_prefix_caching=options["enable_prefix_caching"],
        long_prefill_token_threshold=options["long_prefill_token_threshold"],
        max_num_partial_prefills=options["max_num_partial_prefills"],
        block_size=options["block_size"],
        num_gpu_blocks=options["num_gpu_blocks"],
        gpu_memory_utilization=options["gpu_memory_utilization"],
        encoder_cache_bytes=options["encoder_cache_bytes"],
        tensor_parallel_size=options["tensor_parallel_size"],
        distributed_executor_backend=options["distributed_executor_backend"],
        async_scheduling=options["async_scheduling"],
        enforce_eager=options["enforce_eager"],
        kv_load_failure_policy=options["kv_load_failure_policy"] or "recompute",
        log_level=options["log_level"],
        log_format=options["log_format"],
        **({} if images is None else {"max_images_per_prompt": images}),
    )


def _model_folder(given: str | None) -> Path:
    if given is None:
        if not (_DEMO_MODEL / "config.json").is_file():
            reason = f"no --model given, and the demo model is not in {_DEMO_MODEL}"
            raise ConfigError("--model", None, reason)
        return _DEMO_MODEL
    # Absolute, because the engine's process may have another working directory; links are kept for their names.
    folder = Path(os.path.abspath(given))
    if not folder.is_dir():
        raise ConfigError("--model", given, "not a folder")
    if not (folder / "config.json").is_file():
        raise ConfigError("--model", given, "holds no config.json")
    return folder


def _max_images(limits: dict[str, Any] | None) -> int | None:
    if limits is None:
        return None
    for modality, limit in limits.items():
        if modality not in ("image", "video", "audio"):
            raise ConfigError("--limit-mm-per-prompt", limits, f"{modality!r} is no modality; image, video, audio are")
        if not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= _MAX_IMAGES_LIMIT:
            reason = f"{modality} is to be an integer from 0 to {_MAX_IMAGES_LIMIT}"
            raise ConfigError("--limit-mm-per-prompt", limits, reason)
        if modality != "image" and limit:
            raise ConfigError("--limit-mm-per-prompt", limits, f"{modality} is not supported, only 0")
    return limits.get("image")


def _ec_role(stage: Stage, given: str | None) -> ECRole:
    role = ECRole(given) if given is not None else _EC_ROLES[stage]
    if stage is Stage.ENCODER and not role.produces:
        raise ConfigError("--ec-role", role.value, "an encoder fills the encoder cache: ec_producer or ec_both")
    if stage is not Stage.ENCODER and not role.consumes:
        raise ConfigError("--ec-role", role.value, f"{stage.value} reads the encoder cache: ec_consumer or ec_both")
    return role


def _refuse_kv_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name.startswith("kv_") and value is not None:
            raise ConfigError("--" + name.replace("_", "-"), value, "an encoder holds no KV cache")


def _kv_role(stage: Stage, given: str | None) -> KVRole | None:
    if stage is Stage.ENCODER:
        return None
    role = KVRole(given) if given is not None else _KV_ROLES[stage]
    if stage is Stage.PREFILL and not role.produces:
        raise ConfigError("--kv-role", role.value, "prefill gives KV blocks away: kv_producer or kv_both")
    if stage is Stage.DECODE and not role.consumes:
        raise ConfigError("--kv-role", role.value, "decode pulls KV blocks: kv_consumer or kv_both")
    return role


def _ec_connector(options: dict[str, Any]) -> ConnectorConfig:
    name = options["ec_connector"] or _STORAGE_CONNECTOR
    module_path = options["ec_connector_module_path"]
    if module_path is not None and options["ec_connector"] is None:
        raise ConfigError("--ec-connector-module-path", module_path, "needs --ec-connector, the class in that module")
    extra = dict(options["ec_connector_extra_config"] or {})
    if name == _STORAGE_CONNECTOR and module_path is None and "shared_storage_path" not in extra:
        extra["shared_storage_path"] = str(default_storage_folder())
    return ConnectorConfig(name=name, module_path=module_path, extra=_advertised(name, module_path, extra, options))


def _ec_fallback(options: dict[str, Any]) -> ConnectorConfig | None:
    if not options["ec_peer_fallback"]:
        return None
    return ConnectorConfig(name=_EC_PEER_CONNECTOR, extra=_advertised(_EC_PEER_CONNECTOR, None, {}, options))


def _advertised(name: str, module_path: str | None, extra: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """`extra` with `host`, where that is one of our connectors that others pull from and it does not say."""
    if options["advertise_host"] is None or module_path is not None or name not in _PULLED_FROM:
        return extra
    return {"host": options["advertise_host"], **extra}


def _kv_connector(options: dict[str, Any]) -> ConnectorConfig:
    module_path = options["kv_connector_module_path"]
    if module_path is not None and options["kv_connector"] is None:
        raise ConfigError("--kv-connector-module-path", module_path, "needs --kv-connector, the class in that module")
    name = options["kv_connector"] or _PEER_CONNECTOR
    extra = dict(options["kv_connector_extra_config"] or {})
    return ConnectorConfig(name=name, module_path=module_path, extra=_advertised(name, module_path, extra, options))


def default_storage_folder() -> Path:
    """The folder that the stages on one machine share unless told otherwise; made where absent, for this user alone.

    Raises ConfigError where another user got there first: whoever owns the folder decides what our stages read.
    """
    folder = Path(tempfile.gettempdir()) / f"triptych-ec-{os.getuid()}"
    name = "--ec-connector-extra-config shared_storage_path"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(name, str(folder), f"cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            name, str(folder), "the default folder is not a folder of this user's alone; name another one"
        )
    return folder
