"""What Triton's kernels are made for: the one place that says it. No Triton is imported.

`dispatch.py` asks at the start of an engine, the launchers at each call.
"""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
#: Query heads that share a KV head.
MAX_GROUP = 64
#: Columns of a row that one program holds in its registers.
MAX_WIDTH = 32_768


def named(dtypes: tuple[torch.dtype, ...]) -> str:
    """For an error."""
    return ", ".join(map(str, dtypes))
