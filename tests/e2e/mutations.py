"""Damaged image files and damaged requests, the same ones at every run."""

from __future__ import annotations

import random
import struct

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from protos import common_pb2, router_pb2
from tests.pictures import picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_TOKENS = 2
_EDGES = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
_NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 3e38, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", " ", "user", "system", "assistant", "tool", "<|image_pad|>", "<|im_end|>", "\0", "\U000f0000", "x" * 5000)
_LIMITS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


class Mutator:
    """An endless supply. One thread."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        sizes = ((48, 64), (7, 5), (160, 32))
        self._files = [picture(500 + i, *size, format=f) for f in FORMATS for i, size in enumerate(sizes)]
        self._files += [picture(510 + i, 40, 64, format=f, orientation=6) for i, f in enumerate(FORMATS[:3])]

    def image(self) -> bytes:
        """A file with one to four things wrong with it; now and then nothing that matters."""
        data = bytearray(self._draw.choice(self._files))
        for _ in range(self._draw.randint(1, 4)):
            self._draw.choice((self._flip, self._number, self._cut, self._splice, self._repeat))(data)
        return bytes(data)

    def image_request(self) -> bytes:
        """One damaged image, sometimes beside a whole one."""
        images = [self.image(), *self._draw.sample(self._files, self._draw.randint(0, 1))]
        self._draw.shuffle(images)
        return self._request(images, "What is this?").SerializeToString()

    def field_request(self) -> bytes:
        """A request that some fields of have other values, wherever they are in it."""
        request = self._valid()
        for _ in range(self._draw.randint(1, 5)):
            self._change(self._somewhere(request))
        return _bounded(request).SerializeToString()

    def byte_request(self) -> bytes:
        """A request with wrong bytes: mostly one, for after many hardly any is a message at all."""
        data = bytearray(self._valid().SerializeToString())
        if self._draw.random() < 0.7:
            data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        else:
            self._draw.choice((self._flip, self._number, self._cut, self._splice, self._repeat))(data)
        try:
            return _bounded(router_pb2.GenerateRequest.FromString(bytes(data))).SerializeToString()
        except DecodeError:
            return bytes(data)

    # ---- bytes ----

    def _flip(self, data: bytearray) -> None:
        for _ in range(self._draw.randint(1, 8)):
            if data:
                # Headers are where it hurts.
                end = len(data) if self._draw.random() < 0.5 else min(64, len(data))
                data[self._draw.randrange(end)] ^= 1 << self._draw.randrange(8)

    def _number(self, data: bytearray) -> None:
        place = self._draw.randrange(max(1, min(len(data), 200)))
        layout = self._draw.choice(("<H", ">H", "<I", ">I"))
        value = self._draw.choice(_EDGES) & (0xFFFF if layout[1] == "H" else 0xFFFFFFFF)
        packed = struct.pack(layout, value)
        data[place : place + len(packed)] = packed

    def _cut(self, data: bytearray) -> None:
        del data[self._draw.randrange(len(data) + 1) :]

    def _splice(self, data: bytearray) -> None:
        other = self._draw.choice(self._files)
        begin = self._draw.randrange(len(other))
        place = self._draw.randrange(len(data) + 1)
        data[place : place + self._draw.choice((0, 50))] = other[begin : begin + self._draw.randint(1, 200)]

    def _repeat(self, data: bytearray) -> None:
        begin = self._draw.randrange(len(data) + 1)
        data[begin:begin] = data[begin : begin + self._draw.randint(1, 64)] * self._draw.randint(1, 20)

    # ---- fields ----

    def _valid(self) -> router_pb2.GenerateRequest:
        images = self._draw.sample(self._files, self._draw.randint(0, 2))
        if self._draw.random() < 0.3:
            ids = [self._draw.randrange(900) for _ in range(self._draw.randint(1, 30))]
            for _ in images:
                ids.insert(self._draw.randrange(len(ids)), 992)
            tokens = common_pb2.TokenPrompt(
                token_ids=ids, images=[common_pb2.ImagePart(data=image) for image in images]
            )
            return router_pb2.GenerateRequest(tokens=tokens, sampling=self._sampling())
        return self._request(images, "Well, what is it?")

    def _request(self, images: list[bytes], text: str) -> router_pb2.GenerateRequest:
        content = [common_pb2.ContentPart(image=common_pb2.ImagePart(data=image)) for image in images]
        content.append(common_pb2.ContentPart(text=common_pb2.TextPart(text=text)))
        message = common_pb2.ChatMessage(role="user", content=content)
        return router_pb2.GenerateRequest(chat=common_pb2.ChatPrompt(messages=[message]), sampling=self._sampling())

    def _sampling(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(max_tokens=self._draw.randint(1, MAX_TOKENS), temperature=0)

    def _somewhere(self, message: Message) -> Message:
        inside = [message]
        for _, value in message.ListFields():
            if isinstance(value, Message):
                inside.append(self._somewhere(value))
            elif len(value) and isinstance(value[0], Message) if hasattr(value, "__len__") else False:
                inside.append(self._somewhere(self._draw.choice(value)))
        return self._draw.choice(inside)

    def _change(self, message: Message) -> None:
        field = self._draw.choice(message.DESCRIPTOR.fields)
        if self._draw.random() < 0.1:
            message.ClearField(field.name)
        elif field.message_type is not None and field.is_repeated:
            entries = getattr(message, field.name)
            entries.add()
            if len(entries) > 1 and self._draw.random() < 0.5:
                entries[-1].CopyFrom(entries[0])
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend(self._value(field) for _ in range(self._draw.randint(1, 70)))
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> object:
        if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return self._draw.choice(_NUMBERS)
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._draw.choice(_TEXTS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.image()
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._draw.random() < 0.5
        low, high = _LIMITS[field.type]
        return min(high, max(low, self._draw.choice((*_EDGES, -1, low, high, 992, 1023, 1024))))


def _bounded(request: router_pb2.GenerateRequest) -> router_pb2.GenerateRequest:
    """Where it would be answered, with few tokens: long answers prove nothing here and take long."""
    sampling = request.sampling
    if not sampling.HasField("max_tokens") or sampling.max_tokens > MAX_TOKENS:
        sampling.max_tokens = MAX_TOKENS
    return request
