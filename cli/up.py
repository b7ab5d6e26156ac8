"""`triptych up`: a local cluster that stays up until it is told to stop."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import click

from cli.cluster import HOST, ClusterError, LocalCluster, StartAbandonedError
from core.errors import EXIT_CONFIG
from core.server import check_bindable

# Options of the services that `up` knows by name and hands on as they are; the services check the values.
_SERVICE_OPTIONS = {
    "--device": "Where to compute.",
    "--dtype": "Type of weights and activations.",
    "--max-model-len": "Longest prompt and answer together, in tokens.",
    "--max-num-seqs": "Most requests in one batch.",
    "--max-num-batched-tokens": "Most tokens in one step.",
    "--block-size": "Tokens in a KV block.",
    "--num-gpu-blocks": "KV blocks.",
    "--gpu-memory-utilization": "Share of the device's memory that each service may use.",
    "--encoder-cache-bytes": "Bytes of the encoder buffer.",
    "--limit-mm-per-prompt": "Images in a prompt, as JSON.",
    "--tensor-parallel-size": "Devices of one engine.",
    "--ec-connector": "Class of the EC connector.",
    "--ec-connector-module-path": "Module of an EC connector of your own.",
    "--ec-connector-extra-config": "Settings of the EC connector, as JSON.",
    "--ec-transfer-config": "vLLM's spelling of the EC options.",
    "--kv-connector": "Class of the KV connector.",
    "--kv-connector-module-path": "Module of a KV connector of your own.",
    "--kv-connector-extra-config": "Settings of the KV connector, as JSON.",
    "--kv-transfer-config": "vLLM's spelling of the KV options.",
}


class _ConfigException(click.ClickException):
    """A process of the cluster found an option or a file wrong."""

    exit_code = EXIT_CONFIG


def _service_options(command: click.Command) -> click.Command:
    for name, text in _SERVICE_OPTIONS.items():
        command.params.append(click.Option([name], help=text))
    return command


@_service_options
@click.command()
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False), help="Folder of the model [default: the demo's]."
)
@click.option("--encoders", type=click.IntRange(1), default=1, show_default=True)
@click.option("--prefills", type=click.IntRange(1), default=1, show_default=True)
@click.option("--decodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--router-port", type=click.IntRange(0, 65535), default=50060, show_default=True, help="0: any free one.")
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option(
    "--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Logs go to files there, not to standard error."
)
@click.option("--log-level", default="INFO", show_default=True)
@click.option("--start-timeout", type=click.FloatRange(1), default=600.0, show_default=True, metavar="SECONDS")
@click.option("--stop-timeout", type=click.FloatRange(0), default=60.0, show_default=True, metavar="SECONDS")
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def up(
    model: str | None,
    encoders: int,
    prefills: int,
    decodes: int,
    router_port: int,
    http_port: int,
    log_dir: Path | None,
    log_level: str,
    start_timeout: float,
    stop_timeout: float,
    more: tuple[str, ...],
    **service_options: str | None,
) -> None:
    """Start a cluster on this machine and keep it up. MORE, after --, goes to the three services as it is."""
    service_args = [
        f"--{name.replace('_', '-')}={value}" for name, value in service_options.items() if value is not None
    ]
    # At once, and not after the stages have loaded their weights.
    check_bindable(HOST, router_port, port_option="--router-port")
    check_bindable(HOST, http_port, port_option="--http-port")
    cluster = LocalCluster(
        model,
        encoders=encoders,
        prefills=prefills,
        decodes=decodes,
        service_args=[f"--log-level={log_level}", *service_args, *more],
        router_args=[f"--log-level={log_level}"],
        router_port=router_port,
        http_port=http_port,
        log_dir=log_dir,
        start_timeout_s=start_timeout,
        stop_timeout_s=stop_timeout,
    )
    stop = threading.Event()

    def on_signal(which: int, frame: FrameType | None) -> None:
        if stop.is_set():
            cluster.kill()
            return
        stop.set()
        print(f"stopping after {signal.Signals(which).name}; once more kills at once", file=sys.stderr, flush=True)

    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, on_signal)
    try:
        cluster.start(give_up=stop)
        print(f"ready router={cluster.router} http={cluster.http}", flush=True)
        while not stop.wait(0.2):
            dead = cluster.dead()
            if dead is not None:
                # A cluster with a hole looks alive and answers nothing.
                raise ClusterError(dead, f"ended with exit code {dead.process.wait()}; stopping the others")
    except StartAbandonedError:
        pass
    except ClusterError as error:
        failure = _ConfigException if error.exit_code == EXIT_CONFIG else click.ClickException
        raise failure(str(error)) from error
    finally:
        cluster.stop()
