"""The texts of random checkpoints: what their tokenizers are trained on, and their chat templates."""

# ruff: noqa: RUF001 - letters of other scripts are what the tokenizer shall see
from __future__ import annotations

#: Enough different words, numbers, punctuation and scripts for some 1,000 byte-level BPE tokens.
CORPUS = """\
The harbour wakes before the town does. Grey light comes over the water, and the first boats return with their nets
piled high, while gulls wheel and shout above the quay. A woman in a yellow coat counts baskets of silver fish; a boy
with a red bicycle waits beside her and asks, for the third time this morning, whether the big crab can be his.

What do you see in this picture? There is a small white house with a green door, two windows on the left side, and a
narrow path that leads between apple trees towards the road. In the foreground a dog is sleeping on the grass. Behind
the hill the sky turns orange and purple, so the photograph was probably taken in the evening, about half past seven.

Describe the image in detail. How many people are standing near the table? Which of them is holding a cup? The chart
shows the temperature of every month between January and December: it rises from 2.5 degrees to 24.8 and falls again.
Please compare both pictures, name three differences, and answer with one short sentence. Yes, the second one is
larger; no, the colours are not the same. I cannot read the sign, because it is too far away and partly hidden.

A painter mixes blue with yellow and gets green; red with white becomes pink. Squares, circles, triangles and stripes
cover the wall of the old factory. Someone has written "WELCOME HOME" over the entrance in letters as tall as a man,
and under it, much smaller, an arrow points to the stairs: floors 1, 2, 3, and the roof garden (open until 18:00).

    def area(width, height):
        # both sides in pixels
        return width * height

    {"label": "cat", "score": 0.97, "box": [12, 40, 256, 318], "tags": ["animal", "indoor"], "ok": true}

Mountains, rivers, forests, bridges, trains, stations, airports, kitchens, libraries, markets and museums: everything
that can be seen can be asked about. Where does the street end? Who is looking out of the window? Why is the glass on
the floor broken? When the answer isn't known, it's better to say so than to guess; they've learned, we'll remember,
you'd agree, I'm sure. Nothing is certain here except that numbers such as 100, 2024 and 65536 are split into digits.

Über den Dächern liegt Schnee, und niemand weiß, wie lange noch. Où est la bibliothèque, s'il vous plaît ? El
niño come una manzana roja en el jardín. Привет, мир! Что изображено на картинке?
你好，世界。这张图片里有什么？ こんにちは、世界。写真には 猫がいます。 안녕하세요 세계. مرحبا بالعالم. नमस्ते
दुनिया. Γειά σου κόσμε. 😀 🎉 🌍 🐈 👩‍👩‍👧 → ← ≤ ≥ × ÷ ° € £ … — “quoted” ‘words’

Every frame of the film was drawn by hand. The camera moves slowly along the shelf: a clock without hands, a map of an
island, seven books in leather, a glass jar filled with buttons, a letter that was never sent. Then the light changes,
somebody opens the curtain, dust dances in the sun, and for one moment the whole room seems to be under water. The
children laugh. Their grandmother closes the door quietly and goes back to her work, humming a song about the sea.
"""

_QWEN_TURNS = """\
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
"""
_QWEN_TURNS_END = """\
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_QWEN_IMAGE = """\
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
"""
#: What a message begins with where only three roles are known.
KNOWN_ROLES = """\
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('a message has the role ' ~ message.role ~ '; known are system, user and assistant') }}
    {%- endif %}
"""
_DEFAULT_SYSTEM = """\
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
"""


def qwen_chat_template(message: str, image: str = _QWEN_IMAGE, before: str = "") -> str:
    """In the manner of Qwen's: a content is a string or a list of parts. `before` the loop over the messages, at the
    begin of each `message`, and what an `image` part becomes."""
    return before + "{%- for message in messages %}\n" + message + _QWEN_TURNS + image + _QWEN_TURNS_END


#: In the manner of Qwen3-VL's: an image becomes its three tokens.
QWEN_CHAT_TEMPLATE = qwen_chat_template(KNOWN_ROLES)
#: In the manner of Qwen2-VL's and Qwen2.5-VL's: a chat without a system message gets one.
QWEN2_CHAT_TEMPLATE = qwen_chat_template(_DEFAULT_SYSTEM)

#: In the manner of LLaVA 1.5's: a message's images stand before all of its texts, and a system message has no name.
LLAVA_CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role != 'system' %}
        {{- message.role | upper ~ ': ' }}
    {%- endif %}
    {%- for part in message.content | selectattr('type', 'equalto', 'image') %}
        {{- '<image>\\n' }}
    {%- endfor %}
    {%- for part in message.content | selectattr('type', 'equalto', 'text') %}
        {%- if message.role == 'assistant' %}
            {%- generation %}{{- part.text ~ ' ' }}{%- endgeneration %}
        {%- else %}
            {{- part.text ~ ' ' }}
        {%- endif %}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'ASSISTANT:' }}
{%- endif %}
"""
