"""Text that comes in pieces is the text of the whole, for any tokens and any division."""

from __future__ import annotations

import functools
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from demo.checkpoint_families import FAMILIES, PRESETS, train_qwen_tokenizer
from engine.detokenizer import IncrementalDetokenizer

EMOJI = "🦜🏴‍☠️ żółw 龍"  # none of it is in the tokenizer's corpus


@functools.cache
def _byte_level() -> Tokenizer:
    tokenizer = train_qwen_tokenizer(1000)
    tokenizer.add_tokens(["two words", "dünn"])  # characters that stand for no byte, and one that stands for another
    return tokenizer


@functools.cache
def _sentence_piece() -> Tokenizer:
    """Laid out as Llama's: spaces as U+2581, unknown characters as byte tokens."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁the", "x"]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


@functools.cache
def _of_family(family: str) -> Tokenizer:
    return FAMILIES[family].train_tokenizer(PRESETS["tiny"].tokenizer_size)


def _pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [*(detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)), detokenizer.finish()]


# Mostly fragments of characters: the first 256 ids are the single bytes. Ids past 1002 have no token.
_IDS = st.lists(st.one_of(st.integers(0, 255), st.integers(0, 1020)), max_size=40)


@settings(max_examples=400, deadline=None)
@given(_IDS, st.lists(st.integers(0, 100), max_size=6), st.booleans())
def test_pieces_join_to_the_decoded_whole(ids: list[int], cuts: list[int], skip: bool) -> None:
    assert "".join(_pieces(_byte_level(), ids, cuts, skip)) == _byte_level().decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(_IDS, st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_another_worker_continues_where_the_first_stopped(ids: list[int], first: int, second: int, skip: bool) -> None:
    tokenizer = _byte_level()
    a, b = sorted((first % (len(ids) + 1), second % (len(ids) + 1)))
    text = ""
    for start, end in ((0, a), (a, b), (b, len(ids))):
        worker = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prior_token_ids=ids[:start])
        text += worker.push(ids[start:end])
    assert text + worker.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@functools.cache
def _fragments(family: str) -> list[list[int]]:
    """Of that family's own vocabulary: words, spaces, special tokens, characters spelled in bytes, parts of them."""
    tokenizer = _of_family(family)
    texts = ["a", " ", "  b", "harbour", "ä", "\ufffd", "👩", "龍", "\u0416", "\n", " 🦜 x"]
    wholes = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    spelled = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x20, 0x41, 0x80, 0xC3, 0xE2, 0xED, 0xF0, 0xFF))
    alone = ["▁", "▁a", "<s>", "<unk>", "<image>", "<|im_end|>", "<think>"]
    singles = [*spelled, *(tokenizer.token_to_id(token) for token in alone), tokenizer.get_vocab_size() + 7]
    return [
        *wholes,
        *(ids[:-1] for ids in wholes if len(ids) > 1),
        *(ids[1:] for ids in wholes if len(ids) > 1),
        *([number] for number in singles if number is not None),
    ]


def _longest_run(tokenizer: Tokenizer, ids: list[int]) -> int:
    tokens = [tokenizer.id_to_token(number) or "" for number in ids]
    runs = itertools.groupby(tokens, lambda token: token.startswith("<0x"))
    return max((len(list(run)) for is_bytes, run in runs if is_bytes), default=0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_pieces_join_to_the_whole_for_every_family(family: str, data: st.DataObject) -> None:
    tokenizer = _of_family(family)
    parts = data.draw(st.lists(st.sampled_from(_fragments(family)), max_size=12))
    ids = [number for part in parts for number in part]
    assert _longest_run(tokenizer, ids) <= 64
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    assert "".join(_pieces(tokenizer, ids, cuts, skip)) == whole
    edges = [0, *sorted(cuts), len(ids)]
    text = ""
    for start, end in itertools.pairwise(edges):  # each stretch by a worker of its own
        worker = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prior_token_ids=ids[:start])
        text += worker.push(ids[start:end])
    assert text + worker.finish() == whole


def _spelled(text: bytes) -> list[int]:
    ids = [_of_family("llava").token_to_id(f"<0x{byte:02X}>") for byte in text]
    assert None not in ids
    return ids


@settings(max_examples=250, deadline=None)
@given(st.text(alphabet="a龍🎉 ", max_size=60), st.binary(max_size=3))
def test_a_long_run_of_bytes_shows_what_is_whole(text: str, broken: bytes) -> None:
    """Given out before the end of the run is known, so what comes then must not change it."""
    tokenizer = _of_family("llava")
    run = text.encode() + broken
    ids = [*_spelled(run), tokenizer.token_to_id("▁the")]
    joined = "".join(_pieces(tokenizer, ids, list(range(len(ids))), True))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    try:
        run.decode()
    except UnicodeDecodeError as error:
        # The exception: whole characters at first, then one U+FFFD for each byte.
        shown = run[: error.start].decode().removeprefix(" ")
        expected = shown + "\ufffd" * (len(run) - error.start) + " the"
    else:
        expected = whole
    if len(run) <= 64:
        assert joined == whole
    elif len(run) - len(broken) > 64:
        assert joined == expected
    else:
        assert joined in (whole, expected)


def test_a_script_spelled_in_bytes_streams_within_a_bound() -> None:
    tokenizer = _of_family("llava")
    text = "龍" * 100
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    given_out, most_held = 0, 0
    for number, token_id in enumerate(_spelled(text.encode()), start=1):
        given_out += len(detokenizer.push([token_id]).encode())
        most_held = max(most_held, number - given_out)
    assert most_held == 64
    assert given_out == 300


def test_a_wrong_run_of_bytes_is_replaced_as_a_whole_and_at_once() -> None:
    """As the tokenizer does it: what was whole in the run goes too."""
    detokenizer = IncrementalDetokenizer(_of_family("llava"), skip_special_tokens=True)
    assert [detokenizer.push([token_id]) for token_id in _spelled(b"ok\xffab")] == [
        "",
        "",
        "\ufffd" * 3,
        "\ufffd",
        "\ufffd",
    ]
    assert detokenizer.push([_of_family("llava").token_to_id("▁a")]) == " a"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("make", [_byte_level, _sentence_piece])
def test_no_piece_holds_part_of_a_character(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    text = EMOJI if tokenizer is _byte_level() else "a 👩 b 你"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text)
    pieces = _pieces(tokenizer, ids, list(range(len(ids))), True)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    ids = _byte_level().encode("🎉", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(_byte_level(), skip_special_tokens=True)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_broken_bytes_do_not_hold_back_what_follows() -> None:
    tokenizer = _byte_level()
    lead = tokenizer.encode("🎉", add_special_tokens=False).ids[0]
    word = tokenizer.encode("harbour", add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    assert detokenizer.push([lead, lead]).count("\ufffd") == 1
    assert detokenizer.push(word) == "\ufffdharbour"


def test_special_tokens_show_on_request_only() -> None:
    tokenizer = _byte_level()
    ids = tokenizer.encode("a<|im_end|>b<tool_call>").ids
    assert "".join(_pieces(tokenizer, ids, [], True)) == "ab<tool_call>"
    assert "".join(_pieces(tokenizer, ids, [], False)) == "a<|im_end|>b<tool_call>"


def test_spaces_between_words_survive_a_window() -> None:
    tokenizer = _sentence_piece()
    ids = [tokenizer.token_to_id(token) for token in ("▁the", "<s>", "▁a", "▁", "▁the", "x")]
    for cut in range(len(ids)):
        text = IncrementalDetokenizer(tokenizer, skip_special_tokens=True).push(ids[:cut])
        rest = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, prior_token_ids=ids[:cut])
        assert text + rest.push(ids[cut:]) + rest.finish() == "the a  thex"


def test_a_push_does_not_grow_with_the_output() -> None:
    tokenizer = _byte_level()
    ids = tokenizer.encode(EMOJI * 40, add_special_tokens=False).ids

    def cost_s(prior: list[int]) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, prior_token_ids=prior)
        best = float("inf")
        for _ in range(5):
            start = time.thread_time()
            detokenizer.push(ids)
            best = min(best, time.thread_time() - start)
        return best

    # Were it to grow, the second would take a hundred times as long.
    assert cost_s(ids * 100) < 20 * cost_s([])
