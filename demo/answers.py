"""Who answers the demo's questions: transformers alone, or a running Triptych."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from PIL import Image

from cli.client import image_request
from core.server import CHANNEL_OPTIONS
from demo.questions import Question
from protos import common_pb2, router_pb2_grpc

#: The longest right answer has some 30 tokens.
MAX_TOKENS = 64


class TransformersAnswers:
    """A checkpoint under transformers' own `generate`, greedy, one question at a time.

    Args:
        model: the checkpoint's folder.
        dtype: a name of torch's, such as "bfloat16".
    """

    def __init__(self, model: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(model)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def answer(self, question: Question) -> str:
        """The answer's text."""
        return str(self._tokenizer.decode(self.token_ids(question.prompt, question.pictures), skip_special_tokens=True))

    def token_ids(self, prompt: str, pictures: Sequence[bytes]) -> list[int]:
        """The answer's tokens, with the one that ends it."""
        import torch

        content = [{"type": "image"}] * len(pictures) + [{"type": "text", "text": prompt}]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
        inputs = dict(self._processor(images=images, return_tensors="pt"))
        counts = (inputs["image_grid_thw"].prod(-1) // self._processor.merge_size**2).tolist()
        image_token = self._tokenizer.convert_ids_to_tokens(self._model.config.image_token_id)
        first, *rest = text.split(image_token)
        text = first + "".join(image_token * count + piece for count, piece in zip(counts, rest, strict=True))
        ids = self._tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            made = self._model.generate(
                **inputs,
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == self._model.config.image_token_id).int(),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
            )
        tokens: list[int] = made[0, ids.shape[1] :].tolist()
        return tokens


class TriptychAnswers:
    """A running Triptych behind its router's gRPC door. Close it after use.

    Args:
        router: HOST:PORT.
        timeout_s: for one answer.
    """

    def __init__(self, router: str, timeout_s: float = 60.0) -> None:
        self._channel = grpc.insecure_channel(router, options=CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)
        self._timeout_s = timeout_s

    def answer(self, question: Question) -> str:
        """The answer's text.

        Raises:
            grpc.RpcError: there was none.
        """
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        request = image_request(question.prompt, question.pictures, sampling)
        return "".join(response.text for response in self._stub.Generate(request, timeout=self._timeout_s))

    def close(self) -> None:
        self._channel.close()
