"""`make demo`: a whole Triptych on loopback, one picture, one question, the answer and where its time went.

Until the trained demo model is there, the model has random weights: its answer is noise, but it depends on every pixel
and every token that went through the three services.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import click
import grpc
from PIL import Image, ImageDraw

from cli.client import describe, image_request
from cli.cluster import ClusterError, LocalCluster
from cli.timeline import render
from core.convert import spans_from_proto
from core.server import CHANNEL_OPTIONS
from demo.random_checkpoint import make_checkpoint
from protos import common_pb2, router_pb2_grpc

_ROOT = Path(__file__).resolve().parent.parent
_COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
_SHAPES = ("circle", "square", "triangle")
_TIMEOUT_S = 60.0


def draw_picture(seed: int) -> tuple[bytes, str]:
    """A PNG of one shape, and what it shows."""
    draw_from = random.Random(seed)
    width, height = draw_from.choice([(224, 224), (224, 160), (160, 224)])
    colour, shape = draw_from.choice(_COLOURS), draw_from.choice(_SHAPES)
    size = draw_from.randint(60, 120)
    left, top = draw_from.randint(0, width - size), draw_from.randint(0, height - size)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    box = (left, top, left + size, top + size)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue(), f"a {colour} {shape} on white, {width}x{height}"


@click.command()
@click.option(
    "--image", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Ask about this one."
)
@click.option("--prompt", default="What is in the picture?", show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=24, show_default=True)
def main(file: Path | None, prompt: str, max_tokens: int) -> None:
    """Start every service on loopback, ask one question about a picture, stop."""
    model = _ROOT / ".cache" / "model"
    if not (model / "config.json").is_file():
        model.parent.mkdir(exist_ok=True)
        make_checkpoint(model)
    if file is not None:
        picture, shows = file.read_bytes(), str(file)
    else:
        picture, shows = draw_picture(random.randrange(1 << 32))
    print("starting encoder, prefill, decode and router on loopback …", flush=True)
    try:
        with LocalCluster(model, log_dir=_ROOT / ".cache" / "demo-logs") as cluster:
            print(f"router gRPC {cluster.router}, HTTP {cluster.http}")
            print(f"\npicture   {shows}\nquestion  {prompt}\nanswer    ", end="", flush=True)
            spans = _ask(cluster.router, picture, prompt, max_tokens)
    except (ClusterError, grpc.RpcError) as error:
        raise click.ClickException(describe(error) if isinstance(error, grpc.RpcError) else str(error)) from error
    print("          (the weights are random, and so is what they say)\n")
    print(spans)


def _ask(router: str, picture: bytes, prompt: str, max_tokens: int) -> str:
    """Stream one answer to standard output; return its timeline, drawn."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens)
    timeline = ""
    with grpc.insecure_channel(router, options=CHANNEL_OPTIONS) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for response in stub.Generate(image_request(prompt, [picture], sampling), timeout=_TIMEOUT_S):
            print(response.text, end="", flush=True)
            if response.HasField("finished"):
                utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
                timeline = render(spans_from_proto(response.finished.timeline), block="█" if utf8 else "#")
    print()
    return timeline


if __name__ == "__main__":
    main()
