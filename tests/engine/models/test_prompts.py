"""Prompts of families whose tokenizer adds a beginning and spells spaces as letters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from core.types import Feature
from engine.prompts import ChatMessage, PromptProcessor
from tests.engine.models.conftest import Families

IMAGE = "<image>"
_PICTURE = Image.new("RGB", (84, 84))
LAYOUTS = ["prepend", "metaspace"]


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request: pytest.FixtureRequest, families: Families, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA as published, and with the tokenizer laid out as newer saves of Llama's are: a space before the first word
    of a prompt alone, not after each special token too."""
    if request.param == "prepend":
        return families.model_dir("llava")
    folder = tmp_path_factory.mktemp("metaspace") / "model"
    shutil.copytree(families.model_dir("llava"), folder)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["normalizer"] = None
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def prompts(model: Path) -> PromptProcessor:
    return PromptProcessor(str(model), max_model_len=4096, max_images=8)


@pytest.fixture(scope="module")
def processor(model: Path) -> Any:
    template = (model / "chat_template.jinja").read_text()
    return LlavaProcessor(
        CLIPImageProcessorPil.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def _expected(processor: Any, messages: Sequence[ChatMessage]) -> list[int]:
    conversation = [
        {
            "role": role,
            "content": [
                {"type": "image", "image": _PICTURE} if text is None else {"type": "text", "text": text}
                for _, text in parts
            ],
        }
        for role, parts in messages
    ]
    made = processor.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True, return_dict=True)
    return [int(token) for token in made["input_ids"][0]]


_WORDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from([" ", "\n", "  ", "▁", "the", "<", ">", "<im", "age>", "<0x41>", "é", "🎉", "水", "\0"]),
)
_SPECIAL = (IMAGE, "<s>", "</s>", "<unk>", "<pad>")
_TEXTS = st.lists(_WORDS, max_size=5).map("".join).filter(lambda text: not any(token in text for token in _SPECIAL))
_PARTS = st.lists(st.one_of(_TEXTS.map(lambda text: ("text", text)), st.just(("image", None))), max_size=3)
_CHATS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), _PARTS), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(_CHATS)
def test_tokens_are_those_of_the_processor(
    prompts: PromptProcessor, processor: Any, messages: list[ChatMessage]
) -> None:
    count = sum(kind == "image" for _, parts in messages for kind, _ in parts)
    if count > 8:
        return
    token_ids, placed = prompts.process_chat(messages, [_feature(36)] * count)
    assert token_ids == _expected(processor, messages)
    assert token_ids[0] == 1
    assert [token_ids[entry.offset] for entry in placed] == [prompts.image_token_id] * count


def test_a_template_that_writes_the_beginning_gets_no_second(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
    )
    token_ids, _ = PromptProcessor(str(folder), max_model_len=64, max_images=1).process_chat(
        [("user", [("text", "hello")])], []
    )
    assert token_ids.count(1) == 1


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>", "$A", None])
def test_the_tokenizer_decides_what_stands_around(model: Path, tmp_path: Path, single: str | None) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if single is not None:
        backend.post_processor = TemplateProcessing(single=single, special_tokens=ids)
        backend.save(str(folder / "tokenizer.json"))
    prompts = PromptProcessor(str(folder), max_model_len=64, max_images=1)
    token_ids, _ = prompts.process_chat([("user", [("text", "hello")])], [])
    assert token_ids == AutoTokenizer.from_pretrained(folder)("USER: hello ASSISTANT:")["input_ids"]


@pytest.mark.parametrize(
    "words", ["<image>", "a <image> b", "</s>", "x</s>y", "<s>", "<ima", "ge>", "<image", " <pad> <unk>"]
)
def test_words_never_become_special_tokens(prompts: PromptProcessor, words: str) -> None:
    token_ids, placed = prompts.process_chat([("user", [("image", None), ("text", words)])], [_feature()])
    special = {prompts.tokenizer.token_to_id(token) for token in _SPECIAL}
    assert [token for token in token_ids if token in special] == [1, prompts.image_token_id]
    assert len(placed) == 1
    harmless, _ = prompts.process_chat([("user", [("image", None), ("text", "hello")])], [_feature()])
    end = placed[0].end + 1
    assert token_ids[:end] == harmless[:end], "what the template wrote is spelled in the same tokens"
    before = prompts.tokenizer.decode(token_ids[: placed[0].offset], skip_special_tokens=True)
    after = prompts.tokenizer.decode(token_ids[placed[0].end :], skip_special_tokens=True)
    assert before == "USER: "
    assert after.removeprefix(" ") == f"\n{words} ASSISTANT:"


def _feature(num_embeds: int = 1) -> Feature:
    return Feature(key="0" * 64, num_embeds=num_embeds, grid=(1, 6, 6), width=64)
