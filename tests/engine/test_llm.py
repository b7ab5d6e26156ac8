"""Offline batches: the answers of transformers, and a failure that leaves the engine usable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import ConfigError, EngineError, InvalidRequestError
from core.types import ECRole, SamplingParams
from engine.llm import LLM
from tests.engine.engines import engine_config
from tests.pictures import picture
from tests.reference import Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
IMAGE, OTHER = picture(3, 64, 96), picture(4, 96, 64)
CHAT = [("user", [("image", None), ("text", "What is this?")])]
PAIR = [("user", [("image", None), ("text", "and"), ("image", None)])]


@pytest.fixture(scope="module")
def llm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    # Fewer than there are requests: offline, a batch waits instead of being refused.
    made = LLM(engine_config(tiny_model, tmp_path_factory.mktemp("store"), max_waiting=1))
    yield made
    made.close()


def test_a_batch_gives_the_answers_of_transformers(llm: LLM, reference: Reference) -> None:
    text = [("user", [("text", "Tell me about the sea.")])]
    outputs = llm.generate([CHAT, text, PAIR, CHAT], [[IMAGE], [], [IMAGE, OTHER], [OTHER]], GREEDY, progress=False)
    expected = [
        reference.generate(conversation, 12)
        for conversation in (
            [("user", [IMAGE, "What is this?"])],
            [("user", ["Tell me about the sea."])],
            [("user", [IMAGE, "and", OTHER])],
            [("user", [OTHER, "What is this?"])],
        )
    ]
    assert [output.token_ids for output in outputs] == expected
    assert outputs[0].text == reference.tokenizer.decode(expected[0], skip_special_tokens=True)


def test_after_a_failure_the_next_batch_is_answered(llm: LLM) -> None:
    with pytest.raises(EngineError, match="image"):
        llm.generate([CHAT, CHAT], [[IMAGE[: len(IMAGE) // 2]], [picture(5, 64, 64)]], GREEDY, progress=False)
    with pytest.raises(InvalidRequestError, match="1 images, but 2 features"):
        llm.generate([CHAT], [[IMAGE, OTHER]], GREEDY, progress=False)
    assert len(llm.generate([CHAT], [[IMAGE]], GREEDY, progress=False)[0].token_ids) == 12
    assert llm._client.stats().num_waiting == 0


def test_a_role_without_both_halves_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ec-role"):
        LLM(engine_config(tiny_model, tmp_path, ECRole.CONSUMER))
