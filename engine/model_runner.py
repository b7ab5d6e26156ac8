"""Executes steps: the vision tower, the language model over flattened tokens, sampling, and the connectors' worker
sides."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from connectors.ec.base import ECConnectorBase
from connectors.kv.base import KVConnectorBase
from engine.decode_batches import DecodeBatches
from engine.image_preparer import ImagePreparer
from engine.input_batch import InputBatch, StepInputs
from engine.memory import CacheSizes
from engine.models.adapter import ModelAdapter
from engine.models.attention import ImageRows, StepContext
from engine.models.weights import LoadReport, load_weights, weight_files
from engine.processors import Crowding
from engine.sampler import SamplingBatch
from engine.scheduler_output import ImageToEncode, ItemUse, ModelRunnerOutput, SchedulerOutput
from kernels.device_batch import DeviceBatch, to_device
from kernels.dispatch import Kernels, LayerShapes, choose_kernels
from kernels.packed_linear import can_pack, pack_linears

logger = logging.getLogger(__name__)

_PREPARE_THREADS = 2


class ModelRunner:
    """Owns the weights, the KV cache and the encoder buffer. Every method on one thread.

    The life of one: `load_weights`, `profile`, `allocate`, `attach`, then `execute_model` per step, then `close`.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        device: torch.device,
        *,
        vision: bool,
        language: bool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        notify: Callable[[], None],
        enforce_eager: bool = False,
    ) -> None:
        self.adapter = adapter
        self.device = device
        self.vision = vision
        self.language = language
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.enforce_eager = enforce_eager
        self._batch = InputBatch(max_num_seqs if language else 0, max_model_len, block_size, adapter.num_position_rows)
        self._preparer = ImagePreparer(adapter, device, _PREPARE_THREADS, notify) if vision else None
        #: For connectors: whether loads had better rest. A step on a GPU keeps one thread busy, this one.
        self.crowding = Crowding(torch.get_num_threads() if device.type == "cpu" else 1)
        self._ec: ECConnectorBase | None = None
        self._kv: KVConnectorBase | None = None
        self._kernels: Kernels | None = None  # with a language model, once its weights are loaded
        self._decodes: DecodeBatches | None = None  # with Triton's kernels, unless eager, once the cache is there
        self.kv_cache = torch.empty(0)
        self.encoder_buffer = torch.empty(0)

    # ---- start ----

    def load_weights(self, model_dir: Path) -> LoadReport:
        """Build the role's modules and fill them, reading no other weights."""
        adapter = self.adapter
        adapter.build(vision=self.vision, language=self.language)
        targets = {}
        if self.vision:
            assert adapter.vision is not None
            targets["vision"] = adapter.vision
            adapter.load_image_processor()
        if self.language:
            assert adapter.language is not None
            assert adapter.lm_head is not None
            targets["language"] = adapter.language
            if not adapter.ties_embeddings:
                targets["lm_head"] = adapter.lm_head
        report = load_weights(weight_files(model_dir), targets, adapter.rename, dtype=adapter.dtype, device=self.device)
        if self.language and adapter.ties_embeddings:
            assert adapter.lm_head is not None
            adapter.lm_head.weight = adapter.language.embed_tokens.weight  # type: ignore[union-attr]
        for module in (adapter.vision, adapter.language, adapter.lm_head):
            if module is not None:
                module.to(self.device)
        if self.language:
            shapes = LayerShapes(adapter.hidden_size, adapter.num_heads, adapter.num_kv_heads, adapter.head_dim)
            self._kernels = choose_kernels(self.device, adapter.dtype, shapes)
            adapter.fuse(self._kernels)
        if can_pack(adapter.dtype, self.device):
            self._pack()
        return report

    def _pack(self) -> None:
        holder = torch.nn.ModuleDict()
        for name in ("vision", "language", "lm_head"):
            module = getattr(self.adapter, name)
            if module is not None:
                holder[name] = module
        pack_linears(holder)
        for name, module in holder.items():
            setattr(self.adapter, name, module)

    @torch.inference_mode()
    def profile(self) -> None:
        """Run one step of the largest size, for its peak memory, on a cache of its own."""
        if self.language:
            num_tokens = self.max_num_batched_tokens
            num_blocks = -(-num_tokens // self.block_size)
            self.kv_cache = self._new_kv_cache(num_blocks)
            inputs = StepInputs(
                request_ids=["profile"],
                rows=np.zeros(1, dtype=np.int64),
                query_lens=np.array([num_tokens]),
                seq_lens=np.array([num_tokens]),
                starts=np.zeros(1, dtype=np.int64),
                token_ids=np.zeros(num_tokens, dtype=np.int64),
                positions=np.tile(np.arange(num_tokens), (self.adapter.num_position_rows, 1)),
                block_table=np.arange(num_blocks)[None, :],
            )
            self.adapter.logits(self._forward(inputs, [])[-1:])
            self.kv_cache = torch.empty(0)
        if self.vision:
            self.adapter.profile_vision(self.max_num_batched_tokens, self.device)

    def allocate(self, sizes: CacheSizes, kv: KVConnectorBase | None = None) -> None:
        """Make the KV cache, in the connector's memory if it has some, and the encoder buffer. Nothing that is served
        is allocated after this."""
        adapter = self.adapter
        shape = self._kv_cache_shape(sizes.num_blocks)
        memory = None
        if kv is not None:
            memory = kv.allocate_kv_cache(math.prod(shape) * adapter.dtype.itemsize, self.device)
        if memory is None:
            self.kv_cache = self._new_kv_cache(sizes.num_blocks)
        else:
            self.kv_cache = memory.view(adapter.dtype).view(shape)
        self.encoder_buffer = torch.empty(
            sizes.buffer_rows, adapter.embed_width, dtype=adapter.dtype, device=self.device
        )
        if self._kernels is not None and self._kernels.name == "triton" and not self.enforce_eager:
            self._make_decode_batches()

    @torch.inference_mode()
    def _make_decode_batches(self) -> None:
        self._decodes = DecodeBatches(
            self._decode,
            self.device,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_position_rows=self.adapter.num_position_rows,
        )
        self._decodes.capture()

    def _new_kv_cache(self, num_blocks: int) -> torch.Tensor:
        # Not zeros: on a CPU, pages that no request has reached take no memory. Nobody reads an unwritten row.
        return torch.empty(self._kv_cache_shape(num_blocks), dtype=self.adapter.dtype, device=self.device)

    def _kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        adapter = self.adapter
        return (num_blocks, adapter.num_layers, 2, self.block_size, adapter.num_kv_heads, adapter.head_dim)

    def attach(self, ec: ECConnectorBase, kv: KVConnectorBase | None) -> None:
        """Give the connectors their memory."""
        self._ec = ec
        ec.register_caches(self.encoder_buffer)
        self._kv = kv
        if kv is not None:
            kv.block_mover = self._kernels
            kv.register_kv_caches(self.kv_cache.view(self.kv_cache.shape[0], -1))

    def close(self) -> None:
        if self._preparer is not None:
            self._preparer.close()
        if self._ec is not None:
            self._ec.close()
        if self._kv is not None:
            self._kv.close()

    # ---- a step ----

    @torch.inference_mode()
    def execute_model(self, out: SchedulerOutput) -> ModelRunnerOutput:
        """Do one step's work. Loads, saves, pulls and preparations are begun, not awaited."""
        assert self._ec is not None
        made = ModelRunnerOutput()
        for request_id in out.finished_request_ids:
            self._batch.remove(request_id)
        self._ec.bind_connector_metadata(out.ec_metadata)  # type: ignore[arg-type]
        self._ec.start_load_caches()
        if self._kv is not None:
            self._kv.bind_connector_metadata(out.kv_metadata)  # type: ignore[arg-type]
            self._kv.start_load_kv()
        for key, where in out.save.items():
            self._ec.save_caches(key, self.encoder_buffer[where.start : where.start + where.num_rows])
        if self._preparer is not None:
            for key in out.forget_prepared:
                self._preparer.forget(key)
            for image in out.prepare:
                self._preparer.submit(image.feature, image.image)
            if out.encode:
                made.encoded = self._encode(out.encode)
        if out.num_scheduled_tokens:
            self.crowding.is_stepping = True
            try:
                made.sampled = self._generate(out)
            finally:
                self.crowding.is_stepping = False
        if self._preparer is not None:
            made.prepared, made.failed_prepare = self._preparer.poll()
        made.ec = self._ec.get_finished()
        made.ec.counters = {name: by for name, by in self._ec.take_counters().items() if by}
        made.ec.num_leased = self._ec.num_leased()
        self._ec.clear_connector_metadata()
        if self._kv is not None:
            made.kv = self._kv.get_finished()
            self._kv.clear_connector_metadata()
        return made

    def _encode(self, images: list[ImageToEncode]) -> dict[str, str]:
        assert self._ec is not None
        assert self._preparer is not None
        pixels = [self._preparer.take(image.feature.key) for image in images]
        embeds = self.adapter.encode(pixels, [image.feature.grid for image in images])
        problems = {}
        for image, item in zip(images, embeds, strict=True):
            expected = (image.feature.num_embeds, image.feature.width)
            if tuple(item.shape) != expected:
                problems[image.feature.key] = f"the encoder made {tuple(item.shape)} where {expected} was predicted"
                continue
            where = self.encoder_buffer[image.where.start : image.where.start + image.where.num_rows]
            where.copy_(item)
            self._ec.save_caches(image.feature.key, where)
            problems[image.feature.key] = ""
        return problems

    def _generate(self, out: SchedulerOutput) -> dict[str, int]:
        for new in out.new_requests:
            positions, delta = self.adapter.positions(len(new.prompt_token_ids), new.features)
            self._batch.add(new, positions, delta)
        self._batch.update(out.cached_requests)
        inputs = self._batch.cut(out.num_scheduled_tokens)
        # Only sequences whose last known token is computed get a new one.
        known = np.array([self._batch.num_tokens(row) for row in inputs.rows])
        complete = np.flatnonzero(inputs.seq_lens == known)
        if self._decodes is not None and not out.item_uses and self._decodes.fits(inputs):
            logits = self._decodes.logits(inputs)[self._on_device(complete)]
        else:
            hidden = self._forward(inputs, out.item_uses)
            if not len(complete):
                return {}
            last = inputs.starts[complete] + inputs.query_lens[complete] - 1
            logits = self.adapter.logits(hidden[self._on_device(last)])
        rows = [int(row) for row in inputs.rows[complete]]
        tokens = self._sample(rows, logits)
        for row, token in zip(rows, tokens, strict=True):
            self._batch.append_token(row, token)
        return {inputs.request_ids[i]: token for i, token in zip(complete, tokens, strict=True)}

    def _forward(self, inputs: StepInputs, uses: list[ItemUse]) -> torch.Tensor:
        adapter, kernels = self.adapter, self._kernels
        assert kernels is not None
        embeds = adapter.embed_tokens(self._on_device(inputs.token_ids))
        images = self._image_rows(inputs, uses) if uses else None
        if images is not None:
            kernels.scatter_embeddings(embeds, images.buffer, images.tokens, images.rows, 0)
        batch = kernels.plan(
            inputs.query_lens,
            inputs.seq_lens,
            inputs.block_table,
            block_size=self.block_size,
            dtype=adapter.dtype,
            device=self.device,
        )
        step = StepContext(kernels, self.kv_cache, batch, images)
        return adapter.forward(embeds, self._on_device(inputs.positions), step)

    def _decode(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """A step of decodes alone, of arguments on the device: what a CUDA graph can hold."""
        assert self._kernels is not None
        step = StepContext(self._kernels, self.kv_cache, batch)
        return self.adapter.logits(self.adapter.forward(self.adapter.embed_tokens(token_ids), positions, step))

    def _image_rows(self, inputs: StepInputs, uses: list[ItemUse]) -> ImageRows:
        place = {request_id: i for i, request_id in enumerate(inputs.request_ids)}
        tokens, rows = [], []
        for use in uses:
            i = place[use.request_id]
            begin = inputs.starts[i] + use.first_token - (inputs.seq_lens[i] - inputs.query_lens[i])
            tokens.append(np.arange(begin, begin + use.num_tokens))
            rows.append(np.arange(use.first_row, use.first_row + use.num_tokens))
        return ImageRows(
            self.encoder_buffer, self._on_device(np.concatenate(tokens)), self._on_device(np.concatenate(rows))
        )

    def _on_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return to_device(array, self.device)

    def _sample(self, rows: list[int], logits: torch.Tensor) -> list[int]:
        params, indices, seeds, forbidden = [], [], [], []
        for row in rows:
            sampling = self._batch.sampling[row]
            assert sampling is not None
            num_output = self._batch.num_tokens(row) - self._batch.num_prompt_tokens[row]
            params.append(sampling)
            indices.append(num_output)
            forbidden.append(self._batch.stop_ids[row] if num_output < sampling.min_tokens else [])
            seeds.append(self._batch.seeds[row])
        draw = None if self._kernels is None else self._kernels.sample
        return SamplingBatch(params, indices, seeds, forbidden).sample(logits, draw)
