"""Where the tokens of a flattened batch stand: what both implementations of attention make of the runner's arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """On the host. Sequences with one new token and something before it, *decodes*, stand first."""

    starts: NDArray[np.int64]  # [num_seqs + 1], places of the sequences' tokens in the batch
    blocks: NDArray[np.int64]  # [num_tokens], the block that each new token's key and value go to
    rows: NDArray[np.int64]  # [num_tokens], and the row in it
    num_decodes: int


def token_places(
    query_lens: NDArray[np.int64],  # [num_seqs], new tokens
    seq_lens: NDArray[np.int64],  # [num_seqs], tokens in the cache after this step
    block_table: NDArray[np.int64],  # [num_seqs, max_blocks]; may hold anything beyond a sequence's blocks
    block_size: int,
) -> TokenPlaces:
    """The places of one step's tokens."""
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    seq_of_token = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = np.arange(starts[-1]) - starts[seq_of_token] + (seq_lens - query_lens)[seq_of_token]
    is_decode = (query_lens == 1) & (seq_lens > 1)
    return TokenPlaces(
        starts=starts,
        blocks=block_table[seq_of_token, positions // block_size],
        rows=positions % block_size,
        num_decodes=len(query_lens) if is_decode.all() else int(is_decode.argmin()),
    )
