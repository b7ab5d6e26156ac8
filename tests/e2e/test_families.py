"""The equality list over router, encoder, prefill and decode for the other families; test_equality.py has qwen3_vl."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.cluster import LocalCluster
from demo.random_checkpoint import make_checkpoint
from tests.e2e.conftest import Cluster, chat_request
from tests.e2e.conversations import CONVERSATIONS, LONG
from tests.reference import Reference

NUM_TOKENS = 64
#: Of llava only images take tokens by the hundred; the budget is small enough that LONG is chunked in every family.
_BUDGET = 64


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "llava"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Reference]]:
    folder = tmp_path_factory.mktemp(request.param)
    model: Path = make_checkpoint(folder / "model", family=request.param)
    args = ["--dtype=float32", f"--max-num-batched-tokens={_BUDGET}", "--max-model-len=2048"]
    with LocalCluster(model, service_args=args, log_dir=folder / "logs") as local:
        yield Cluster(local), Reference(model)


def test_answers_equal_transformers(family: tuple[Cluster, Reference]) -> None:
    """Each alone, then sixteen at once."""
    cluster, reference = family
    expected = {name: reference.generate(conversation, NUM_TOKENS) for name, conversation in CONVERSATIONS.items()}
    assert len({tuple(answer) for answer in expected.values()}) == len(expected)
    assert all(len(set(answer)) >= 5 for answer in expected.values())
    for name, conversation in CONVERSATIONS.items():
        assert cluster.tokens(conversation) == expected[name], name
    names = (list(CONVERSATIONS) * 2)[:16]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: cluster.tokens(CONVERSATIONS[name]), names))
    assert answers == [expected[name] for name in names]


def test_a_prompt_longer_than_the_token_budget(family: tuple[Cluster, Reference]) -> None:
    cluster, reference = family
    is_image = reference.inputs(LONG)["input_ids"][0] == reference.model.config.image_token_id
    borders = range(_BUDGET, len(is_image), _BUDGET)
    assert any(is_image[border - 1] and is_image[border] for border in borders), "no image lies across two chunks"
    assert cluster.tokens(LONG) == reference.generate(LONG, NUM_TOKENS)


def test_text_is_the_tokens(family: tuple[Cluster, Reference]) -> None:
    cluster, reference = family
    responses = cluster.generate(chat_request(CONVERSATIONS["one image"]))
    tokens = [token for response in responses for token in response.token_ids]
    text = "".join(response.text for response in responses)
    assert text == reference.tokenizer.decode(tokens, skip_special_tokens=True)


def test_without_a_fault_nothing_failed(family: tuple[Cluster, Reference]) -> None:
    cluster, _ = family
    cluster.wait_empty()
    cluster.assert_no_failures()
