"""In float32, the tokens that come out of router, encoder, prefill and decode are the ones that `generate` gives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import TOKEN_BUDGET, Cluster, chat_request
from tests.e2e.conversations import CONVERSATIONS, LONG
from tests.pictures import picture
from tests.reference import Conversation, Reference

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, list[int]]:
    return {name: reference.generate(conversation, NUM_TOKENS) for name, conversation in CONVERSATIONS.items()}


def test_the_measure_measures(expected: dict[str, list[int]], reference: Reference) -> None:
    """Answers vary, and depend on the pictures and their order; else equal tokens would prove nothing."""
    answers = [tuple(tokens) for tokens in expected.values()]
    assert len(set(answers)) == len(answers)
    assert all(len(set(answer)) >= 10 for answer in answers)
    one, other = picture(2, 64, 96), picture(31, 64, 96)
    orders = [[one, other, "Compare."], [other, one, "Compare."], [one, one, "Compare."]]
    assert len({tuple(reference.generate([("user", parts)], NUM_TOKENS)) for parts in orders}) == 3


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_one_request(cluster: Cluster, expected: dict[str, list[int]], name: str) -> None:
    responses = cluster.generate(chat_request(CONVERSATIONS[name]))
    assert [token for response in responses for token in response.token_ids] == expected[name]
    finished = responses[-1].finished
    assert finished.usage.completion_tokens == NUM_TOKENS
    assert len(responses) > NUM_TOKENS // 4, "tokens are streamed, not sent in one piece"


def test_text_is_the_tokens(cluster: Cluster, reference: Reference) -> None:
    responses = cluster.generate(chat_request(CONVERSATIONS["one image"]))
    tokens = [token for response in responses for token in response.token_ids]
    text = "".join(response.text for response in responses)
    assert text == reference.tokenizer.decode(tokens, skip_special_tokens=True)


def test_sixteen_at_once(cluster: Cluster, expected: dict[str, list[int]]) -> None:
    names = (list(CONVERSATIONS) * 2)[:16]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: cluster.tokens(CONVERSATIONS[name]), names))
    assert answers == [expected[name] for name in names]


def test_a_prompt_longer_than_the_token_budget(cluster: Cluster, reference: Reference) -> None:
    inputs = reference.inputs(LONG)
    num_tokens = inputs["input_ids"].shape[1]
    image = inputs["mm_token_type_ids"][0].tolist()
    borders = range(TOKEN_BUDGET, num_tokens, TOKEN_BUDGET)
    assert any(image[border - 1] and image[border] for border in borders), (
        "no image lies across the border of two chunks"
    )
    assert cluster.tokens(LONG) == reference.generate(LONG, NUM_TOKENS)


def test_token_prompts(cluster: Cluster, reference: Reference) -> None:
    """The same request as token ids, one placeholder an image."""
    conversation: Conversation = CONVERSATIONS["images around text"]
    request = chat_request(conversation)
    image_token = reference.model.config.image_token_id
    messages = [
        {
            "role": role,
            "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts],
        }
        for role, parts in conversation
    ]
    ids = reference.tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids.count(image_token) == 2
    images = [part.image for message in request.chat.messages for part in message.content if part.HasField("image")]
    request.tokens.token_ids.extend(ids)  # a oneof: this takes the place of `chat`
    request.tokens.images.extend(images)
    answer = [token for response in cluster.generate(request) for token in response.token_ids]
    assert answer == reference.generate(conversation, NUM_TOKENS)


def test_without_a_fault_nothing_failed(cluster: Cluster) -> None:
    cluster.wait_empty()
    cluster.assert_no_failures()
