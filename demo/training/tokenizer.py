"""The demo model's tokenizer and chat template: small, byte-level, with Qwen's special tokens.

Every word of the questions and answers, with the space before it, is one token; anything else is spelled in bytes.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from demo.checkpoint_text import KNOWN_ROLES, qwen_chat_template
from demo.checkpoint_tokenizers import add_qwen_tokens, train_byte_level
from demo.pictures import COLOURS, SHAPES
from demo.questions import NUMBERS, ORDINALS

_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

#: Each frame of a sentence with each word that may stand in it. Plain English besides, for the words around.
_SENTENCES = (
    "system user assistant Picture 1: 2: 3: 4:",
    "What is in the picture? What colour is the thing? What shape is the thing? How many things are in the picture?",
    "Is the thing in the left or right half? Is the thing in the upper or lower half? left right upper lower above "
    "below",
    "Is the thing left or right of the other? Is the thing above or below the other? above below left right",
    "Which picture shows a thing? Do two pictures show the same? Describe the first picture. a thing and an thing: "
    "yes, no",
    "a thing, an thing, a thing: yes, the first and the second. a thing: no",
)

#: A picture is introduced by its number, counted through the whole conversation.
CHAT_TEMPLATE = qwen_chat_template(
    KNOWN_ROLES,
    before="{%- set pictures = namespace(shown=0) %}\n",
    image="""\
                {%- set pictures.shown = pictures.shown + 1 %}
                {{- 'Picture ' ~ pictures.shown ~ ': <|vision_start|><|image_pad|><|vision_end|>' }}
""",
)


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE; the same, always. Qwen's special and added tokens have the last ids."""
    words = [*COLOURS, *SHAPES, *NUMBERS, *ORDINALS]
    words += [shape + ("es" if shape == "cross" else "s") for shape in SHAPES]
    # A word alone begins an answer; with a space before it, it goes on.
    corpus = [*_SENTENCES, *words, *(f" {word}" for word in words), "a", "an"]
    tokenizer = train_byte_level(_SPLIT, corpus, 4096)  # more than the corpus can fill: every word becomes one token
    add_qwen_tokens(tokenizer)
    return tokenizer
