"""What a load's records amount to.

TTFT: from sending to the first token. ITL: between two arrivals. TPOT: from the first token to the end, over the tokens
after the first. A request attains its SLO where it succeeds within all limits given; goodput counts those per second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from cli.bench.load import Record


class Distribution(msgspec.Struct, frozen=True):
    """Of times in milliseconds; NaN-free: absent where there were none."""

    mean: float
    median: float
    p90: float
    p99: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    target: str
    num_requests: int
    completed: int
    failed: int
    errors: dict[str, int]  # by kind
    duration_s: float
    output_tokens: int
    request_throughput: float  # completed requests a second
    output_token_throughput: float  # tokens of completed requests a second
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    slo_attainment: float | None  # share of all requests, failed ones included; None without an SLO
    goodput: float | None  # requests a second that attained it


def summarize(
    target: str,
    records: Sequence[Record],
    duration_s: float,
    *,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
) -> Report:
    """Count one load. Failed requests take part in no time and no throughput."""
    completed = [record for record in records if not record.error]
    seconds = max(duration_s, 1e-9)
    attained: int | None = None
    if slo_ttft_ms is not None or slo_tpot_ms is not None:
        attained = sum(_attains(record, slo_ttft_ms, slo_tpot_ms) for record in completed)
    output_tokens = sum(record.num_tokens for record in completed)
    return Report(
        target=target,
        num_requests=len(records),
        completed=len(completed),
        failed=len(records) - len(completed),
        errors=dict(Counter(record.error for record in records if record.error)),
        duration_s=duration_s,
        output_tokens=output_tokens,
        request_throughput=len(completed) / seconds,
        output_token_throughput=output_tokens / seconds,
        ttft_ms=_distribution([_ttft_ms(record) for record in completed]),
        tpot_ms=_distribution([tpot for record in completed if (tpot := _tpot_ms(record)) is not None]),
        itl_ms=_distribution([gap for record in completed for gap in _gaps_ms(record)]),
        e2e_ms=_distribution([record.end_s * 1000 for record in completed]),
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        slo_attainment=attained / len(records) if attained is not None and records else None,
        goodput=attained / seconds if attained is not None else None,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted `values`, not empty, with linear interpolation; `share` within 0 to 1."""
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def to_table(report: Report) -> str:
    """For people."""
    lines = [
        f"target                 {report.target}",
        f"requests               {report.completed} completed, {report.failed} failed, {report.duration_s:.2f} s",
        f"request throughput     {report.request_throughput:.2f} requests/s",
        f"token throughput       {report.output_token_throughput:.2f} tokens/s ({report.output_tokens} tokens)",
        "",
        f"{'milliseconds':<12}{'mean':>10}{'median':>10}{'p90':>10}{'p99':>10}",
    ]
    rows = {"TTFT": report.ttft_ms, "TPOT": report.tpot_ms, "ITL": report.itl_ms, "end to end": report.e2e_ms}
    for name, row in rows.items():
        values = (row.mean, row.median, row.p90, row.p99) if row is not None else ()
        lines.append(f"{name:<12}" + ("".join(f"{value:10.1f}" for value in values) or f"{'-':>10}"))
    if report.slo_attainment is not None and report.goodput is not None:
        limits = [
            f"{name} {limit:g} ms"
            for name, limit in (("TTFT", report.slo_ttft_ms), ("TPOT", report.slo_tpot_ms))
            if limit is not None
        ]
        lines += [
            "",
            f"SLO ({', '.join(limits)})  {report.slo_attainment:.1%} attained, {report.goodput:.2f} requests/s",
        ]
    if report.errors:
        lines += ["", "errors"] + [f"  {kind:<20} {count}" for kind, count in sorted(report.errors.items())]
    return "\n".join(lines)


def _ttft_ms(record: Record) -> float:
    return record.chunk_times_s[0] * 1000


def _tpot_ms(record: Record) -> float | None:
    if record.num_tokens < 2:
        return None
    return (record.chunk_times_s[-1] - record.chunk_times_s[0]) * 1000 / (record.num_tokens - 1)


def _gaps_ms(record: Record) -> list[float]:
    times = record.chunk_times_s
    return [(times[i] - times[i - 1]) * 1000 for i in range(1, len(times))]


def _attains(record: Record, slo_ttft_ms: float | None, slo_tpot_ms: float | None) -> bool:
    if slo_ttft_ms is not None and _ttft_ms(record) > slo_ttft_ms:
        return False
    tpot_ms = _tpot_ms(record)
    return slo_tpot_ms is None or tpot_ms is None or tpot_ms <= slo_tpot_ms


def _distribution(values: list[float]) -> Distribution | None:
    if not values:
        return None
    values = sorted(values)
    return Distribution(
        mean=sum(values) / len(values),
        median=percentile(values, 0.5),
        p90=percentile(values, 0.9),
        p99=percentile(values, 0.99),
    )
