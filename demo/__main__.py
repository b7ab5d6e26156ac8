"""`make demo`: a whole Triptych on loopback, new pictures, questions about them, answers, and where the time went.

The model is this project's own (demo/model), trained on pictures like these and never on these.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import click
import grpc

from cli.client import describe, image_request
from cli.cluster import ClusterError, LocalCluster
from cli.timeline import render
from core.convert import spans_from_proto
from core.server import CHANNEL_OPTIONS
from demo import terminal_picture
from demo.questions import ONE_PICTURE, SEVERAL_PICTURES, draw_question
from protos import common_pb2, router_pb2_grpc

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 60.0


@click.command()
@click.option(
    "--image",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Ask about this file instead of a drawn picture; again for several.",
)
@click.option("--prompt", default="What is in the picture?", show_default=True, help="What to ask about --image.")
@click.option("--seed", type=click.IntRange(0), help="Draw the pictures of that number again.")
@click.option("--max-tokens", type=click.IntRange(1), default=48, show_default=True)
def main(files: tuple[Path, ...], prompt: str, seed: int | None, max_tokens: int) -> None:
    """Start every service on loopback, ask about pictures, stop."""
    print("starting encoder, prefill, decode and router on loopback …", flush=True)
    try:
        with LocalCluster(log_dir=_ROOT / ".cache" / "demo-logs") as cluster:
            print(f"router gRPC {cluster.router}, HTTP {cluster.http}")
            if files:
                pictures = [file.read_bytes() for file in files]
                _show(pictures, [str(file) for file in files])
                print(f"question  {prompt}")
                _, timeline = _ask(cluster.router, pictures, prompt, max_tokens)
                print(f"\n{timeline}")
                return
            seed = random.randrange(1_000_000) if seed is None else seed
            for kinds in (ONE_PICTURE, SEVERAL_PICTURES):
                _draw_and_ask(cluster.router, seed, random.Random(seed).choice(kinds), max_tokens)
            print(f"\nthe same pictures again: make demo SEED={seed}")
    except (ClusterError, grpc.RpcError, OSError) as error:
        raise click.ClickException(describe(error) if isinstance(error, grpc.RpcError) else str(error)) from error


def _draw_and_ask(router: str, seed: int, kind: str, max_tokens: int) -> None:
    question = draw_question(seed, kind)
    _show(question.pictures, question.shows)
    print(f"question  {question.prompt}")
    answer, timeline = _ask(router, question.pictures, question.prompt, max_tokens)
    print("          which is right" if answer == question.answer else f"          right would be: {question.answer}")
    print(f"\n{timeline}")


def _show(pictures: list[bytes], shows: list[str]) -> None:
    print()
    if terminal_picture.can_show(sys.stdout):
        true_colour = os.environ.get("COLORTERM") in ("truecolor", "24bit")
        print(terminal_picture.draw(pictures, rows=12 if len(pictures) == 1 else 8, true_colour=true_colour))
    for number, text in enumerate(shows, start=1):
        print(f"picture {number if len(shows) > 1 else ' '} {text}")


def _ask(router: str, pictures: list[bytes], prompt: str, max_tokens: int) -> tuple[str, str]:
    """Stream one answer to standard output; return it and its timeline, drawn."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens)
    answer, timeline = "", ""
    print("answer    ", end="", flush=True)
    with grpc.insecure_channel(router, options=CHANNEL_OPTIONS) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for response in stub.Generate(image_request(prompt, pictures, sampling), timeout=_TIMEOUT_S):
            print(response.text, end="", flush=True)
            answer += response.text
            if response.HasField("finished"):
                utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
                timeline = render(spans_from_proto(response.finished.timeline), block="█" if utf8 else "#")
    print()
    return answer, timeline


if __name__ == "__main__":
    main()
