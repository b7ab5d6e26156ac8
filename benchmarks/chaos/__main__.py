"""Rolling faults at two workers of every stage, under load; stops by itself.

    python -m benchmarks.chaos [--requests N] [--concurrency N] [--seed N] [--limit SECONDS] [--only FAULT[,…]]

Prints what was done and what came of it, and exits with 1 where an answer was wrong, a request hung, something was left
behind, or more requests failed than may: one in a hundred, and none while an encoder or a prefill worker was disturbed.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.chaos.campaign import Campaign
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.load import questions
from cli.cluster import STAGES
from demo.random_checkpoint import make_checkpoint

#: What the router is told, so that a stopped process is left within seconds.
ROUTER_ARGS = ("--worker-timeout=4", "--stall-timeout=5")
SERVICE_ARGS = ("--dtype=float32", "--max-model-len=512", "--max-num-batched-tokens=96")


@click.command()
@click.option("--requests", "num_requests", default=500, show_default=True, help="At least so many.")
@click.option("--concurrency", default=8, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--limit", default=360.0, show_default=True, help="Seconds after which no fault begins.")
@click.option(
    "--hold", default=2.5, show_default=True, help="Seconds that a fault lasts; three times that where it is silent."
)
@click.option("--only", default=",".join(FAULTS), show_default=True, help="These faults.")
@click.option("--logs", default="", help="Folder for the processes' output.")
def main(
    num_requests: int, concurrency: int, seed: int, limit: float, hold: float, only: str, logs: str
) -> None:  # fmt: skip
    """Run it and print a report."""
    draw = random.Random(seed)
    plan = [(stage, fault) for stage in STAGES for fault in only.split(",")]
    draw.shuffle(plan)
    with tempfile.TemporaryDirectory(prefix="triptych-chaos-") as folder:
        model = make_checkpoint(Path(folder) / "model")
        cluster = ChaosCluster(
            model, encoders=2, prefills=2, decodes=2, service_args=SERVICE_ARGS, router_args=ROUTER_ARGS,
            log_dir=logs or Path(folder) / "logs",
        )  # fmt: skip
        with cluster:
            campaign = Campaign(cluster, questions(24, 96), concurrency=concurrency, seed=seed)
            report = campaign.run(plan, hold_s=hold, min_requests=num_requests, deadline_s=limit, say=print)
    report.leaks += [f"{name} in the temporary folder" for name in cluster.left_behind]
    print(
        f"\n{report.num_requests} requests in {report.seconds:.0f} s, the slowest {report.slowest_s:.1f} s; "
        f"{sum(report.faults.values())} of {len(plan)} faults; {report.num_errors} errors, {len(report.wrong)} wrong "
        f"answers, {len(report.leaks)} leaks"
    )
    for name, count in report.retries.items():
        print(f"  {name} {count}")
    for what, count in report.errors.most_common():
        print(f"  error x{count}: {what}")
    for line in (*report.wrong[:5], *report.leaks):
        print(f"  {line}")
    is_well = (
        not report.wrong
        and not report.leaks
        and report.num_requests >= num_requests
        and report.num_errors <= report.num_requests / 100
        and not report.errors_of("encoder", "prefill")
    )
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
