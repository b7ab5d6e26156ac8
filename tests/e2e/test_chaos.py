"""Faults at every stage, under load, on real processes and sockets: nobody gets a wrong answer, an error, or none.

`python -m benchmarks.chaos` is the long version.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.campaign import Campaign
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.load import questions
from tests.failure_watch import injected_faults
from tests.reference import Conversation, Reference

#: What stops and what breaks the network, then what kills: whoever is dead stays so, since starting it again would take
#: most of the time.
_PLAN = [("encoder", "stop"), ("decode", "stall"), ("prefill", "close port"), ("decode", "cut")]
_LAST = [("decode", "kill"), ("encoder", "kill"), ("prefill", "kill engine")]
_NUM_TOKENS = 48


@pytest.mark.timeout(400)  # starts seven programs while another test runs beside it
def test_rolling_faults_change_no_answer_and_leave_nothing(
    tiny_model: Path, tmp_path: Path, reference: Reference
) -> None:
    asked = questions(12, _NUM_TOKENS)
    cluster = ChaosCluster(
        tiny_model,
        encoders=2,
        prefills=2,
        decodes=2,
        service_args=["--dtype=float32", "--max-model-len=512", "--max-num-batched-tokens=96"],
        router_args=["--worker-timeout=2", "--stall-timeout=2"],
        log_dir=tmp_path,
    )
    with injected_faults(), cluster:
        report = Campaign(cluster, asked, concurrency=8).run(_PLAN, last=_LAST, hold_s=1.2, min_requests=100)
    # What every answer was compared with is right to begin with.
    for question in asked:
        if question.sampling.temperature == 0 and question.expected is not None:
            conversation: Conversation = [("user", [*question.pictures, question.text])]
            assert list(question.expected.token_ids) == reference.generate(conversation, _NUM_TOKENS)
    assert sum(report.faults.values()) == len(_PLAN) + len(_LAST)
    assert (report.wrong, dict(report.errors), report.leaks) == ([], {}, [])
    assert cluster.left_behind == []
    # A fault that nobody meets would prove nothing.
    assert sum(report.retries.values()) > 0
