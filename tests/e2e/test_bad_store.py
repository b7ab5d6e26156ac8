"""A store of the encoder cache that is full, read-only or gone while it is used, or lists what it cannot give, and no
way round it: a real file system that is so. With a way round, see test_stores.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from cli.cluster import LocalCluster
from core.keys import content_hash
from protos import encoder_pb2
from tests.e2e.conftest import Cluster
from tests.e2e.mounts import Mounted, can_mount
from tests.e2e.test_bad_start import check, service, storage
from tests.pictures import picture
from tests.reference import Conversation

SMALL = picture(400, 64, 64)  # 4 kB of embeddings


class Place(NamedTuple):
    """A cluster, and the folder with the file system that its store is on: a small one, where that can be mounted."""

    there: Cluster
    store: Path
    mounted: Mounted | None


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """What a stage believes of the store it believes for longer than the tests take."""
    folder = tmp_path_factory.mktemp("bad-store")
    store = folder / "store"
    store.mkdir()
    with contextlib.ExitStack() as stack:
        mounted = stack.enter_context(Mounted(store, size_bytes=320 << 10)) if can_mount() else None
        (store / "of somebody else").write_bytes(bytes(200 << 10))
        there_is = storage(store / "ec", capacity_bytes=320 << 10, negative_ttl_s=60)
        args = ["--dtype=float32", "--max-model-len=1024", "--no-ec-peer-fallback", there_is]
        local = LocalCluster(tiny_model, service_args=args, log_dir=folder / "logs")
        yield Place(Cluster(stack.enter_context(local)), store, mounted)


@pytest.mark.faults("an item that cannot be loaded, and one that is gone")
def test_an_item_that_the_store_lists_and_cannot_give_is_saved_again(place: Place) -> None:
    there = place.there

    # Of a newer format, which a consumer leaves where it is.
    unreadable = picture(404, 64, 64)
    path = encode(place, unreadable)
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"format_version":"1"', b'"format_version":"2"'))
    assert len(there.tokens(question(unreadable), max_tokens=4)) == 4
    assert there.counter("prefill", "ec_load_failures_total") == 1
    assert path.read_bytes() == good

    # Absent when prefill looks, and back, from the encoder's own buffer, faster than that is forgotten.
    gone = picture(405, 64, 64)
    path = encode(place, gone)
    good = path.read_bytes()
    encode(place, gone)
    path.unlink()
    assert len(there.tokens(question(gone), max_tokens=4)) == 4
    assert there.counter("prefill", "ec_load_failures_total") == 1
    assert there.counter("encoder", "vision_tower_images_total") == 2
    assert path.read_bytes() == good
    there.wait_empty()


@pytest.mark.faults("a store that is full, read-only, gone")
@pytest.mark.skipif(not can_mount(), reason="this user may not mount a file system, and root is stopped by no mode")
def test_a_store_that_is_full_or_read_only_or_gone_is_named_and_comes_back(tiny_model: Path, place: Place) -> None:
    there, store, mounted = place
    assert mounted is not None
    answer = there.tokens(question(SMALL), max_tokens=4)
    large = picture(401, 512, 512)  # 256 kB
    assert unavailable(there, large) == "storage: No space left on device"
    assert there.tokens(question(SMALL), max_tokens=4) == answer
    mounted.set_read_only(True)
    assert unavailable(there, picture(402, 64, 64)) == "storage: Read-only file system"
    assert there.tokens(question(SMALL), max_tokens=4) == answer
    mounted.set_read_only(False)
    assert len(there.tokens(question(picture(402, 64, 64)), max_tokens=4)) == 4
    mounted.unmount()
    assert unavailable(there, picture(403, 64, 64)) == "the storage folder cannot be reached: No such file or directory"
    mounted.mount()
    (store / "ec").mkdir()
    assert len(there.tokens(question(picture(403, 64, 64)), max_tokens=4)) == 4
    assert len(there.tokens(question(SMALL), max_tokens=4)) == 4
    there.wait_empty()
    # Whole items only: what was begun on the full store is gone again.
    assert all(path.suffix == ".safetensors" for path in store.rglob("*") if path.is_file())
    mounted.set_read_only(True)
    start = service("encoder", tiny_model, storage(store / "ec"), expected=["ec_producer must be able to write there"])
    check(start, start.run())


def encode(place: Place, image: bytes) -> Path:
    """Have the encoder alone see an image, and say where its item lies."""
    made = place.there.ask(
        "encoder", "Encode", encoder_pb2.EncodeRequest(image=image, content_hash=content_hash(image))
    )
    assert isinstance(made, encoder_pb2.EncodeResponse)
    (path,) = place.store.rglob(f"{made.feature.key}.safetensors")
    return path


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
