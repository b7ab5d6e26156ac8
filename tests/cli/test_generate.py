"""`triptych generate` and the plain client in examples/ against a router over stub stages."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc

from tests.cli.program import ROOT, triptych
from tests.router.stubs import FIRST_TOKEN, cluster, image_file, text_of

FOUR = [FIRST_TOKEN + i for i in range(4)]


async def test_json_has_text_tokens_usage_and_timeline(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(image_file(name.encode()))
    async with cluster() as c:
        code, out, err = await triptych(
            "generate", "--router", c.address, "--image", str(tmp_path / "two"), "--image", str(tmp_path / "one"),
            "--prompt", "which?", "--max-tokens", "4", "--temperature", "0.5", "--seed", "7", "--ignore-eos", "--json",
        )  # fmt: skip
        assert code == 0, err
        result = json.loads(out)
        assert list(result) == ["text", "token_ids", "finish_reason", "usage", "timeline"]
        assert (result["token_ids"], result["text"], result["finish_reason"]) == (FOUR, text_of(FOUR), "length")
        assert result["usage"]["completion_tokens"] == 4
        assert {"request", "encode", "prefill", "kv_transfer", "decode"} <= {s["name"] for s in result["timeline"]}
        # Images in the order of the options, before the text.
        request = c.prefills[0].requests[0]
        assert [part.WhichOneof("part") for part in request.chat.messages[0].content] == ["image", "image", "text"]
        keys = {e.content_hash: e.image for e in c.encoders[0].requests}
        assert sorted(keys.values()) == [image_file(b"one"), image_file(b"two")]
        placed = c.decodes[0].requests[0].features
        assert [feature.key for feature in request.features] == [one.feature.key for one in placed]
        assert (request.sampling.seed, request.sampling.ignore_eos) == (7, True)


async def test_streams_text(tmp_path: Path) -> None:
    async with cluster() as c:
        code, out, err = await triptych("generate", "--router", c.address, "--prompt", "hi", "--max-tokens", "4")
        assert (code, out) == (0, text_of(FOUR) + "\n"), err


async def test_errors_are_one_line_with_the_code() -> None:
    async with cluster() as c:
        c.prefills[0].failures = [(grpc.StatusCode.INVALID_ARGUMENT, "prompt: 9 tokens, the limit is 8")]
        code, out, err = await triptych("generate", "--router", c.address, "--prompt", "hi")
        assert (code, out) == (1, "")
        assert err == "error: INVALID_ARGUMENT: prompt: 9 tokens, the limit is 8\n"
        code, _, err = await triptych("generate", "--router", c.address, "--prompt", "hi", "--image", "/no/such/file")
        assert code == 2
        assert "/no/such/file" in err


async def test_the_plain_client_works_against_any_router(tmp_path: Path) -> None:
    picture = tmp_path / "picture"
    picture.write_bytes(image_file(b"picture"))
    async with cluster() as c:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "examples" / "generate.py"), c.address, "what?", str(picture),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(30):
            out, err = await process.communicate()
        assert process.returncode == 0, err
        assert text_of(FOUR).encode() in out
        assert b"64 generated" in out
