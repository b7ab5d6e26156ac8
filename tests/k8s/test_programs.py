"""Every flag and variable of every rendered container is one that its program's own parser accepts, values included."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest

from connectors.factory import ec_connector_class, kv_connector_class
from connectors.options import EC_EXTRA, parse_options
from core.config import EngineConfig
from core.errors import ConfigError
from core.options import settings_from_options
from core.types import Stage
from k8s.tools.manifests import Object, Workload, argv, environment, programs
from router.__main__ import program as router_program
from services.runtime import program as service_program

_FIELDS = {"status.podIP": "10.0.0.7", "metadata.name": "a-pod"}
_SECRETS = {("redis", "password"): "a password"}


def command_of(module: str) -> click.Command:
    if module == "router":
        return router_program.commands["serve"]
    return service_program(Stage(module.removeprefix("services."))).commands["serve"]


def parse(workload: Workload, module: str, objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the program's own parser makes of the container. Raises ConfigError, or click's exceptions."""
    env = environment(workload.container, objects, _FIELDS, _SECRETS)
    for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    args = argv(workload.container, env)[4:]
    return command_of(module).make_context("serve", args).params


def engine_config(module: str, params: dict[str, Any], tmp_path: Path) -> EngineConfig:
    """With a folder that stands for the mounted model."""
    if params["model"] is not None:
        (tmp_path / "config.json").touch()
        params = {**params, "model": str(tmp_path)}
    return settings_from_options(Stage(module.removeprefix("services.")), params)[0]


def test_each_container_parses(
    rendered: dict[str, list[Object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, objects in rendered.items():
        seen = []
        for workload, module in programs(objects):
            params = parse(workload, module, objects, monkeypatch)
            seen.append(module)
            if module == "router":
                continue
            config = engine_config(module, params, tmp_path)
            ec = ec_connector_class(config.ec_connector)
            parse_options(ec.options_type, config.ec_connector.extra, EC_EXTRA)  # type: ignore[attr-defined]
            if config.kv_connector is not None:
                assert kv_connector_class(config.kv_connector).__name__ == "KVPeerConnector", name
        assert "router" in seen, name


def test_each_variable_of_ours_is_an_option(rendered: dict[str, list[Object]]) -> None:
    """A program does not look at variables that it does not know, so a typing error would be taken in silence."""
    for name, objects in rendered.items():
        for workload, module in programs(objects):
            known = {option.envvar for option in command_of(module).params}
            given = {
                variable
                for variable in environment(workload.container, objects, _FIELDS, _SECRETS)
                if variable.startswith("TRIPTYCH_")
            }
            assert given <= known, f"{name}: {workload.name}: {sorted(given - known)}"


def test_each_model_path_is_mounted(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        for workload, module in programs(objects):
            model = environment(workload.container, objects, _FIELDS, _SECRETS).get("TRIPTYCH_MODEL")
            if module == "router" or model is None:
                continue
            mounts = [mount["mountPath"] for mount in workload.container["volumeMounts"]]
            assert any(model == mount or model.startswith(mount + "/") for mount in mounts), f"{name}: {workload.name}"


def test_the_router_asks_services_for_stages_that_they_offer(
    rendered: dict[str, list[Object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Mixed topologies: a worker that is listed as encoder, prefill or decode has the role for it, at that port."""
    for name, objects in rendered.items():
        offered: dict[str, set[str]] = {}
        for workload, module in programs(objects):
            if module == "router":
                continue
            params = parse(workload, module, objects, monkeypatch)
            config = engine_config(module, params, tmp_path)
            stages = {module.removeprefix("services.")}
            stages |= {"encoder"} if config.ec_role.produces else set()
            stages |= {"prefill"} if config.kv_role is not None and config.kv_role.produces else set()
            stages |= {"decode"} if config.kv_role is not None and config.kv_role.consumes else set()
            offered[f"dns:{workload.name}:{params['port']}"] = stages
        router = next(workload for workload, module in programs(objects) if module == "router")
        params = parse(router, "router", objects, monkeypatch)
        for stage in ("encoder", "prefill", "decode"):
            assert stage in offered.get(params[stage], set()), f"{name}: --{stage} {params[stage]}"


def test_a_wrong_flag_would_be_found(rendered: dict[str, list[Object]], monkeypatch: pytest.MonkeyPatch) -> None:
    objects = rendered["default"]
    workload, module = next((each, module) for each, module in programs(objects) if module == "services.decode")
    text = json.dumps(objects)
    for wrong in (
        re.sub(r'"--kv-role=kv_consumer"', '"--kv-rolle=kv_consumer"', text),
        re.sub(r'"--kv-role=kv_consumer"', '"--kv-role=consumer"', text),
    ):
        broken = json.loads(wrong)
        workload = next(each for each, which in programs(broken) if which == module)
        with pytest.raises((click.ClickException, ConfigError)):
            parse(workload, module, broken, monkeypatch)
