"""The requests whose answers must equal transformers' own, by what each of them is there to catch."""

from __future__ import annotations

from tests.pictures import picture
from tests.reference import Conversation

_SAME = picture(21, 96, 64)

CONVERSATIONS: dict[str, Conversation] = {
    "no image": [("user", ["Tell me about the sea."])],
    "system and turns": [
        ("system", ["You are brief."]),
        ("user", [picture(7, 64, 64), "What is this?"]),
        ("assistant", ["A picture."]),
        ("user", ["And what is in it?"]),
    ],
    "one image": [("user", [picture(1, 96, 96), "What is this?"])],
    "three images in a row": [("user", [picture(2, 64, 96), picture(3, 128, 64), picture(4, 64, 64), "Compare them."])],
    "images around text": [("user", [picture(5, 96, 64), "and then", picture(6, 64, 160), "what changed?"])],
    "the same image twice": [("user", [_SAME, "Again:", _SAME, "Is it the same?"])],
    "not square": [("user", [picture(8, 320, 40), "Wide."])],
    "tiny": [("user", [picture(9, 7, 5), picture(10, 1, 1), "Tiny."])],
    "exif rotation": [("user", [picture(11, 128, 64, format="JPEG", orientation=6), "Which way is up?"])],
    "other formats": [("user", [picture(12, 64, 64, format="WEBP"), picture(13, 64, 96, format="BMP"), "Same?"])],
    "unicode": [("user", [picture(14, 64, 64), "Was ist das? \u00dcber \U0001f408 und \u6c34 …\n\n  "])],
}

#: Longer than the token budget that the e2e services are given, with an image across the border of two chunks.
LONG: Conversation = [("user", ["word " * 40, picture(15, 224, 224), "more " * 60, picture(16, 160, 224), "Well?"])]
