"""`triptych bench`: what it sends, what it measures, and how it counts failures."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from aiohttp import web
from PIL import Image

from cli.bench.grpc_target import GrpcTarget
from cli.bench.http_target import HttpTarget
from cli.bench.load import LoadSpec, Record, TargetError, make_requests, run_load
from cli.bench.report import percentile, summarize, to_table
from tests.cli.program import triptych
from tests.router.stubs import cluster

SMALL = LoadSpec(num_requests=6, images=2, side=16, input_len=5, output_len=4, timeout_s=10)


class FakeOpenAI:
    """Chat completions over server-sent events, two tokens in each chunk."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.answer = "ok"  # or "overloaded", "cut", "error", "hang"

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.answer == "overloaded":
            return web.json_response({"error": {"message": "later"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(data: dict) -> None:
            await response.write(b": alive\n\ndata: " + json.dumps(data).encode() + b"\n\n")

        await event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"] // 2):
            await event({"choices": [{"delta": {"content": "two tokens"}}]})
            if self.answer == "cut":
                return response
            if self.answer == "error":
                await event({"error": {"message": "no"}})
            if self.answer == "hang":
                await asyncio.sleep(60)  # cut short by the server's shutdown
        await event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        await response.write(b"data: [DONE]\n\n")
        return response


async def load_http(fake: FakeOpenAI, spec: LoadSpec) -> list[Record]:
    async with fake.serve() as url:
        target = HttpTarget(url)
        try:
            await target.prepare()
            records, _ = await run_load(make_requests(spec), target)
        finally:
            await target.close()
    return records


async def test_http_load_sends_pictures_and_counts_tokens_by_usage() -> None:
    fake = FakeOpenAI()
    records = await load_http(fake, SMALL)
    assert [record.error for record in records] == [""] * 6
    assert {record.num_tokens for record in records} == {4}
    assert {len(record.chunk_times_s) for record in records} == {2}
    body = fake.bodies[0]
    assert (body["model"], body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == ("fake", 4, 4, True)
    *images, text = body["messages"][0]["content"]
    assert len(text["text"].split()) == 5
    for image in images:
        file = io.BytesIO(base64.b64decode(image["image_url"]["url"].removeprefix("data:image/jpeg;base64,")))
        assert Image.open(file).size == (16, 16)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("overloaded", "HTTP 429"), ("cut", "protocol"), ("error", "stream error"), ("hang", "timeout")],
)
async def test_http_failures_are_counted_by_kind(answer: str, kind: str) -> None:
    fake = FakeOpenAI()
    fake.answer = answer
    records = await load_http(
        fake, LoadSpec(num_requests=2, images=0, output_len=4, timeout_s=0.5 if answer == "hang" else 30)
    )
    assert [record.error for record in records] == [kind, kind]


async def test_an_unreachable_server_is_named() -> None:
    target = HttpTarget("http://127.0.0.1:1/v1")
    with pytest.raises(TargetError, match=r"127\.0\.0\.1:1/v1/models"):
        await target.prepare()
    await target.close()


async def test_grpc_load_measures_tokens_and_counts_refusals() -> None:
    async with cluster() as c:
        c.encoders[0].failures = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")]
        target = GrpcTarget(c.address)
        records, duration_s = await run_load(make_requests(SMALL), target)
        await target.close()
        report = summarize("grpc", records, duration_s, slo_ttft_ms=60_000)
        assert report.errors == {"RESOURCE_EXHAUSTED": 1}
        assert (report.completed, report.failed, report.output_tokens) == (5, 1, 20)
        assert report.slo_attainment == pytest.approx(5 / 6)
        assert report.goodput == pytest.approx(5 / duration_s)
        assert c.decodes[0].requests[0].sampling.ignore_eos


async def test_the_load_is_open_loop() -> None:
    class Never:
        """Answers only once every request has been sent: a closed loop would wait for ever."""

        def __init__(self, expected: int) -> None:
            self.waiting, self.expected, self.all_there = 0, expected, asyncio.Event()

        async def send(self, request, record) -> None:
            self.waiting += 1
            if self.waiting == self.expected:
                self.all_there.set()
            await self.all_there.wait()
            record.chunk(1)

        async def close(self) -> None: ...

    spec = LoadSpec(num_requests=20, images=0, request_rate=500, timeout_s=10)
    records, _ = await run_load(make_requests(spec), Never(20))
    assert not any(record.error for record in records)


def test_a_load_is_reproducible_and_poisson() -> None:
    spec = LoadSpec(num_requests=400, images=0, request_rate=10, seed=3)
    first, second = make_requests(spec), make_requests(spec)
    assert first == second
    assert first[0].due_s == 0
    gaps = [b.due_s - a.due_s for a, b in itertools.pairwise(first)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.1, rel=0.15)
    assert deviation == pytest.approx(mean, rel=0.2)  # as an exponential distribution has it
    assert make_requests(LoadSpec(num_requests=2, images=0))[1].due_s == 0


def test_images_repeat_as_often_as_asked() -> None:
    def distinct(ratio: float) -> int:
        spec = LoadSpec(num_requests=60, side=2, repeat_ratio=ratio)
        return len({image for request in make_requests(spec) for image in request.images})

    assert distinct(0.0) == 60
    assert distinct(1.0) == 1
    assert 20 <= distinct(0.5) <= 40


def record_of(*times_s: float, tokens: int | None = None) -> Record:
    record = Record()
    record.chunk_times_s = list(times_s)
    record.num_tokens = len(times_s) if tokens is None else tokens
    record.end_s = times_s[-1]
    return record


def test_report_of_known_times() -> None:
    failed = Record()
    failed.error = "timeout"
    records = [record_of(0.1, 0.2, 0.4), record_of(0.3, 0.5, tokens=5), record_of(0.2, tokens=1), failed]
    report = summarize("t", records, 2.0, slo_ttft_ms=250, slo_tpot_ms=120)
    assert report.ttft_ms.median == pytest.approx(200)
    assert report.tpot_ms.mean == pytest.approx((150 + 50) / 2)
    assert report.itl_ms.median == pytest.approx(200)
    assert report.e2e_ms.p99 == pytest.approx(400 + 0.98 * 100)
    assert report.request_throughput == 1.5
    assert report.output_token_throughput == 4.5
    assert report.slo_attainment == 0.25  # the third: the first is slow between tokens, the second before the first one
    assert report.goodput == 0.5
    table = to_table(report)
    assert "timeout              1" in table
    assert "25.0% attained, 0.50 requests/s" in table
    assert [percentile([1, 2, 3, 4, 5], share) for share in (0, 0.5, 0.9, 1)] == pytest.approx([1, 3, 4.6, 5])
    assert "-" in to_table(summarize("t", [failed], 1.0))


async def test_the_command_prints_json_with_progress_on_standard_error() -> None:
    fake = FakeOpenAI()
    async with fake.serve() as url:
        args = ("--num-requests", "3", "--side", "16", "--output-len", "4")
        code, out, err = await triptych("bench", "--target", url, *args, "--slo-tpot-ms", "60000", "--json")
        assert code == 0, err
        report = json.loads(out)
        assert (report["completed"], report["failed"], report["slo_attainment"]) == (3, 0, 1.0)
        assert report["ttft_ms"]["p90"] > 0
        assert "3/3" in err
        fake.answer = "overloaded"
        code, out, err = await triptych("bench", "--target", url, *args)
        assert code == 1
        assert "HTTP 429             3" in out
    code, _, err = await triptych("bench", "--target", "ftp://somewhere")
    assert code == 2
    assert "ftp://somewhere" in err
