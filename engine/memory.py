"""How large the KV cache and the encoder buffer may be.

What a device has left after the weights and one profiled step is split: the encoder buffer gets what a few steps of
images need, the KV cache the rest. On a GPU, "left" is what `--gpu-memory-utilization` allows of the whole device. On
a CPU the stages share the host with each other and with everything else, so a stage takes at most a quarter of what is
free, and never more than its limits can use.
"""

from __future__ import annotations

from pathlib import Path

import torch

from core.errors import ConfigError
from core.struct import Struct

_CPU_SHARE = 0.25
#: The encoder buffer holds this many full steps of image tokens where memory allows.
_BUFFER_STEPS = 8
#: and at most this share of what is left.
_BUFFER_SHARE = 0.25
_UNLIMITED = 1 << 62


class CacheSizes(Struct, frozen=True):
    """Both sizes, in their own units."""

    num_blocks: int
    buffer_rows: int


class CacheNeeds(Struct, frozen=True):
    """What the sizes depend on. Zero `block_bytes`: no KV cache."""

    block_bytes: int
    block_size: int
    row_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_gpu_blocks: int | None
    encoder_cache_bytes: int | None


def available_bytes(device: torch.device, utilization: float, profiled_bytes: int) -> int:
    """What the caches may take, after `profiled_bytes` more for a step's own tensors."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(max(0, free - total * (1 - utilization) - profiled_bytes))
    import psutil  # a bare GPU machine does without

    free = min(psutil.virtual_memory().available, _cgroup_free())
    return int(max(0, (free - profiled_bytes) * min(utilization, _CPU_SHARE)))


def size_caches(needs: CacheNeeds, available: int) -> CacheSizes:
    """Both sizes. Raises ConfigError where they cannot hold even one request of the greatest length."""
    rows = _buffer_rows(needs, available)
    if not needs.block_bytes:
        return CacheSizes(0, rows)
    least = -(-needs.max_model_len // needs.block_size)
    if needs.num_gpu_blocks is not None:
        if needs.num_gpu_blocks < least:
            raise ConfigError(
                "--num-gpu-blocks",
                needs.num_gpu_blocks,
                f"one request of --max-model-len {needs.max_model_len} needs {least}",
            )
        return CacheSizes(needs.num_gpu_blocks, rows)
    affordable = max(0, available - rows * needs.row_bytes) // needs.block_bytes
    if affordable < least:
        raise ConfigError(
            "--max-model-len",
            needs.max_model_len,
            f"one request needs {least} blocks of {needs.block_bytes} bytes, memory is left for {affordable}",
        )
    return CacheSizes(min(affordable, least * needs.max_num_seqs), rows)


def _buffer_rows(needs: CacheNeeds, available: int) -> int:
    if needs.encoder_cache_bytes is not None:
        rows = needs.encoder_cache_bytes // needs.row_bytes
        if rows < 1:
            raise ConfigError(
                "--encoder-cache-bytes", needs.encoder_cache_bytes, f"one embedding alone has {needs.row_bytes} bytes"
            )
        return rows
    wanted = max(needs.max_model_len, _BUFFER_STEPS * needs.max_num_batched_tokens)
    affordable = int(available * _BUFFER_SHARE) // needs.row_bytes
    if affordable < 1:
        raise ConfigError("--encoder-cache-bytes", "auto", f"no memory is left: {available} bytes")
    return min(wanted, affordable)


def _cgroup_free(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left under this container's limit, of cgroups v2 or v1; a very large number where there is none.

    Pages of files that the kernel can drop at once count as left, as a kubelet counts them: reading weights fills a
    container's limit with such pages.
    """
    for folder, limit_name, used_name, droppable_name in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            used = int((folder / used_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            droppable = int(stat.get(droppable_name, 0))
            return _UNLIMITED if limit == "max" else max(0, int(limit) - used + droppable)
        except (OSError, ValueError):
            continue
    return _UNLIMITED
