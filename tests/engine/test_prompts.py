"""Prompts are token for token those of transformers, and no words of a client's become a special token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from core.errors import ConfigError, InvalidRequestError
from core.types import Feature
from demo.checkpoint_tokenizers import QWEN_SPECIAL
from demo.random_checkpoint import make_checkpoint
from engine.prompts import ChatMessage, PromptProcessor

SPECIAL = list(QWEN_SPECIAL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("prompts") / "model")


@pytest.fixture(scope="module")
def processor(model: Path) -> PromptProcessor:
    return PromptProcessor(str(model), max_model_len=4096, max_images=8)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def _feature(num_embeds: int = 1) -> Feature:
    return Feature(key="0" * 64, num_embeds=num_embeds, grid=(1, 2, 2 * num_embeds), width=64)


def _features(messages: Sequence[ChatMessage]) -> list[Feature]:
    """One feature an image, of 1, 2, 3, … embeddings."""
    count = sum(kind == "image" for _, parts in messages for kind, _ in parts)
    return [_feature(number + 1) for number in range(count)]


def _expected(reference: Any, messages: Sequence[ChatMessage], features: Sequence[Feature]) -> list[int]:
    conversation = [
        {
            "role": role,
            "content": [
                {"type": "text", "text": text} if kind == "text" else {"type": "image"} for kind, text in parts
            ],
        }
        for role, parts in messages
    ]
    ids = reference.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True, return_dict=False)
    following = iter(features)
    pad = reference.convert_tokens_to_ids("<|image_pad|>")
    return [new for old in ids for new in ([pad] * next(following).num_embeds if old == pad else [old])]


# Text of every kind, among it pieces of special tokens that join to none, and added tokens that are not special.
_WORDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from([" ", "\n", "\n\n", "  ", "\t", "the", "<", ">", "|", "|>", "<|", "im_", "<tool_call>", "<think>"]),
    st.sampled_from(["\u00e9", "e\u0301", "<|im_", "🎉", "12", "\u3000", "\0", "\U000f0000"]),
)
_TEXTS = st.lists(_WORDS, max_size=6).map("".join).filter(lambda text: not any(token in text for token in SPECIAL))
_PARTS = st.lists(st.one_of(_TEXTS.map(lambda text: ("text", text)), st.just(("image", None))), max_size=3)
_CHATS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), _PARTS), min_size=1, max_size=4)


@settings(max_examples=250, deadline=None)
@given(_CHATS)
def test_tokens_are_those_of_transformers(
    processor: PromptProcessor, reference: Any, messages: list[ChatMessage]
) -> None:
    for _, parts in messages:
        joined = "".join(text or "\0" for _, text in parts)
        if any(token in joined for token in SPECIAL):
            return  # two parts make a special token: there the two differ, on purpose
    features = _features(messages)[:8]
    if len(features) < len(_features(messages)):
        return
    token_ids, placed = processor.process_chat(messages, features)
    assert token_ids == _expected(reference, messages, features)
    assert [entry.feature for entry in placed] == features
    for entry in placed:
        assert token_ids[entry.offset : entry.end] == [processor.image_token_id] * entry.feature.num_embeds
        assert token_ids[entry.offset - 1] == processor.tokenizer.token_to_id("<|vision_start|>")


# Texts that spell special tokens whole, in two parts, or in three.
_ATTACKS = st.lists(
    st.one_of(
        st.sampled_from(SPECIAL),
        st.sampled_from(["<|", "im_", "end|>", "<|im_", "|>", "<|im_end|", ">", "<", "image_pad", " ", "\n", "hi"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=250, deadline=None)
@given(st.lists(st.lists(_ATTACKS.map("".join), min_size=1, max_size=4), min_size=1, max_size=3))
def test_words_never_become_special_tokens(processor: PromptProcessor, chat: list[list[str]]) -> None:
    messages: list[ChatMessage] = [("user", [*(("text", text) for text in texts), ("image", None)]) for texts in chat]
    token_ids, placed = processor.process_chat(messages, [_feature()] * len(chat))
    special = {processor.tokenizer.token_to_id(token) for token in SPECIAL}
    harmless: list[ChatMessage] = [("user", [("text", "hi"), ("image", None)]) for _ in chat]
    expected, _ = processor.process_chat(harmless, [_feature()] * len(chat))
    assert [token for token in token_ids if token in special] == [token for token in expected if token in special]
    assert len(placed) == len(chat)
    # And nothing of the words is lost.
    text = "".join(
        f"<|im_start|>user\n{''.join(texts)}<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n" for texts in chat
    )
    decoded = processor.tokenizer.decode(token_ids, skip_special_tokens=False)
    assert decoded == text + "<|im_start|>assistant\n"


def test_templates_that_trim_or_inspect_a_text_still_can(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content[0].text | trim }}"
        "{% if m.content[0].text.startswith('<tool') %}!{% endif %}<|im_end|>{% endfor %}"
    )
    processor = PromptProcessor(str(tmp_path / "model"), max_model_len=4096, max_images=8)

    def text(words: str) -> str:
        token_ids, _ = processor.process_chat([("user", [("text", words)])], [])
        assert token_ids.count(processor.tokenizer.token_to_id("<|im_end|>")) == 1
        return str(processor.tokenizer.decode(token_ids, skip_special_tokens=False))

    assert text("  a b \n") == "<|im_start|>a b<|im_end|>"
    assert text(" \n<|im_end|> ") == "<|im_start|><|im_end|><|im_end|>"
    assert text(" <|im_ ") == "<|im_start|><|im_<|im_end|>"
    assert text("<tool> <|im_end|>") == "<|im_start|><tool> <|im_end|>!<|im_end|>"


@pytest.mark.parametrize(
    "words", ["<|im_end ", " im_end|>", " im_end\n", "im_end", "<|im_end|>", "x <|im_end", "im_end|> x"]
)
def test_words_and_template_make_no_special_token_together(model: Path, tmp_path: Path, words: str) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("<|{{ messages[0].content[0].text | trim }}|><|im_end|>")
    processor = PromptProcessor(str(tmp_path / "model"), max_model_len=4096, max_images=8)
    token_ids, _ = processor.process_chat([("user", [("text", words)])], [])
    assert token_ids.count(processor.tokenizer.token_to_id("<|im_end|>")) == 1
    assert processor.tokenizer.decode(token_ids, skip_special_tokens=False) == f"<|{words.strip()}|><|im_end|>"


def test_a_template_that_cuts_through_a_marked_text_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% set text = messages[0].content[0].text %}{{ text }}{{ text.split('_')[0] }}<|im_end|>"
    )
    processor = PromptProcessor(str(tmp_path / "model"), max_model_len=4096, max_images=8)
    with pytest.raises(InvalidRequestError, match="cut through"):
        processor.process_chat([("user", [("text", "abc<|im_end|>")])], [])


def test_the_placeholder_is_guarded_where_it_is_not_special(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|image_pad|>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    processor = PromptProcessor(str(folder), max_model_len=4096, max_images=8)
    message: ChatMessage = ("user", [("image", None), ("text", "<|image_pad|>")])
    assert len(processor.process_chat([message], [_feature()])[1]) == 1


def test_tokens_that_swallow_white_space_beside_them(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|sep|>", lstrip=True, rstrip=True, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content[0].text }} a <|sep|> \n b")
    processor = PromptProcessor(str(folder), max_model_len=4096, max_images=8)
    ordinary = processor.process_chat([("user", [("text", "x")])], [])[0]
    assert ordinary == tokenizer.encode("x a <|sep|> \n b").ids
    # The same through the path for marked texts: "|>" at the beginning has it marked.
    assert processor.process_chat([("user", [("text", "|>x")])], [])[0] == tokenizer.encode("|>x a <|sep|> \n b").ids


def test_a_template_for_text_alone_gets_strings(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    processor = PromptProcessor(str(tmp_path / "model"), max_model_len=4096, max_images=8)
    token_ids, _ = processor.process_chat([("user", [("text", "a"), ("text", "b")])], [])
    assert processor.tokenizer.decode(token_ids) == "ab\n"
    with pytest.raises(InvalidRequestError, match="takes only text"):
        processor.process_chat([("user", [("image", None)])], [_feature()])


def test_what_templates_of_transformers_may_use(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ strftime_now('%Y') | length }}{{ eos_token }}\n"
        "    {% for m in messages %}\n"
        "        {% if loop.index == 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}\n"
        "    {% endfor %}\n"
        "{% if add_generation_prompt and not tools %}{% set ns = namespace(x='é<') %}{{ ns.x | tojson }}{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    messages: list[ChatMessage] = [("user", [("text", "a")]), ("user", [("text", "b")])]
    processor = PromptProcessor(str(folder), max_model_len=4096, max_images=8)
    conversation = [{"role": "user", "content": text} for text in "ab"]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert processor.process_chat(messages, [])[0] == expected


def test_a_token_prompt_expands_its_placeholders(processor: PromptProcessor) -> None:
    pad = processor.image_token_id
    features = [_feature(3), _feature(2)]
    token_ids, placed = processor.process_tokens([5, pad, pad, 6], features)
    assert token_ids == [5, pad, pad, pad, pad, pad, 6]
    assert [(entry.offset, entry.end) for entry in placed] == [(1, 4), (4, 6)]


USER: ChatMessage = ("user", [("text", "hello")])
PICTURE: ChatMessage = ("user", [("image", None)])


@pytest.mark.parametrize(
    ("messages", "features", "message"),
    [
        ([], 0, "messages: none; at least 1"),
        ([USER, ("tool", [("text", "x")])], 0, "message 2: role 'tool'; known are system, user, assistant"),
        ([("user", [("video", None)])], 0, "message 1: a part that is neither text nor image"),
        ([("user", [("text", "\ud83c")])], 0, "message 1: the text holds half of a surrogate pair"),
        ([PICTURE], 0, "1 images, but 0 features"),
        ([USER], 2, "0 images, but 2 features"),
        ([PICTURE] * 9, 9, "9 images; the limit is 8"),
        ([("user", [("text", "word " * 5000)])], 0, r"the limit is 4095 \(max_model_len - 1\)"),
    ],
)
def test_wrong_chats_are_named(
    processor: PromptProcessor, messages: list[ChatMessage], features: int, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        processor.process_chat(messages, [_feature()] * features)


def test_the_template_may_refuse(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
        "{{ messages[0].content[0].a.b }}"
    )
    processor = PromptProcessor(str(tmp_path / "model"), max_model_len=4096, max_images=8)
    with pytest.raises(InvalidRequestError, match="chat template refused them: one message only"):
        processor.process_chat([USER, USER], [])
    with pytest.raises(InvalidRequestError, match="chat template refused them: "):
        processor.process_chat([USER], [])


def test_wrong_token_prompts_are_named(processor: PromptProcessor) -> None:
    pad = processor.image_token_id
    with pytest.raises(InvalidRequestError, match="token_ids: none"):
        processor.process_tokens([], [])
    with pytest.raises(InvalidRequestError, match=r"token_ids\[1\]: 1024; the vocabulary ends at 1023"):
        processor.process_tokens([0, 1024], [])
    with pytest.raises(InvalidRequestError, match="2 image placeholders, but 1 features"):
        processor.process_tokens([pad, pad], [_feature()])
    with pytest.raises(InvalidRequestError, match="num_embeds must be at least 1"):
        processor.process_tokens([pad], [_feature(0)])
    # Refused by arithmetic: a list of that length would not fit into memory.
    with pytest.raises(InvalidRequestError, match="4294967295 tokens, images included; the limit is 4095"):
        processor.process_tokens([pad], [_feature(2**32 - 1)])
    assert len(processor.process_tokens([1] * 4095, [])[0]) == 4095


def test_ends_of_an_answer(model: Path, processor: PromptProcessor, tmp_path: Path) -> None:
    end, text_end = (processor.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert processor.eos_token_ids == {end, text_end}
    folder = tmp_path / "model"
    shutil.copytree(model, folder)

    def eos() -> frozenset[int]:
        return PromptProcessor(str(folder), max_model_len=64, max_images=1).eos_token_ids

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos() == {7}
    (folder / "generation_config.json").unlink()
    assert eos() == {end}  # of the text configuration
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert eos() == {end}  # the tokenizer's


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("config.json", None, "has no config.json"),
        ("config.json", "{}", "no image_token_id"),
        ("config.json", "[]", "holds no JSON object"),
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "{% if %}", "line 1"),
        ("generation_config.json", "{", "generation_config.json cannot be read"),
    ],
)
def test_wrong_folders_are_named(model: Path, tmp_path: Path, name: str, content: str | None, message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        PromptProcessor(str(folder), max_model_len=64, max_images=1)
    assert caught.value.name == "--model"
