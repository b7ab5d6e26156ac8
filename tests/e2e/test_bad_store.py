"""A store of the encoder cache that is full, read-only or gone while it is used, and no way round it: a real file
system that is so. With a way round, see test_stores.py."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from cli.cluster import LocalCluster
from tests.e2e.conftest import Cluster
from tests.e2e.mounts import Mounted, can_mount
from tests.e2e.test_bad_start import check, service, storage
from tests.pictures import picture
from tests.reference import Conversation


@pytest.mark.faults("a store that is full, read-only, gone")
@pytest.mark.skipif(not can_mount(), reason="this user may not mount a file system, and root is stopped by no mode")
def test_a_store_that_is_full_or_read_only_or_gone_is_named_and_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    small = picture(400, 64, 64)  # 4 kB of embeddings
    large = picture(401, 512, 512)  # 256 kB
    with Mounted(store, size_bytes=320 << 10) as mounted:
        (store / "of somebody else").write_bytes(bytes(200 << 10))
        there_is = storage(store / "ec", capacity_bytes=320 << 10)
        local = LocalCluster(
            tiny_model,
            service_args=["--dtype=float32", "--max-model-len=1024", "--no-ec-peer-fallback", there_is],
            log_dir=tmp_path / "logs",
        )
        with local:
            there = Cluster(local)
            answer = there.tokens(question(small), max_tokens=4)
            assert unavailable(there, large) == "storage: No space left on device"
            assert there.tokens(question(small), max_tokens=4) == answer
            mounted.set_read_only(True)
            assert unavailable(there, picture(402, 64, 64)) == "storage: Read-only file system"
            assert there.tokens(question(small), max_tokens=4) == answer
            mounted.set_read_only(False)
            assert len(there.tokens(question(picture(402, 64, 64)), max_tokens=4)) == 4
            mounted.unmount()
            assert (
                unavailable(there, picture(403, 64, 64))
                == "the storage folder cannot be reached: No such file or directory"
            )
            mounted.mount()
            (store / "ec").mkdir()
            assert len(there.tokens(question(picture(403, 64, 64)), max_tokens=4)) == 4
            assert len(there.tokens(question(small), max_tokens=4)) == 4
            there.wait_empty()
            # Whole items only: what was begun on the full store is gone again.
            assert all(path.suffix == ".safetensors" for path in store.rglob("*") if path.is_file())
        mounted.set_read_only(True)
        start = service(
            "encoder", tiny_model, storage(store / "ec"), expected=["ec_producer must be able to write there"]
        )
        check(start, start.run())


def question(image: bytes) -> Conversation:
    return [("user", [image, "What is this?"])]


def unavailable(there: Cluster, image: bytes) -> str:
    """Why the encoder could not store an image's embeddings; all else of the status is checked here."""
    with pytest.raises(grpc.RpcError) as caught:
        there.tokens(question(image), max_tokens=4)
    code, details = caught.value.code(), caught.value.details()
    assert code is grpc.StatusCode.UNAVAILABLE, details
    said = "encoder is unavailable: the encoder cache was not written: "
    assert details.startswith(said), details
    there.wait_empty()
    return str(details.removeprefix(said))
