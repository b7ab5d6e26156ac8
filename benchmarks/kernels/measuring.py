"""Cases, ceilings, and how long a call takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

_WARM_UP_MS, _MEASURE_MS = 25, 150


@dataclass(frozen=True)
class Case:
    """One kernel at one shape, and what PyTorch has for the same."""

    kernel: str
    shape: str
    ours: Callable[[], object]
    num_bytes: float = 0.0  # the fewest that must move: each input read once, each output written once
    flops: float = 0.0  # that must be done; the ceiling is what takes longer at its rate
    others: dict[str, Callable[[], object]] = field(default_factory=dict)
    goal: float | None = None  # share of the ceiling


@dataclass(frozen=True)
class Ceilings:
    """What the device does, measured in this run."""

    copy_bytes_per_s: float  # read plus written
    matrix_flops_per_s: float  # bf16, random operands


@dataclass(frozen=True)
class Row:
    """What was measured of one case."""

    kernel: str
    shape: str
    time_us: float
    gb_per_s: float
    tflop_per_s: float
    ceiling: str  # "copy" or "matrix"
    share: float  # of the ceiling
    goal: float | None
    others_us: dict[str, float]
    failed: dict[str, str]  # others that did not run, and why

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.share >= self.goal


@dataclass(frozen=True)
class Sizes:
    """What the groups are told: where, and whether shapes are tiny, to try the code and not the device."""

    device: torch.device
    quick: bool


Group = Callable[[Sizes], Iterator[Case]]


def time_s(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call. On a GPU with a cold L2 before each, by events."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(work, warmup=_WARM_UP_MS, rep=_MEASURE_MS, return_mode="median")) / 1e3
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def measure_ceilings(sizes: Sizes) -> Ceilings:
    """A large copy, and a large product of random matrices (zeros would run faster)."""
    num_bytes, side = (1 << 20, 128) if sizes.quick else (4 << 30, 8192)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=sizes.device).random_()
    target = torch.empty_like(source)
    copy_s = time_s(functools.partial(target.copy_, source), sizes.device)
    del source, target
    a, b = (torch.randn(side, side, device=sizes.device).to(torch.bfloat16) for _ in range(2))
    matrix_s = time_s(functools.partial(torch.mm, a, b), sizes.device)
    return Ceilings(2 * num_bytes / copy_s, 2 * side**3 / matrix_s)


def measure(case: Case, ceilings: Ceilings, sizes: Sizes) -> Row:
    """Ours, then the others. Of those, one that this torch does not run is reported, not raised."""
    ours_s = time_s(case.ours, sizes.device)
    others_us, failed = {}, {}
    for name, work in case.others.items():
        try:
            others_us[name] = time_s(work, sizes.device) * 1e6
        except Exception as error:  # a compiler's or an allocator's, of any kind
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    floors_s = {
        "copy": case.num_bytes / ceilings.copy_bytes_per_s,
        "matrix": case.flops / ceilings.matrix_flops_per_s,
    }
    ceiling = max(floors_s, key=floors_s.__getitem__)
    return Row(
        kernel=case.kernel,
        shape=case.shape,
        time_us=ours_s * 1e6,
        gb_per_s=case.num_bytes / ours_s / 1e9,
        tflop_per_s=case.flops / ours_s / 1e12,
        ceiling=ceiling,
        share=floors_s[ceiling] / ours_s,
        goal=case.goal,
        others_us=others_us,
        failed=failed,
    )
