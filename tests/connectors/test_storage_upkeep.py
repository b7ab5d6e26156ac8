"""The upkeep of the shared folder, a step at a time: what it counts, what it removes, and what it costs."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from connectors.ec.base import ECSide
from connectors.ec.folder_store import FolderStore
from connectors.ec.folder_upkeep import FolderUpkeep, Pace
from connectors.ec.store import CHUNK_BYTES, AbandonedError, SaveSource
from core.types import ECRole
from tests.connectors.support import DEADLINE_S, NAMESPACE, ECPair, poll_until

Closing = Callable[[ECPair], ECPair]

#: Events of the interpreter's audit hook, as (thread's name, event, first argument), while somebody listens.
_heard: list[tuple[str, str, str]] | None = None
_LISTINGS = ("os.scandir", "os.listdir", "glob.glob", "os.walk")


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _heard is not None and event.startswith(("os.", "open", "glob.", "socket.")):
        _heard.append((threading.current_thread().name, event, str(args[0]) if args else ""))


@pytest.fixture(scope="module")
def audit() -> None:
    sys.addaudithook(_hook)  # for the life of the process: there is no way to take it back


@pytest.fixture
def heard(audit: None) -> Iterator[list[tuple[str, str, str]]]:
    global _heard
    _heard = []
    yield _heard
    _heard = None


def random_key(choices: random.Random) -> str:
    return f"{choices.getrandbits(256):064x}"


def fill(root: Path, count: int, num_bytes: int = 100, seed: int = 0) -> list[str]:
    """Files that look like items from outside, each a second older than the one before. Their keys."""
    choices, now_s = random.Random(seed), time.time()
    keys = [random_key(choices) for _ in range(count)]
    content = b"x" * num_bytes
    for index, key in enumerate(keys):
        folder = f"{root}/{NAMESPACE[:16]}/{key[:2]}"
        os.makedirs(folder, exist_ok=True)
        path = f"{folder}/{key}.safetensors"
        with open(path, "wb", buffering=0) as file:
            file.write(content)
        os.utime(path, (now_s - index - 1,) * 2)
    return keys


@pytest.fixture(scope="module")
def many() -> Iterator[Path]:
    """10,000 items, in memory where the system has such a folder: they are quicker made and removed."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        fill(Path(folder), 10_000)
        yield Path(folder)


def file_of(root: Path, key: str) -> Path:
    return root / NAMESPACE[:16] / key[:2] / f"{key}.safetensors"


def held(root: Path) -> set[str]:
    return {path.stem for path in root.rglob("*.safetensors")}


def walk(upkeep: FolderUpkeep) -> None:
    for _ in upkeep.walk():
        pass


def test_a_walk_counts_and_the_oldest_go(tmp_path: Path) -> None:
    keys = fill(tmp_path, 100)
    upkeep = FolderUpkeep(str(tmp_path), 5000, None)
    assert upkeep.total_bytes == 0
    walk(upkeep)
    assert upkeep.total_bytes == 10_000
    assert upkeep.make_room() is True
    assert held(tmp_path) == set(keys[:45]), "a tenth of the capacity is freed at once"
    assert upkeep.total_bytes == 4500
    assert upkeep.take_evictions() == 55


def test_what_was_used_since_the_walk_stays(tmp_path: Path) -> None:
    keys = fill(tmp_path, 10)
    upkeep = FolderUpkeep(str(tmp_path), 500, None)
    walk(upkeep)
    os.utime(file_of(tmp_path, keys[9]))
    assert upkeep.make_room() is True
    assert held(tmp_path) == {*keys[:3], keys[9]}


def test_two_that_find_it_too_full_at_the_same_time_remove_no_more_than_one(tmp_path: Path) -> None:
    keys = fill(tmp_path, 100)
    both = [FolderUpkeep(str(tmp_path), 5000, None) for _ in range(2)]
    for upkeep in both:
        walk(upkeep)
    for upkeep in both:
        assert upkeep.make_room() is True
        assert upkeep.total_bytes == 4500
    assert held(tmp_path) == set(keys[:45])
    assert [upkeep.take_evictions() for upkeep in both] == [55, 0]


def test_a_large_item_does_not_go_where_little_is_too_much(tmp_path: Path) -> None:
    small = fill(tmp_path, 20, 10, seed=1)
    (large,) = fill(tmp_path, 1, 800, seed=2)
    os.utime(file_of(tmp_path, large), (time.time() - 15.5,) * 2)
    upkeep = FolderUpkeep(str(tmp_path), 980, None)  # 1000 are held, and the five oldest are small ones
    walk(upkeep)
    upkeep.make_room()
    assert large in held(tmp_path)
    assert held(tmp_path) - {large} == set(small[:15])


def test_counts_stay_right_whatever_happens_during_a_walk(tmp_path: Path) -> None:
    """Saves of ours and of others, removals by others, evictions between two steps of a walk."""
    choices = random.Random(7)
    keys = fill(tmp_path, 300)
    upkeep = FolderUpkeep(str(tmp_path), 30_000, None)
    walk(upkeep)
    for _ in range(2):
        for _ in upkeep.walk():
            for _ in range(choices.randrange(3)):
                victim = file_of(tmp_path, choices.choice(keys))
                if choices.random() < 0.2:
                    victim.unlink(missing_ok=True)
                new = fill(tmp_path, 1, 100, seed=choices.getrandbits(32))
                keys += new
                upkeep.saved(str(file_of(tmp_path, new[0]).parent), 100)
            upkeep.make_room()
        walk(upkeep)
        assert upkeep.total_bytes == 100 * len(held(tmp_path))
        assert upkeep.make_room() is True
        assert 20_000 <= upkeep.total_bytes == 100 * len(held(tmp_path)) <= 30_000


def test_evictions_between_two_steps_are_not_counted_twice(tmp_path: Path) -> None:
    keys = fill(tmp_path, 600)
    upkeep = FolderUpkeep(str(tmp_path), 60_000, None)
    walk(upkeep)
    for key in keys[-50:]:  # the first that it would remove, gone before their folders are looked at again
        file_of(tmp_path, key).unlink()
    for step, folder in enumerate(upkeep.walk()):
        if step == 200:  # most folders have been looked at afresh
            (new,) = fill(tmp_path, 1, 10_000, seed=5)
            file_of(tmp_path, new).rename(f"{folder}/{new}.safetensors")
            upkeep.saved(folder, 10_000)
            assert upkeep.make_room() is True
    upkeep.short_of_room(1)  # the oldest of this walk's candidates: those that have just been removed must not be there
    upkeep.make_room()
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert upkeep.total_bytes == on_disk


def test_a_folder_that_a_save_makes_during_a_walk_is_not_forgotten(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    upkeep = FolderUpkeep(str(tmp_path), 10_000, None)
    steps = upkeep.walk()
    next(steps)
    upkeep.saved(str(tmp_path / ("f" * 16) / "00"), 700)
    assert list(steps) == []
    assert upkeep.total_bytes == 800


def test_a_full_file_system_makes_it_give_up_a_part(tmp_path: Path) -> None:
    keys = fill(tmp_path, 100)
    upkeep = FolderUpkeep(str(tmp_path), None, None)
    walk(upkeep)
    assert upkeep.make_room() is True
    assert len(held(tmp_path)) == 100
    upkeep.short_of_room(50)
    assert upkeep.make_room() is True
    kept = len(held(tmp_path))
    assert held(tmp_path) == set(keys[:kept])
    assert 75 <= kept <= 90
    upkeep.short_of_room(50)
    upkeep.make_room()
    assert len(held(tmp_path)) == kept, "once a second: where others fill the disk, all that we give up is in vain"


def test_old_temporaries_and_empty_folders_go_strangers_files_stay(tmp_path: Path) -> None:
    (key,) = fill(tmp_path, 1)
    folder = file_of(tmp_path, key).parent
    old, young = folder / f".{key}.{'0' * 16}.tmp", folder / f".{key}.{'1' * 16}.tmp"
    strangers = [folder / "notes.tmp", folder / "x.safetensors", tmp_path / "README", tmp_path / "other" / "aa" / "f"]
    deserted, fresh = tmp_path / ("a" * 16), tmp_path / ("b" * 16)
    for path in (deserted / "00", fresh / "00", strangers[-1].parent):
        path.mkdir(parents=True)
    for path in (old, young, *strangers):
        path.touch()
    long_ago = (time.time() - 7200,) * 2
    for path in (old, *strangers, deserted / "00", deserted):
        os.utime(path, long_ago)
    upkeep = FolderUpkeep(str(tmp_path), 1, 60)
    walk(upkeep)
    os.utime(deserted, long_ago)  # removing what was in it was a change
    walk(upkeep)
    upkeep.make_room()
    assert not old.exists()
    assert not deserted.exists()
    assert not file_of(tmp_path, key).exists(), "the capacity is one byte"
    assert all(path.exists() for path in (young, *strangers, fresh / "00"))


def test_what_cannot_be_removed_is_said_and_does_not_keep_it_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Root is stopped by no mode, so the operating system's answer is stood in for.
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    keys = fill(tmp_path, 10)
    monkeypatch.setattr(os, "unlink", refuse)
    walks = []
    upkeep = FolderUpkeep(str(tmp_path), 500, None, Pace(period_s=60))
    real_walk = upkeep.walk
    monkeypatch.setattr(upkeep, "walk", lambda: walks.append(1) or real_walk())
    closing = threading.Event()
    thread = threading.Thread(target=upkeep.run, args=(closing,))
    thread.start()
    poll_until(lambda: "Permission denied" in caplog.text)
    for _ in range(20):
        upkeep.saved(str(file_of(tmp_path, keys[0]).parent), 1)
    upkeep.close()
    thread.join()
    assert len(walks) <= 2
    assert held(tmp_path) == set(keys)
    assert caplog.text.count("Permission denied") == 1
    assert "more than capacity_bytes" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_upkeep_ends_soon_in_the_middle_of_a_walk(tmp_path: Path) -> None:
    fill(tmp_path, 300)
    for end in ("closing", "close"):
        upkeep = FolderUpkeep(str(tmp_path), None, None, Pace(urgent_share=1e-4))  # minutes for one walk
        closing = threading.Event()
        thread = threading.Thread(target=upkeep.run, args=(closing,))
        thread.start()
        poll_until(lambda upkeep=upkeep: upkeep.total_bytes > 0)
        begin_s = time.monotonic()
        closing.set() if end == "closing" else upkeep.close()
        thread.join()
        assert time.monotonic() - begin_s < DEADLINE_S
        assert upkeep.total_bytes < 30_000


def test_look_ups_list_no_folder_however_many_items_there_are(
    many: Path, closing: Closing, heard: list[tuple[str, str, str]]
) -> None:
    keys = sorted(held(many))
    pair = closing(ECPair(many, ECRole.CONSUMER, negative_ttl_s=0))
    absent = [random_key(random.Random(99)) for _ in range(50)]
    heard.clear()
    assert all(pair.look_up(key) for key in keys[::200])
    assert not any(pair.look_up(key) for key in absent)
    ours = threading.current_thread().name
    assert [each for each in heard if each[0] == ours] == [], "I/O on the scheduler's thread"
    assert [each for each in heard if each[1] in _LISTINGS] == []

    # That silence means something: what does list is heard.
    walk(FolderUpkeep(str(many), None, None))
    assert {each[1] for each in heard} & set(_LISTINGS)


def test_in_steady_state_the_upkeep_takes_less_than_a_hundredth_of_a_core(many: Path) -> None:
    """Its own clock says so, whatever else runs on the machine."""
    store = FolderStore(many, NAMESPACE, capacity_bytes=10_000_000, pace=Pace(urgent_share=1.0, period_s=0.01))
    closing = threading.Event()
    thread = threading.Thread(target=store.maintain, args=(closing,))
    thread.start()
    poll_until(lambda: bool(store._upkeep._candidates))  # the first walk, made quick, is over
    assert store._upkeep.total_bytes == 1_000_000
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    begin_s, cpu_s = time.monotonic(), time.clock_gettime(clock)
    time.sleep(2.0)
    share = (time.clock_gettime(clock) - cpu_s) / (time.monotonic() - begin_s)
    store.close()
    thread.join()
    assert 0 < share < 0.01


def test_a_timed_out_save_does_not_become_visible(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, NAMESPACE)
    polls = iter([False, False, True])  # before each of two chunks, and before the rename
    embeds = torch.zeros(2 * CHUNK_BYTES // 4096, 1024, dtype=torch.float32)
    with pytest.raises(AbandonedError):
        store.write("0" * 64, SaveSource(embeds, lambda: next(polls)))
    assert next(polls, None) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_consumers_and_schedulers_run_no_upkeep(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path, ECRole.CONSUMER))
    assert pair.worker._maintenance is None
    assert pair.scheduler.side is ECSide.SCHEDULER
    assert pair.scheduler._maintenance is None
