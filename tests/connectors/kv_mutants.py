"""KV connectors broken on purpose, each in one way, over `KVPeerConnector`, which is good."""

from __future__ import annotations

import threading
from typing import ClassVar

from connectors.kv.base import KVConnectorOutput
from connectors.kv.peer import KVPeerConnector
from core.types import KVHandle


class KVMutant(KVPeerConnector):
    """`caught_by`: the check that is there for it, and words that its reason has."""

    caught_by: ClassVar[tuple[str, str]]


class KVSwapsBlocks(KVMutant):
    caught_by = ("kv/round_trip", "blocks are wrong")

    def update_state_after_alloc(self, request_id: str, handle: KVHandle, block_ids: list[int]) -> None:
        super().update_state_after_alloc(request_id, handle, block_ids[::-1])


class KVSaysExpired(KVMutant):
    caught_by = ("kv/round_trip", "ended by time")

    def get_finished(self) -> KVConnectorOutput:
        output = super().get_finished()
        output.expired_sending = output.finished_sending
        return output


class KVReportsTwice(KVMutant):
    caught_by = ("kv/round_trip", "not under way")

    def get_finished(self) -> KVConnectorOutput:
        output = super().get_finished()
        output.finished_recving = output.finished_recving + self.__dict__.get("last", [])
        self.__dict__["last"] = output.finished_recving
        return output


class KVGivesNoReason(KVMutant):
    caught_by = ("kv/lease_expires", "without a reason")

    def get_finished(self) -> KVConnectorOutput:
        output = super().get_finished()
        output.failed_recving = dict.fromkeys(output.failed_recving, "")
        return output


class KVIgnoresReleases(KVMutant):
    caught_by = ("kv/released", "not reported")

    def release(self, request_id: str) -> None:
        pass


class KVRaises(KVMutant):
    caught_by = ("kv/forged_handles", "raised ValueError")

    def get_num_new_matched_tokens(self, handle: KVHandle) -> int:
        if len(handle.params) < 10:
            raise ValueError("too short")
        return super().get_num_new_matched_tokens(handle)


class KVClosesSlowly(KVMutant):
    caught_by = ("kv/close", "close of the")

    def close(self) -> None:
        threading.Event().wait(6)
        super().close()
