"""Any OpenAI-compatible server as a target: `http://HOST:PORT/v1`, streaming chat completions."""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import msgspec

from cli.bench.load import BenchRequest, Record, TargetError

# A line of the stream is one JSON object; anything longer than this is no token.
_MAX_LINE_BYTES = 1 << 20


class HttpTarget:
    """See `cli.bench.load.Target`. Greedy, with end-of-sequence ignored: servers that know `ignore_eos` and
    `min_tokens` give exactly the length asked for, others may stop before."""

    def __init__(self, url: str, model: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # open loop: a limit here would be a queue that nobody sees
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_MAX_LINE_BYTES,
        )

    async def prepare(self) -> None:
        """Ask the server which model it serves, unless one was named. Raises TargetError."""
        if self._model is not None:
            return
        try:
            async with self._session.get(f"{self._url}/models", timeout=aiohttp.ClientTimeout(total=30)) as response:
                await _check(response)
                self._model = str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TargetError("connection", f"{self._url}/models: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise TargetError("protocol", f"{self._url}/models names no model; name one with --model") from error

    async def send(self, request: BenchRequest, record: Record) -> None:
        try:
            async with self._session.post(f"{self._url}/chat/completions", json=self._body(request)) as response:
                await _check(response)
                await _read_stream(response, record)
        except aiohttp.ClientError as error:
            raise TargetError("connection", str(error)) from error
        except ValueError as error:  # not JSON, or a line without an end
            raise TargetError("protocol", str(error)) from error

    async def close(self) -> None:
        await self._session.close()

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + base64.b64encode(image).decode()}}
            for image in request.images
        ]
        content.append({"type": "text", "text": request.prompt})
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": request.output_len,
            "min_tokens": request.output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await response.text(errors="replace"))[:500]
        raise TargetError(f"HTTP {response.status}", text)


async def _read_stream(response: aiohttp.ClientResponse, record: Record) -> None:
    """Server-sent events: `data: {…}` lines up to `data: [DONE]`. A chunk with text counts as one token until the usage
    at the end says how many there were."""
    async for raw in response.content:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue  # blank lines between events, comments that keep the connection alive
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = msgspec.json.decode(data, type=dict[str, Any])
        if "error" in event:
            raise TargetError("stream error", str(event["error"])[:500])
        if any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or ()):
            record.chunk(1)
        usage = event.get("usage")
        if usage and usage.get("completion_tokens"):
            record.num_tokens = int(usage["completion_tokens"])
    raise TargetError("protocol", "the stream ended without [DONE]")
