"""What is checked before anything is done for a request, and the form that the pipeline works on.

Nothing that is refused here reaches a stage. That each image is one, by its header, is checked here although the
encoder checks it again: the router is the first to hold all images of a request, and one that is no image among eight
must not cost seven runs of the vision tower. It takes some 0.1 ms an image and Pillow, which is no torch; the same
function of `core.images` runs in both places, so they never disagree. The checks that need the model itself
(placeholders, lengths of chats, the pixels) belong to the stages, whose refusals pass through.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid

from core.convert import priority_from_proto, reject_unknown_fields, sampling_from_proto
from core.errors import DeadlineExceededError, InvalidRequestError
from core.images import read_header
from core.keys import content_hash
from protos import common_pb2, router_pb2
from router.settings import MAX_IMAGE_BYTES

_ROLES = ("system", "user", "assistant")
_MAX_REQUEST_ID = 128
_MAX_SHOWN = 100  # characters of a client's text that an error repeats
# Below this, handing the bytes to a thread takes longer than looking at them, whatever they are: a header's texts may
# be compressed a thousandfold.
_INLINE_BYTES = 8 * 1024
# Up to this, the same of the two most usual formats, where nothing in front of the pixels is compressed.
_QUICK_BYTES = 256 * 1024
_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_COMPRESSED = (b"zTXt", b"iTXt", b"iCCP")
_MAX_CHUNKS = 16
#: Messages of a chat, and parts of a message. What else bounds them is the size of a request.
_MAX_MESSAGES = 4096
_MAX_PARTS = 4096


# What a stage's deadline is before the request's own: this long, of a short one this share.
_ANSWER_S = 0.05
_ANSWER_SHARE = 0.05


class Deadline:
    """A moment on the event loop's clock by which the answer must be complete."""

    __slots__ = ("at",)

    def __init__(self, seconds: float) -> None:
        self.at = asyncio.get_running_loop().time() + seconds

    def remaining(self) -> float:
        """Seconds left, above 0. Raises DeadlineExceededError where there are none."""
        left = self.at - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceededError("the deadline passed")
        return left

    def for_stage(self) -> float:
        """Seconds that a stage's call gets: somewhat less than are left, so that a stage which runs out of time can
        still say so. Raises as above."""
        left = self.remaining()
        return left - min(_ANSWER_S, left * _ANSWER_SHARE)


class Image:
    """One image part and what the router knows of it. The bytes stay in the client's message until the stream ends."""

    __slots__ = ("_part", "content_hash", "height", "number", "size_bytes", "width")

    def __init__(
        self, part: common_pb2.ImagePart, number: int, digest: bytes, size_bytes: int, width: int, height: int
    ) -> None:
        self._part = part
        self.number = number  # in the prompt, from 1
        self.content_hash = digest
        self.size_bytes = size_bytes
        self.width = width  # in pixels, as it will be shown: the EXIF orientation is applied
        self.height = height

    def read(self) -> bytes:
        """The file's bytes: a copy that protobuf makes at each access, so not to be kept."""
        data: bytes = self._part.data
        return data


class Job:
    """An accepted request."""

    __slots__ = (
        "_num_calls", "chat", "deadline", "images", "priority", "request_id", "sampling", "shown_id", "tenant",
        "tokens",
    )  # fmt: skip

    def __init__(self, request_id: str, shown_id: str, deadline: Deadline) -> None:
        self.request_id = request_id  # ours, unique; what the stages see
        self.shown_id = shown_id  # the client's where it has one; in replies and logs only
        self.deadline = deadline
        self.chat: common_pb2.ChatPrompt | None = None  # without image bytes, as prefill gets it
        self.tokens: common_pb2.TokenPrompt | None = None
        self.images: list[Image] = []  # in prompt order
        self.sampling = common_pb2.SamplingParams()
        self.tenant = ""
        self.priority = 0
        self._num_calls = 0

    def call_id(self) -> str:
        """A name for one call of the request, unlike those of its other calls."""
        self._num_calls += 1
        return self.request_id if self._num_calls == 1 else f"{self.request_id}.{self._num_calls}"


async def admit(
    request: router_pb2.GenerateRequest, *, deadline: Deadline, served_model: str, max_images: int, max_model_len: int
) -> Job:
    """Check everything and hash the images. Raises InvalidRequestError that names the part and the limit."""
    _check_counts(request)
    reject_unknown_fields(request)
    if len(request.request_id) > _MAX_REQUEST_ID:
        raise InvalidRequestError(f"request_id has {len(request.request_id)} characters, more than {_MAX_REQUEST_ID}")
    if request.model and request.model != served_model:
        raise InvalidRequestError(f"model={_shown(request.model)} is not served here, only {served_model!r}")
    priority = priority_from_proto(request.priority)
    internal_id = uuid.uuid4().hex
    job = Job(internal_id, request.request_id or internal_id, deadline)
    job.priority = priority
    sampling = sampling_from_proto(request.sampling)
    job.sampling.CopyFrom(request.sampling)
    if not sampling.greedy and sampling.seed is None:
        # Chosen here, so that whichever worker continues the request draws the same numbers.
        job.sampling.seed = secrets.randbits(63)
    match request.WhichOneof("prompt"):
        case "chat":
            job.chat, parts = _strip_chat(request.chat)
        case "tokens":
            job.tokens, parts = _strip_tokens(request.tokens, max_model_len)
        case _:
            raise InvalidRequestError("prompt: neither chat nor tokens is given")
    if len(parts) > max_images:
        raise InvalidRequestError(f"prompt: {len(parts)} images, the limit is {max_images}")
    for number, part in enumerate(parts, 1):
        job.images.append(await _open(part, number))
    return job


def _check_counts(request: router_pb2.GenerateRequest) -> None:
    """Before anything looks at each of them."""
    messages = request.chat.messages
    if len(messages) > _MAX_MESSAGES:
        raise InvalidRequestError(f"messages: {len(messages)}, the limit is {_MAX_MESSAGES}")
    for i, message in enumerate(messages):
        if len(message.content) > _MAX_PARTS:
            raise InvalidRequestError(
                f"messages[{i}].content has {len(message.content)} parts, the limit is {_MAX_PARTS}"
            )


def _strip_chat(chat: common_pb2.ChatPrompt) -> tuple[common_pb2.ChatPrompt, list[common_pb2.ImagePart]]:
    stripped = common_pb2.ChatPrompt()
    images: list[common_pb2.ImagePart] = []
    for i, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            raise InvalidRequestError(f"messages[{i}].role={_shown(message.role)} is none of {', '.join(_ROLES)}")
        if not message.content:
            raise InvalidRequestError(f"messages[{i}].content is empty")
        copy = stripped.messages.add(role=message.role)
        for j, part in enumerate(message.content):
            match part.WhichOneof("part"):
                case "text":
                    copy.content.add().text.text = part.text.text
                case "image":
                    images.append(part.image)
                    copy.content.add().image.SetInParent()
                case _:
                    raise InvalidRequestError(f"messages[{i}].content[{j}] is empty: neither text nor image")
    if not stripped.messages:
        raise InvalidRequestError("messages: none; at least 1 is needed")
    return stripped, images


def _strip_tokens(
    tokens: common_pb2.TokenPrompt, max_model_len: int
) -> tuple[common_pb2.TokenPrompt, list[common_pb2.ImagePart]]:
    if not tokens.token_ids:
        raise InvalidRequestError("tokens.token_ids is empty")
    if len(tokens.token_ids) >= max_model_len:
        raise InvalidRequestError(
            f"tokens.token_ids has {len(tokens.token_ids)} entries; the limit is {max_model_len - 1}, max_model_len - 1"
        )
    stripped = common_pb2.TokenPrompt(token_ids=tokens.token_ids)
    for _ in tokens.images:
        stripped.images.add()
    return stripped, list(tokens.images)


async def _open(part: common_pb2.ImagePart, number: int) -> Image:
    if part.WhichOneof("source") == "url":
        raise InvalidRequestError(f"image {number}: image URLs are not allowed on this server")
    data = part.data
    if not data:
        raise InvalidRequestError(f"image {number}: it has no bytes")
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequestError(f"image {number}: {len(data)} bytes, the limit is {MAX_IMAGE_BYTES}")
    if _is_quick(data):
        digest, width, height = _look_at(data, number)
    else:
        digest, width, height = await asyncio.to_thread(_look_at, data, number)
    return Image(part, number, digest, len(data), width, height)


def _is_quick(data: bytes) -> bool:
    """Whether looking at the file takes less than handing it to a thread would."""
    if len(data) <= _INLINE_BYTES:
        return True
    if len(data) > _QUICK_BYTES:
        return False
    return data.startswith(_JPEG) or (data.startswith(_PNG) and _has_plain_head(data))


def _has_plain_head(png: bytes) -> bool:
    """Whether the first pixels of a PNG file come after a few chunks, none of which is compressed."""
    at = len(_PNG)
    for _ in range(_MAX_CHUNKS):
        kind = png[at + 4 : at + 8]
        if kind == b"IDAT":
            return True
        if kind in _COMPRESSED:
            return False
        at += 12 + int.from_bytes(png[at : at + 4], "big")
    return False


def _look_at(data: bytes, number: int) -> tuple[bytes, int, int]:
    """The content hash, width and height. Raises InvalidRequestError where the header is none of an image within our
    limits."""
    header = read_header(data, part=f"image {number}")
    return content_hash(data), header.width, header.height


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
