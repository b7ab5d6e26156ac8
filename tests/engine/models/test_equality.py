"""In float32 every family's greedy tokens are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import ConnectorConfig, EngineConfig
from core.types import ECRole, SamplingParams
from engine.llm import LLM
from engine.protocol import RequestOutput
from tests.e2e.conversations import CONVERSATIONS, LONG
from tests.engine.models.conftest import Families
from tests.pictures import picture
from tests.reference import Conversation, Reference

NUM_TOKENS = 64
#: Smaller than most of the prompts, so that they are computed in chunks; images lie across the borders.
SMALL_BUDGET = 64


@pytest.fixture(scope="session")
def expected(families: Families, family: str) -> dict[str, list[int]]:
    reference = families.reference(family)
    return {name: reference.generate(conversation, NUM_TOKENS) for name, conversation in CONVERSATIONS.items()}


@pytest.fixture(scope="module", params=[2048, SMALL_BUDGET], ids=["whole", "chunked"])
def llm(
    request: pytest.FixtureRequest, families: Families, family: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    made = _llm(families.model_dir(family), tmp_path_factory.mktemp("items"), request.param)
    yield made
    made.close()


def _llm(model_dir: Path, items: Path, budget: int) -> LLM:
    config = EngineConfig(
        model=str(model_dir),
        ec_role=ECRole.BOTH,
        ec_connector=ConnectorConfig("ECSharedStorageConnector", extra={"shared_storage_path": str(items)}),
        device="cpu",
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        num_gpu_blocks=256,
        encoder_cache_bytes=4 << 20,
    )
    return LLM(config)


def _answers(llm: LLM, conversations: list[Conversation]) -> list[RequestOutput]:
    messages = [
        [
            (role, [("text", part) if isinstance(part, str) else ("image", None) for part in parts])
            for role, parts in conversation
        ]
        for conversation in conversations
    ]
    images = [
        [part for _, parts in conversation for part in parts if isinstance(part, bytes)]
        for conversation in conversations
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return llm.generate(messages, images, sampling, progress=False)


def test_the_measure_measures(families: Families, family: str, expected: dict[str, list[int]]) -> None:
    """Answers vary, and depend on the pictures and on their order: else equal tokens would prove nothing."""
    answers = [tuple(tokens) for tokens in expected.values()]
    assert len(set(answers)) == len(answers)
    assert all(len(set(answer)) >= 10 for answer in answers)
    one, other = picture(2, 64, 96), picture(31, 64, 96)
    orders: list[Conversation] = [[("user", [a, b, "Compare."])] for a, b in ((one, other), (other, one), (one, one))]
    reference = families.reference(family)
    assert len({tuple(reference.generate(order, NUM_TOKENS)) for order in orders}) == len(orders)


def test_tokens_are_those_of_transformers(llm: LLM, expected: dict[str, list[int]]) -> None:
    """All conversations in one continuous batch: chunks of some run beside decodes of others."""
    outputs = _answers(llm, list(CONVERSATIONS.values()))
    assert {name: output.token_ids for name, output in zip(CONVERSATIONS, outputs, strict=True)} == expected


def test_an_image_across_the_border_of_two_chunks(families: Families, family: str, tmp_path: Path) -> None:
    reference = families.reference(family)
    inputs = reference.inputs(LONG)
    image = inputs["mm_token_type_ids"][0].tolist()
    borders = range(SMALL_BUDGET, len(image), SMALL_BUDGET)
    assert any(image[border - 1] and image[border] for border in borders), "no image lies across a border"
    llm = _llm(families.model_dir(family), tmp_path, SMALL_BUDGET)
    [output] = _answers(llm, [LONG])
    llm.close()
    assert output.token_ids == reference.generate(LONG, NUM_TOKENS)
    assert output.usage is not None
    assert output.usage.prompt_tokens == len(image)


def test_text_is_the_tokens(llm: LLM, families: Families, family: str) -> None:
    reference: Reference = families.reference(family)
    [output] = _answers(llm, [CONVERSATIONS["unicode"]])
    assert output.text == reference.tokenizer.decode(output.token_ids, skip_special_tokens=True)
