"""The checkpoint that is shipped: its files, its words, and that it sees, under transformers and in the engine."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoTokenizer

from core.types import SamplingParams
from demo.answers import MAX_TOKENS, TransformersAnswers
from demo.evaluate import MODEL, main, score
from demo.questions import KINDS, Question, held_out
from demo.training.checkpoint import SIZES, write_files
from engine.llm import LLM
from engine.prompts import PromptProcessor
from tests.engine.engines import engine_config

QUESTIONS = held_out(seed=77, count=3 * len(KINDS))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def transformers() -> TransformersAnswers:
    return TransformersAnswers(MODEL, "float32")


def test_files_are_what_the_training_writes(tmp_path: Path) -> None:
    write_files(tmp_path, SIZES)
    for file in tmp_path.iterdir():
        assert (MODEL / file.name).read_bytes() == file.read_bytes(), file.name
    assert {"model.safetensors", "README.md", "loss.png", "accuracy.png"} <= {file.name for file in MODEL.iterdir()}


def test_weights_are_small_whole_and_in_bfloat16() -> None:
    path = MODEL / "model.safetensors"
    assert path.stat().st_size <= 8_000_000
    with safe_open(path, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 - no mapping
    model, report = AutoModelForImageTextToText.from_pretrained(MODEL, output_loading_info=True)
    assert not any(report.values())
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert len(model.config.vision_config.deepstack_visual_indexes) == 3
    assert model.config.tie_word_embeddings
    assert not model.generation_config.do_sample


def test_every_word_of_questions_and_answers_is_one_token(tokenizer: Any) -> None:
    words: set[str] = set()
    for question in held_out(3, 800):
        for text in (question.prompt, question.answer):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
            words |= set(re.findall(r" \w+", text))
    assert len(words) > 50
    for word in words:
        assert len(tokenizer(word)["input_ids"]) == 1, word


def test_any_text_survives(tokenizer: Any) -> None:
    rng = random.Random(0)
    texts = ["Ünïcode 你好 🎉\n\ttabs  and   spaces", "", " ", "<|im_end|> is a special token", "x" * 300]
    texts += ["".join(chr(rng.randrange(32, 0x2FF)) for _ in range(50)) for _ in range(20)]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == tokenizer.backend_tokenizer.normalizer.normalize_str(
            text
        )
    assert len(tokenizer) <= json.loads((MODEL / "config.json").read_bytes())["text_config"]["vocab_size"]


def test_the_template_numbers_pictures_through_all_turns(tokenizer: Any) -> None:
    conversation = [
        ("system", [("text", "Be brief.")]),
        ("user", [("image", None), ("image", None), ("text", "Do two pictures show the same?")]),
        ("assistant", [("text", "a red ring, a blue ring: no")]),
        ("user", [("image", None), ("text", "Describe the third picture.")]),
    ]
    picture = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        + picture.format(1)
        + picture.format(2)
        + "Do two pictures show the same?<|im_end|>\n<|im_start|>assistant\na red ring, a blue ring: no<|im_end|>\n"
        + "<|im_start|>user\n"
        + picture.format(3)
        + "Describe the third picture.<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [
        {"role": role, "content": [{"type": kind, **({"text": text} if text else {})} for kind, text in parts]}
        for role, parts in conversation
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    prompts = PromptProcessor(str(MODEL), max_model_len=4096, max_images=4)
    rendered = prompts._template.render(messages)
    assert rendered == expected
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in prompts.eos_token_ids


def test_it_answers(transformers: TransformersAnswers) -> None:
    answers = [transformers.answer(question) for question in QUESTIONS]
    scores = score(QUESTIONS, answers)
    assert scores["one picture"].right >= scores["one picture"].asked - 1, answers
    assert scores["several pictures"].right >= scores["several pictures"].asked - 1, answers


def test_the_engine_gives_the_tokens_of_transformers(transformers: TransformersAnswers, tmp_path: Path) -> None:
    llm = LLM(engine_config(MODEL, tmp_path, max_model_len=1024, max_num_batched_tokens=256))
    try:
        conversations = [[("user", [*[("image", None)] * len(q.scenes), ("text", q.prompt)])] for q in QUESTIONS]
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        outputs = llm.generate(conversations, [q.pictures for q in QUESTIONS], sampling, progress=False)
    finally:
        llm.close()
    for question, output in zip(QUESTIONS, outputs, strict=True):
        assert output.token_ids == transformers.token_ids(question.prompt, question.pictures), question.prompt


def test_it_needs_the_picture(transformers: TransformersAnswers) -> None:
    """The same questions about other pictures: right only by chance."""
    questions = [question for question in QUESTIONS if question.kind in ("what", "describe")]
    others = [
        Question(q.kind, tuple(reversed(held_out(78, len(KINDS) * 2)[-1].scenes)), q.prompt, q.answer)
        for q in questions
    ]
    answers = [transformers.answer(question) for question in others if len(question.scenes) >= 1]
    assert sum(given == question.answer for question, given in zip(others, answers, strict=True)) <= 1


def test_evaluation_prints_scores() -> None:
    result = CliRunner().invoke(main, ["--seed", "4", "--questions", "8", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "8 held-out questions of seed 4, float32" in result.output
    for name in (*KINDS, "one picture", "several pictures"):
        assert f"  {name} " in result.output


def test_a_router_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(main, ["--questions", "1", "--router", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "--router 127.0.0.1:1: UNAVAILABLE" in result.output


def test_rounding_does_not_change_answers(transformers: TransformersAnswers) -> None:
    """bfloat16 is what is served; it must not turn many answers over."""
    rounded = TransformersAnswers(MODEL, "bfloat16")
    assert next(rounded._model.parameters()).dtype == torch.bfloat16
    equal = sum(rounded.answer(q) == transformers.answer(q) for q in QUESTIONS)
    assert equal >= len(QUESTIONS) - 1
