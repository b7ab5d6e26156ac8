"""What transformers' own `generate` answers: the measure that every path through Triptych is held against."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

#: A conversation: (role, parts); a part is text, or an image file's bytes.
Conversation = Sequence[tuple[str, Sequence[str | bytes]]]


class Reference:
    """A checkpoint of any supported family in float32 under transformers alone."""

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=dtype).eval()
        self._is_llava = self.model.config.model_type == "llava"
        processor = CLIPImageProcessorPil if self._is_llava else Qwen2VLImageProcessorPil
        self._processor: Any = processor.from_pretrained(model_dir)

    def inputs(self, conversation: Conversation) -> dict[str, torch.Tensor]:
        """What a processor makes of the conversation: placeholders expanded, pixel values, grids."""
        messages = [
            {
                "role": role,
                "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts],
            }
            for role, parts in conversation
        ]
        files = [part for _, parts in conversation for part in parts if isinstance(part, bytes)]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        image_token_id = self.model.config.image_token_id
        made: dict[str, torch.Tensor] = {}
        if files:
            images = [ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB") for file in files]
            made = dict(self._processor(images=images, return_tensors="pt"))
            counts = self._num_embeds(made)
            placeholder = self.tokenizer.convert_ids_to_tokens(image_token_id)
            pieces = text.split(placeholder)
            assert len(pieces) == len(counts) + 1
            text = pieces[0] + "".join(
                placeholder * count + piece for count, piece in zip(counts, pieces[1:], strict=True)
            )
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        made["input_ids"] = ids
        made["attention_mask"] = torch.ones_like(ids)
        if files:
            made["mm_token_type_ids"] = (ids == image_token_id).int()
        return made

    @torch.inference_mode()
    def generate(self, conversation: Conversation, max_tokens: int) -> list[int]:
        """Greedy tokens, end-of-sequence ignored."""
        inputs = self.inputs(conversation)
        if self._is_llava:
            inputs.pop("mm_token_type_ids", None)  # only Qwen's positions depend on it
        config = self.model.generation_config
        eos, config.eos_token_id = config.eos_token_id, None
        try:
            out = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=max_tokens,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=0,
            )
        finally:
            config.eos_token_id = eos
        return list(out[0, inputs["input_ids"].shape[1] :].tolist())

    def _num_embeds(self, processed: dict[str, torch.Tensor]) -> list[int]:
        """Of each image."""
        if not self._is_llava:
            counts: list[int] = (processed["image_grid_thw"].prod(-1) // self._processor.merge_size**2).tolist()
            return counts
        config = self.model.config
        num_images, _, height, width = processed["pixel_values"].shape
        patch = config.vision_config.patch_size
        class_token = config.vision_feature_select_strategy == "full"
        return [(height // patch) * (width // patch) + class_token] * num_images
