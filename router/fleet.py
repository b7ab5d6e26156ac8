"""All workers of all stages, and which one gets a call.

The seam to the pipeline is `choose`. It names one worker for one piece of work and returns an `Assignment`, which
holds the work's share of that worker's load and takes back what came of the call:

    work = fleet.encode_work(image, tenant)             # or prefill_work(request), decode_work(...)
    tried: list[Worker] = []
    while (assignment := fleet.choose(work, avoid=tried)) is not None:
        worker = assignment.worker
        with assignment:                                # left without a word: cancelled, nobody's fault
            call = worker.stub.Encode(request, timeout=...)
            assignment.on_lost = call.cancel            # a worker that was stopped ends no call by itself
            try:
                response = await call
            except grpc.aio.AioRpcError as error:
                assignment.failed(error)                # every status; the fleet knows which speak against the worker
                ...                                     # raise what would be the same elsewhere
            except asyncio.CancelledError:
                if not assignment.lost:                 # ours; else as if it were UNAVAILABLE
                    raise
            else:
                assignment.succeeded()
                return response
        tried.append(worker)
    raise StageUnavailableError(...)                    # every worker of the stage was tried

- A worker is chosen by the stage's policy among those that serve and whose breaker is closed. Where there is none, the
  others are tried too, since what health said is a moment old; one that does not fit the other stages never is.
- `choose` counts the work at the worker and tells the policy, does not wait, and raises only what a policy of somebody
  else's does. None: no worker is left outside `avoid`. One assignment is one call: a retry chooses again.
- A stream keeps its assignment until its end; `assignment.answered()` at its first message tells the breaker at once.
- A worker that leaves (DNS, the admin call) gets no new calls; its channel stays open for those that it has, and for
  the blocks that it leases, a while longer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection

import grpc

from core.types import Stage
from protos import prefill_pb2
from router.assignment import Assignment
from router.door import Image, Job
from router.membership import Membership
from router.work import Work
from router.workers import Worker, WorkerPool

logger = logging.getLogger(__name__)

#: How long a worker that said RESOURCE_EXHAUSTED is not the first choice.
_BUSY_S = 0.5
# How StageUnavailableError reads: any other UNAVAILABLE is gRPC's own, of a connection.
_OURS = re.compile(r".{1,64}? is unavailable: ")


class Fleet(Membership):
    """The workers, and which of them gets a call. Everything runs on one event loop."""

    # -- what a call will cost --

    def encode_work(self, image: Image, tenant: str) -> Work:
        """One image of a tenant's, to be encoded."""
        key = image.content_hash + tenant.encode()
        return Work(stage=Stage.ENCODER, cost=self.predictor.num_embeds(image), key=key)

    @property
    def kv_capacity(self) -> int:
        """Tokens that the KV caches of all decode workers hold that serve; 0 while none has said."""
        return sum(worker.kv_capacity for worker in self.decodes.serving)

    def request_tokens(self, job: Job) -> int:
        """What a whole request is predicted to take, in tokens, its answer included. For admission."""
        return self.predictor.request_tokens(job)

    def prefill_work(
        self, request: prefill_pb2.PrefillRequest, original: prefill_pb2.PrefillRequest | None = None
    ) -> Work:
        """A prompt as it is about to be sent, features included. `original`: where `request` resumes an expanded
        prompt, the one that was sent first, by which the worker that still holds its prefix is found."""
        return self.predictor.prefill_work(request, original)

    def decode_work(self, *, prompt_tokens: int, max_tokens: int) -> Work:
        """A stream of at most `max_tokens` more tokens after `prompt_tokens` (0: up to the model's limit). Before
        prefill has answered, the cost of the prompt's `Work` is a fair guess at `prompt_tokens`."""
        limit = self.max_model_len - prompt_tokens
        num_new = max(1, min(max_tokens, limit) if max_tokens else limit)
        return Work(stage=Stage.DECODE, cost=num_new, kv_tokens=prompt_tokens + num_new)

    # -- who gets it --

    def choose(self, work: Work, *, avoid: Collection[Worker] = ()) -> Assignment | None:
        """A worker for `work` outside `avoid`, or None where there is none. See the head of this file."""
        pool = self.pools[work.stage]
        candidates = self._candidates(pool, avoid)
        if not candidates:
            return None
        worker = candidates[0] if len(candidates) == 1 else self._ask(pool, work, candidates)
        assignment = Assignment(
            self, worker, work, charge=pool.policy.charge(work, worker), is_probe=worker.breaker.begin()
        )
        worker.take(assignment)
        pool.policy.assigned(work, worker)
        return assignment

    def _candidates(self, pool: WorkerPool, avoid: Collection[Worker]) -> list[Worker]:
        now_s = asyncio.get_running_loop().time()
        usable = [worker for worker in pool.workers if worker.usable(now_s) and worker not in avoid]
        idle = [worker for worker in usable if worker.busy_until_s <= now_s]
        if usable:
            return idle or usable
        rest = [worker for worker in pool.workers if worker.fits and worker not in avoid]
        # What health said is a moment old: a worker that seems down is tried when there is no other, the likeliest
        # to answer first, and one at a time.
        return [max(rest, key=lambda worker: (worker.serving, worker.reachable))] if rest else []

    def _ask(self, pool: WorkerPool, work: Work, candidates: list[Worker]) -> Worker:
        chosen = pool.policy.choose(work, candidates)
        for worker in candidates:
            if worker is chosen:
                return worker
        raise TypeError(f"{type(pool.policy).__name__} chose what is none of its candidates")

    # What assignments report; nobody else calls these.

    def note_answer(self, assignment: Assignment) -> None:
        """The worker is well."""
        assignment.worker.breaker.succeed()

    def note_failure(self, assignment: Assignment, error: grpc.aio.AioRpcError) -> None:
        """See `Assignment.failed`."""
        worker = assignment.worker
        match error.code():
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
                ours = _OURS.match(error.details() or "") is not None
                logger.warning("%s is unavailable: %s", worker.label, error.details())
                self.open_breaker(worker, hard=not ours)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                worker.breaker.succeed()
                worker.busy_until_s = asyncio.get_running_loop().time() + _BUSY_S
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                pass  # the client's deadline; polls find out whether the worker is to blame
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION:
                worker.breaker.succeed()
            case code:
                logger.error("%s answered %s: %s", worker.label, code.name, error.details())
                self.open_breaker(worker, hard=False)

    def note_misbehaviour(self, assignment: Assignment, what: str) -> None:
        """See `Assignment.misbehaved`."""
        logger.error("%s misbehaves: %s", assignment.worker.label, what)
        self.open_breaker(assignment.worker, hard=False)

    def end(self, assignment: Assignment, success: bool | None) -> None:
        """The work is no load of the worker's any more. `success` None: nothing is known."""
        worker = assignment.worker
        worker.give_back(assignment)
        if assignment.is_probe:
            worker.breaker.end_probe()
        if success is False:
            self.pools[worker.stage].policy.failed(assignment.work, worker)
