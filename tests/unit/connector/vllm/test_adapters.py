"""Adapters are told apart by their bytes, and never named as something that they may not be any more."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from kvservice.connector.vllm import lora
from kvservice.connector.vllm.lora import RETRY_SECONDS, Adapters
from kvservice.testing.eventually import eventually
from tests.unit.connector.vllm.test_connector import BLOCK, Pair, StepOutput, adapted, blocks, make, model, wait_for

__all__ = ["make", "model"]  # fixtures
LORA = LoRAConfig(max_lora_rank=8)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def adapters(clock: Clock) -> Iterator[Adapters]:
    made = Adapters(lambda path: Path(path) if Path(path).is_dir() else None, clock, files_stay=True)
    yield made
    made.close()


def adapter(folder: Path, weights: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def adapter_of_no_time(folder: Path, weights: bytes) -> str:
    path = adapter(folder, weights)
    for file in folder.iterdir():
        os.utime(file, ns=(0, 0))
    return path


def test_one_other_byte_is_another_adapter(adapters: Adapters, tmp_path: Path) -> None:
    """Equal bytes are one adapter."""
    weights = bytes(3 << 20)
    paths = [
        adapter(tmp_path / "a", weights),
        adapter(tmp_path / "b", weights),
        adapter(tmp_path / "c", weights[:-1] + b"\x01"),
        adapter(tmp_path / "d", weights[: 1 << 20] + b"\x01" + weights[(1 << 20) + 1 :]),
    ]
    a, b, c, d = (eventually(lambda path=path: adapters.of(path), "the digest of an adapter") for path in paths)
    assert a == b
    assert len({a, c, d}) == 3


def test_the_first_request_does_not_wait_for_the_reading(clock: Clock, tmp_path: Path) -> None:
    path, may_read = adapter(tmp_path / "a", b"weights"), threading.Event()
    adapters = Adapters(lambda found: Path(found) if may_read.wait(30) else None, clock, files_stay=True)
    assert adapters.of(path) is None
    assert adapters.counters["adapter_unknown"] == 1
    may_read.set()
    assert eventually(lambda: adapters.of(path), "the digest of the adapter")
    adapters.close()


def test_an_adapter_whose_files_changed_has_no_name_any_more(adapters: Adapters, tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", b"old")
    assert eventually(lambda: adapters.of(path), "the digest of the adapter")
    adapter(tmp_path / "a", b"newer")
    eventually(lambda: adapters.of(path) is None, "the refusal")
    adapter(tmp_path / "a", b"old")
    assert adapters.of(path) is None, "the engine may have loaded either"
    assert adapters.counters["adapter_changed"] > 0


def test_new_bytes_with_the_size_and_mtime_of_the_old(adapters: Adapters, tmp_path: Path) -> None:
    """As archives unpack them whose times are all equal. Training again does not change the size."""
    path = adapter_of_no_time(tmp_path / "a", b"old")
    assert eventually(lambda: adapters.of(path), "the digest of the adapter")
    adapter_of_no_time(tmp_path / "a", b"new")
    assert adapters.of(path) is None


def test_the_same_bytes_under_a_new_ctime_keep_their_name(adapters: Adapters, tmp_path: Path) -> None:
    """Whoever mounts a volume may give all its files an owner again."""
    path = adapter(tmp_path / "a", b"old")
    known = eventually(lambda: adapters.of(path), "the digest of the adapter")
    before = lora.stamp_of(tmp_path / "a")
    eventually(lambda: _has_new_ctimes(tmp_path / "a", before), "a later time of the file system")
    assert eventually(lambda: adapters.of(path), "the name again") == known
    assert not adapters.counters["adapter_changed"]


def _has_new_ctimes(folder: Path, before: lora.Stamp) -> bool:
    for each in folder.iterdir():
        each.chmod(0o600)
    return lora.stamp_of(folder) != before


def test_the_first_request_after_a_change_has_no_earlier_name(adapters: Adapters, tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", b"old")
    assert eventually(lambda: adapters.of(path), "the digest of the adapter")
    adapter(tmp_path / "a", b"newer")
    assert adapters.of(path) is None, "the engine may have loaded the new ones just before"


def test_a_look_that_hangs_leaves_requests_without_a_name(clock: Clock, tmp_path: Path) -> None:
    path, may_look = adapter(tmp_path / "a", b"weights"), threading.Event()
    may_look.set()
    adapters = Adapters(lambda found: Path(found) if may_look.wait(30) else None, clock, files_stay=True)
    known = eventually(lambda: adapters.of(path), "the digest of the adapter")
    may_look.clear()
    assert adapters.of(path) is None
    assert adapters.of(path) is None
    may_look.set()
    assert eventually(lambda: adapters.of(path), "the name again") == known
    adapters.close()


def test_a_disk_that_hangs_stops_the_engine_once_for_all(clock: Clock, tmp_path: Path) -> None:
    paths, may_look = [adapter(tmp_path / str(number), b"weights") for number in range(10)], threading.Event()
    may_look.set()
    adapters = Adapters(lambda found: Path(found) if may_look.wait(30) else None, clock, files_stay=True)
    for path in paths:
        eventually(lambda path=path: adapters.of(path), "the digest of an adapter")
    may_look.clear()
    began = time.monotonic()
    assert [adapters.of(path) for path in paths] == [None] * 10
    took = time.monotonic() - began
    may_look.set()
    adapters.close()
    assert took < 5 * lora.LOOK_WAIT_SECONDS, f"ten requests waited {took:.1f} s"


def test_an_adapter_that_vanished_has_no_name_any_more(adapters: Adapters, tmp_path: Path, clock: Clock) -> None:
    path = adapter(tmp_path / "a", b"old")
    assert eventually(lambda: adapters.of(path), "the digest of the adapter")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()

    def is_refused() -> bool:
        clock.now += RETRY_SECONDS
        return adapters.of(path) is None

    eventually(is_refused, "the refusal")


def test_an_adapter_that_comes_later_is_found(adapters: Adapters, tmp_path: Path, clock: Clock) -> None:
    path = str(tmp_path / "a")

    def look() -> object:
        clock.now += RETRY_SECONDS
        return adapters.of(path)

    for _ in range(20):
        assert look() is None
        time.sleep(0.005)
    adapter(tmp_path / "a", b"weights")
    assert len(eventually(look, "the digest of the adapter that came")) == 32


def test_adapter_used_longest_ago_makes_room_and_is_read_again(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "ADAPTERS_MAX", 2)
    adapters = Adapters(Path, clock, files_stay=True)
    paths = {number: adapter(tmp_path / str(number), b"weights %d" % number) for number in (1, 2, 3)}

    def identity(number: int) -> bytes:
        return eventually(lambda: adapters.of(paths[number], number), f"the digest of adapter {number}")

    assert len({identity(number) for number in (1, 2, 3)}) == 3
    assert adapters.of(paths[1], 1) is None, "forgotten"
    assert identity(1) == lora.identity_of(Path(paths[1]))
    adapters.close()


@pytest.mark.parametrize("reload", ["same path", "other path"])
@pytest.mark.parametrize(("offload", "stored"), [("eager", 1), ("lazy", 0)])
def test_what_is_computed_after_a_reload_is_not_stored(
    make: Callable[..., Pair], tmp_path: Path, reload: str, offload: str, stored: int
) -> None:
    pair, ids = make({"adapter_files": "immutable", "offload": offload}), [3, 1, 4, 9]
    for name in ("old", "new"):
        path = adapter(tmp_path / name, name.encode())
        eventually(lambda path=path: pair.scheduler._adapters.of(path), f"the digest of {name}")
    running, later = adapted("a", tmp_path / "old"), adapted("b", tmp_path / "new")
    pair.scheduler.on_new_request(running)
    assert pair.match(running) == (0, False)
    pair.scheduler.update_state_after_alloc(running, blocks(ids), 0)
    pair.step(StepOutput({"a": BLOCK}, {"a": 0}, {"a": ids}))
    running.num_computed_tokens = BLOCK
    wait_for(pair, "stored_blocks", stored)
    if reload == "same path":
        adapter(tmp_path / "old", b"other weights")
    else:
        later.lora_request.lora_int_id = running.lora_request.lora_int_id
        pair.scheduler.on_new_request(later)
    pair.step(StepOutput({"a": 2 * BLOCK}, {}, {"a": ids}))
    running.num_computed_tokens = 3 * BLOCK
    pair.finish(running, ids)
    pair.step(StepOutput())
    assert pair.scheduler.counters().get("store_blocks_planned", 0) == stored


def test_a_running_request_stores_nothing_after_a_load(make: Callable[..., Pair], tmp_path: Path) -> None:
    """vLLM loads another path in place under the same number, before any request gives that path."""
    pair, ids, number = make({"adapter_files": "immutable"}, lora_config=LORA), [3, 1, 4, 9], 7
    path, other = adapter(tmp_path / "old", b"old"), adapter(tmp_path / "new", b"new")
    eventually(lambda: pair.scheduler._adapters.of(path), "the digest of the old one")
    running = adapted("a", tmp_path / "old")
    running.lora_request.lora_int_id = number
    load(path, number)
    pair.scheduler.on_new_request(running)
    assert pair.match(running) == (0, False)
    pair.scheduler.update_state_after_alloc(running, blocks(ids), 0)
    pair.step(StepOutput({"a": BLOCK}, {"a": 0}, {"a": ids}))
    running.num_computed_tokens = BLOCK
    wait_for(pair, "stored_blocks", 1)
    load(other, number)
    pair.step(StepOutput({"a": BLOCK}, {}, {"a": ids}))  # planned before the scheduler knows
    running.num_computed_tokens = 2 * BLOCK
    wait_for(pair, "store_blocks_void", 1)
    pair.step(StepOutput({"a": BLOCK}, {}, {"a": ids}))
    running.num_computed_tokens = 3 * BLOCK
    pair.finish(running, ids)
    pair.step(StepOutput())
    assert pair.scheduler.counters()["store_blocks_planned"] == 2
    assert pair.scheduler.counters()["stored_blocks"] == 1


def test_of_two_loads_in_one_step_the_last_counts(make: Callable[..., Pair], tmp_path: Path) -> None:
    """A server without requests loads an adapter, and then another path in place."""
    pair, ids, number = make({"adapter_files": "immutable"}, lora_config=LORA), [3, 1, 4, 9], 7
    first, last = adapter(tmp_path / "first", b"first"), adapter(tmp_path / "last", b"last")
    eventually(lambda: pair.scheduler._adapters.of(last), "the digest of the adapter")
    load(first, number)
    load(last, number)
    running = adapted("a", tmp_path / "last")
    running.lora_request.lora_int_id = number
    pair.scheduler.on_new_request(running)
    assert pair.match(running) == (0, False)
    pair.scheduler.update_state_after_alloc(running, blocks(ids), 0)
    pair.step(StepOutput({"a": BLOCK}, {"a": 0}, {"a": ids}))
    wait_for(pair, "stored_blocks", 1)
    assert not pair.scheduler.counters().get("adapter_ambiguous")


def load(path: str, number: int) -> None:
    """As a worker of vLLM does. There is no model that could take the adapter."""
    with contextlib.suppress(AttributeError):
        WorkerLoRAManager._load_adapter(SimpleNamespace(), LoRARequest("x", number, path))


def test_looks_before_stores_leave_time_for_new_requests(make: Callable[..., Pair], tmp_path: Path) -> None:
    """On a slow disk. A block may be stored in a later step, and a request is named once."""
    pair, path, ids = make({"adapter_files": "immutable"}), adapter(tmp_path / "a", b"weights"), [3, 1, 4, 9]
    adapters = pair.scheduler._adapters
    known = eventually(lambda: adapters.of(path), "the digest of the adapter")
    looks = 0

    def slowly(found: str) -> Path:
        nonlocal looks
        looks += 1
        time.sleep(lora.LOOK_KEPT_SECONDS / 5)
        return Path(found)

    adapters._locate = slowly
    running = adapted("a", tmp_path / "a")
    pair.scheduler.on_new_request(running)
    pair.scheduler.update_state_after_alloc(running, blocks(ids), 0)
    pair.step(StepOutput({"a": BLOCK}, {"a": 0}, {"a": ids}))
    for _ in range(20):
        pair.step(StepOutput({"a": 2}, {}, {"a": ids}))
    assert looks < 20, "a step without a look stores nothing"
    eventually(lambda: (work := adapters._adapters.get(path).work) is None or work.done(), "the end of the last look")
    assert adapters.of(path) == known
