"""Tokenizers of random checkpoints: trained on a small corpus, built like those of published models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from demo.checkpoint_text import CORPUS

Vocab = dict[str, int]
Merges = list[tuple[str, str]]

#: Qwen's pre-tokenizer, as its published tokenizer.json has it.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Qwen's added tokens in the order of their ids; those of the second tuple are not special.
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

#: Llama's, with the first three ids, and what LLaVA appends to its vocabulary.
LLAMA_SPECIAL = ("<unk>", "<s>", "</s>")
LLAVA_ADDED = ("<image>", "<pad>")
#: Letters that get a token of their own; rarer ones are spelled in bytes.
_LLAMA_LETTERS = 90


def train_byte_level(split: str, corpus: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, of what the regular expression `split` leaves together."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def add_qwen_tokens(tokenizer: Tokenizer) -> None:
    """Qwen's special and added tokens, with the last ids."""
    for texts, special in ((QWEN_SPECIAL, True), (QWEN_ADDED, False)):
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])


def train_qwen_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE of exactly `size` tokens, Qwen's added tokens last. The same for the same size, always."""
    base_size = size - len(QWEN_SPECIAL) - len(QWEN_ADDED)
    tokenizer = train_byte_level(_QWEN_SPLIT, [CORPUS], base_size)
    if tokenizer.get_vocab_size() < base_size:
        vocab, merges = _parts(tokenizer)
        tokenizer.model = models.BPE(*_widened(vocab, merges, "Ġ", base_size))
    add_qwen_tokens(tokenizer)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} tokens, not {size}")
    return tokenizer


def train_llava_tokenizer(size: int) -> Tokenizer:
    """A BPE of exactly `size` tokens in the manner of Llama's: spaces are letters, rare letters are spelled in bytes, a
    text begins with `<s>`. LLaVA's tokens are the last. The same for the same size, always."""
    bytes_spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    base_size = size - len(LLAVA_ADDED)
    counts = Counter("".join(CORPUS.split()))
    letters = ["▁", *sorted(counts, key=lambda letter: (-counts[letter], letter))[:_LLAMA_LETTERS]]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()  # so that no token reaches over a space
    trainer = trainers.BpeTrainer(
        vocab_size=base_size,
        min_frequency=1,
        show_progress=False,
        special_tokens=[*LLAMA_SPECIAL, *bytes_spelled],
        # The trainer alone would choose among letters of equal frequency by chance.
        initial_alphabet=letters,
        limit_alphabet=len(letters),
    )
    trained.train_from_iterator(CORPUS.splitlines(), trainer)
    vocab, merges = _parts(trained)
    if len(vocab) < base_size:
        vocab, merges = _widened(vocab, merges, "▁", base_size)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in (*LLAMA_SPECIAL, *LLAVA_ADDED)])
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} tokens, not {size}")
    return tokenizer


def _parts(tokenizer: Tokenizer) -> tuple[Vocab, Merges]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _widened(vocab: Vocab, merges: Merges, space: str, size: int) -> tuple[Vocab, Merges]:
    """A trained model with merges of two trained tokens appended, for vocabularies larger than the corpus can fill.

    The new merges rank last, so what the corpus taught comes first. `space` stands for a space in the vocabulary.
    """
    words = [text for text in vocab if len(text) > 1 and text.removeprefix(space).isascii() and text[1:].isalpha()]
    for left in words:
        for right in words:
            if len(vocab) == size:
                return vocab, merges
            if right.isalpha() and right.isascii() and left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    raise ValueError(f"the corpus gives no more than {len(vocab)} tokens, {size} are wanted")
