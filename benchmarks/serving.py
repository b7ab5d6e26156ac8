"""Triptych beside `transformers.generate`: the same model, pictures and prompts, in the same run.

A random-weight Qwen3-VL of 270 million parameters in bf16, 448 x 448 pictures, 64 greedy tokens. Triptych runs as four
processes and answers over gRPC, its pictures never seen before; transformers runs in this process, preprocessing
included. Only one of the two works at a time. Prints a table and, with `--json FILE`, writes the numbers.

It drives services, so running it needs grpc and all else that they do; it is imported without.

    python -m benchmarks.serving [--rounds N] [--concurrency 1,8] [--json FILE]
"""

from __future__ import annotations

import io
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image

from benchmarks.model import ROOT, bench_model

_SIDE = 448
_TOKENS = 64
_PROMPT = "What is in this picture?"
_TIMEOUT_S = 300.0


class Measured:
    """One batch of equal requests, all started together."""

    def __init__(self, ttft_s: Sequence[float], total_s: float, num_requests: int) -> None:
        self.ttft_s = statistics.median(ttft_s)
        self.total_s = total_s
        self.tokens_per_s = num_requests * _TOKENS / total_s


def pictures() -> Iterator[bytes]:
    """Noise in blocks of 16 pixels, never the same twice."""
    for seed in count(int(time.time())):
        generator = torch.Generator().manual_seed(seed)
        cells = torch.randint(0, 256, (_SIDE // 16, _SIDE // 16, 3), dtype=torch.uint8, generator=generator)
        out = io.BytesIO()
        Image.fromarray(cells.numpy()).resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(out, "PNG")
        yield out.getvalue()


class Triptych:
    """Requests to a router."""

    def __init__(self, router: str) -> None:
        # Here, so that the module can be imported where there is no grpc.
        import grpc

        from core.server import CHANNEL_OPTIONS
        from protos import router_pb2_grpc

        self._channel = grpc.insecure_channel(router, options=CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    def run(self, files: Sequence[bytes]) -> Measured:
        start_s = time.perf_counter()
        with ThreadPoolExecutor(len(files)) as pool:
            ttft_s = list(pool.map(lambda file: self._one(file, start_s), files))
        return Measured(ttft_s, time.perf_counter() - start_s, len(files))

    def _one(self, file: bytes, start_s: float) -> float:
        from cli.client import image_request
        from protos import common_pb2

        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
        first_s, num_tokens = 0.0, 0
        for response in self._stub.Generate(image_request(_PROMPT, [file], sampling), timeout=_TIMEOUT_S):
            first_s = first_s or time.perf_counter()
            num_tokens += len(response.token_ids)
        assert num_tokens == _TOKENS, num_tokens
        return first_s - start_s


class Transformers:
    """The same through `generate`, as a batch."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(model_dir)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None

    def run(self, files: Sequence[bytes]) -> Measured:
        start_s = time.perf_counter()
        first_s = self._generate(files, 1)
        ttft_s = first_s - start_s
        start_s = time.perf_counter()
        self._generate(files, _TOKENS)
        return Measured([ttft_s], time.perf_counter() - start_s, len(files))

    @torch.inference_mode()
    def _generate(self, files: Sequence[bytes], max_tokens: int) -> float:
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        made = self._processor(images=images, return_tensors="pt")
        num_embeds = int(made["image_grid_thw"][0].prod()) // self._processor.merge_size**2
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _PROMPT}]}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * num_embeds), return_tensors="pt")
        input_ids = ids["input_ids"].repeat(len(files), 1)
        out = self._model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            mm_token_type_ids=(input_ids == self._model.config.image_token_id).int(),
            pixel_values=made["pixel_values"],
            image_grid_thw=made["image_grid_thw"],
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        assert out.shape[1] == input_ids.shape[1] + max_tokens
        return time.perf_counter()


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="The median round is shown.")
@click.option("--concurrency", default="1,8", show_default=True, help="Requests at once, a list.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
def main(rounds: int, concurrency: str, json_file: Path | None) -> None:
    """Triptych beside transformers.generate, same model, same run."""
    from cli.cluster import LocalCluster

    model = bench_model()
    sizes = [int(size) for size in concurrency.split(",")]
    source = pictures()
    results: dict[str, dict[int, list[Measured]]] = {"triptych": {}, "transformers": {}}
    with LocalCluster(model, service_args=["--max-model-len=4096"], log_dir=ROOT / ".cache" / "bench-logs") as cluster:
        triptych = Triptych(cluster.router)
        reference = Transformers(model)
        for size in sizes:
            for name, target in (("triptych", triptych), ("transformers", reference)):
                target.run([next(source) for _ in range(size)])  # warm
                results[name][size] = [target.run([next(source) for _ in range(size)]) for _ in range(rounds)]
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds")
    print(f"{'':14}{'at once':>8}{'TTFT s':>10}{'end s':>10}{'tokens/s':>10}")
    rows = []
    for size in sizes:
        for name in results:
            ttft_s = statistics.median(m.ttft_s for m in results[name][size])
            total_s = statistics.median(m.total_s for m in results[name][size])
            rows.append({"who": name, "at_once": size, "ttft_s": ttft_s, "total_s": total_s})
            print(f"{name:14}{size:>8}{ttft_s:>10.3f}{total_s:>10.3f}{size * _TOKENS / total_s:>10.1f}")
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
