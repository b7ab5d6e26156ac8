"""What `kernels/sampling.py` must compute, with a sorted vocabulary, in float64. Imports no Triton."""

from __future__ import annotations

import torch

from kernels.race import race


def sample_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Token ids `[num_rows]`; arguments as in `kernels.sampling.sample`."""
    vocab = logits.shape[1]
    greedy = temperature < 1e-5
    wide = logits.float()
    scaled = (wide - wide.amax(dim=1, keepdim=True)) / torch.where(greedy, 1.0, temperature)[:, None]
    # Equal logits are ranked by id.
    ranked, ids = scaled.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    beyond = rank >= torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)[:, None]
    weights = ranked.masked_fill(beyond, float("-inf")).softmax(dim=1, dtype=torch.float64)
    before = weights.cumsum(dim=1) - weights
    beyond = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    beyond |= ranked.exp() < min_p[:, None]
    beyond[:, 0] = False
    drawn = race(weights.masked_fill(beyond, 0.0), keys[:, None], ids)
    return torch.where(greedy, ids[:, 0], drawn)
