"""Which implementation of the layers' tensor work an engine uses: Triton's kernels, or PyTorch's operators.

Decided once, when the weights are there, by device, dtype and the model's shapes, and logged once. On a GPU it is
Triton, elsewhere PyTorch. `TRIPTYCH_KERNELS=triton|torch` overrides it, and Triton's own `TRITON_INTERPRET=1` means
Triton too, on a CPU, one program after the other: for tests. What the chosen kernels do not support is an error that
names the shape; nothing falls back.

Modules that need Triton are imported where it is chosen and nowhere else: a machine without it serves on its CPU.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from core.errors import ConfigError
from core.struct import Struct
from kernels.limits import DTYPES, MAX_GROUP, MAX_HEAD_DIM, MAX_WIDTH, named

logger = logging.getLogger(__name__)

VARIABLE = "TRIPTYCH_KERNELS"
_INTERPRET = "TRITON_INTERPRET"
_CHOICES = ("triton", "torch")


class LayerShapes(Struct, frozen=True):
    """What of a language model decides whether the kernels fit."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Plan(Protocol):
    """One step's batch, as `attend` of the same implementation takes it; see `build_attention_batch` in
    paged_attention.py."""

    def __call__(
        self,
        query_lens: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        block_table: NDArray[np.int64],
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any: ...


class Attend(Protocol):
    """Write the new keys and values into the cache, then attend: `paged_attention` in paged_attention.py."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_cache: torch.Tensor,
        batch: Any,  # what `plan` of the same implementation made
        scale: float,
        *,
        soft_cap: float = 0.0,
        window: int = 0,
        span_ends: torch.Tensor | None = None,
        cache_scales: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation. Each function is documented where Triton's stands: the module of the comment."""

    name: str  # "triton" or "torch"
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # norm.py
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    swiglu: Callable[[torch.Tensor], torch.Tensor]  # swiglu.py
    mrope_angles: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]  # rotary.py
    rotary: Callable[[torch.Tensor, torch.Tensor], None]
    norm_rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    scatter_embeddings: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
    gather_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # block_copy.py, for KV connectors
    scatter_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    #: sampling.py; None where `engine/sampler.py` does it with PyTorch's operators, ranking no more than it must.
    sample: (
        Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
        | None
    )
    plan: Plan
    attend: Attend


def choose_kernels(
    device: torch.device, dtype: torch.dtype, shapes: LayerShapes, environ: Mapping[str, str] = os.environ
) -> Kernels:
    """The implementation for one engine.

    Raises:
        ConfigError: `TRIPTYCH_KERNELS` is neither, Triton is asked for where it cannot run, or it has no kernel for
            this dtype or shape.
    """
    wanted = environ.get(VARIABLE, "")
    interpreted = environ.get(_INTERPRET, "") not in ("", "0")
    if wanted not in ("", *_CHOICES):
        raise ConfigError(VARIABLE, wanted, f"is not one of {', '.join(_CHOICES)}")
    name = wanted or ("triton" if interpreted or device.type == "cuda" else "torch")
    if name == "triton":
        if device.type != "cuda" and not interpreted:
            raise ConfigError(VARIABLE, name, f"needs a GPU, or {_INTERPRET}=1; the device is {device}")
        _check(dtype, shapes)
    where = f"{name}{' (interpreted)' if name == 'triton' and interpreted else ''}"
    logger.info("kernels: %s for %s, %s, %s", where, device, dtype, shapes)
    if name == "triton":
        return _triton()
    return _torch_on_cpu() if device.type == "cpu" else _torch()


def _check(dtype: torch.dtype, shapes: LayerShapes) -> None:
    reason = None
    if dtype not in DTYPES:
        reason = f"there are none for {dtype}, only for {named(DTYPES)}"
    elif shapes.head_dim > MAX_HEAD_DIM or shapes.head_dim % 2:
        reason = f"heads must be even and at most {MAX_HEAD_DIM} wide"
    elif shapes.num_heads % shapes.num_kv_heads or shapes.num_heads // shapes.num_kv_heads > MAX_GROUP:
        reason = f"each KV head must have the same number of heads, at most {MAX_GROUP}"
    elif shapes.hidden_size > MAX_WIDTH:
        reason = f"rows are at most {MAX_WIDTH} wide"
    if reason is not None:
        raise ConfigError(
            VARIABLE, "triton", f"does not fit {shapes}: {reason} ({VARIABLE}=torch works, and is slower)"
        )


def _triton() -> Kernels:
    from kernels.block_copy import gather_blocks, scatter_blocks
    from kernels.device_batch import attend, build_device_batch
    from kernels.embedding_scatter import scatter_embeddings
    from kernels.kv_write import kv_write
    from kernels.norm import add_rms_norm, rms_norm
    from kernels.rotary import mrope_angles, norm_rotary, rotary
    from kernels.sampling import sample
    from kernels.swiglu import swiglu

    def plan(
        query_lens: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        block_table: NDArray[np.int64],
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        return build_device_batch(query_lens, seq_lens, block_table, block_size=block_size, device=device)

    def write_and_attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_cache: torch.Tensor,
        batch: Any,
        scale: float,
        *,
        soft_cap: float = 0.0,
        window: int = 0,
        span_ends: torch.Tensor | None = None,
        cache_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv_write(key, value, layer_cache, batch.slots, cache_scales)
        return attend(
            query, layer_cache, batch, scale,
            soft_cap=soft_cap, window=window, span_ends=span_ends, cache_scales=cache_scales,
        )  # fmt: skip

    return Kernels(
        name="triton",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        swiglu=swiglu,
        mrope_angles=mrope_angles,
        rotary=rotary,
        norm_rotary=norm_rotary,
        scatter_embeddings=scatter_embeddings,
        gather_blocks=gather_blocks,
        scatter_blocks=scatter_blocks,
        sample=sample,
        plan=plan,
        attend=write_and_attend,
    )


def _torch() -> Kernels:
    """The twins."""
    from kernels import layer_twins as twins
    from kernels.cache_twins import gather_blocks_torch, scatter_blocks_torch, scatter_embeddings_torch
    from kernels.paged_attention import build_attention_batch, paged_attention

    return Kernels(
        name="torch",
        rms_norm=twins.rms_norm_torch,
        add_rms_norm=twins.add_rms_norm_torch,
        swiglu=twins.swiglu_torch,
        mrope_angles=twins.mrope_angles_torch,
        rotary=twins.rotary_torch,
        norm_rotary=twins.norm_rotary_torch,
        scatter_embeddings=scatter_embeddings_torch,
        gather_blocks=gather_blocks_torch,
        scatter_blocks=scatter_blocks_torch,
        sample=None,
        plan=build_attention_batch,
        attend=paged_attention,
    )


def _torch_on_cpu() -> Kernels:
    """The twins, but for what a CPU does faster in another way."""
    from kernels import layer_cpu

    return dataclasses.replace(
        _torch(),
        rms_norm=layer_cpu.rms_norm_cpu,
        add_rms_norm=layer_cpu.add_rms_norm_cpu,
        swiglu=layer_cpu.swiglu_cpu,
        rotary=layer_cpu.rotary_cpu,
        norm_rotary=layer_cpu.norm_rotary_cpu,
    )
