"""Pools in this process: what put and get say, how long a view lives, and what a wrong use gets."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvservice
from kvservice import InvalidRequest, Layout
from kvservice.api.reasons import WORDS
from kvservice.core.messages import AcquireResult, MissReason, SealStatus
from kvservice.core.segment.refs import BlockRef
from kvservice.testing.eventually import eventually
from kvservice.units import Generation, KiB, MiB

LAYOUT = Layout(block_tokens=4, shape=(2, 5))  # no multiple of a page, so that a window has gaps
LARGE = Layout(block_tokens=4, shape=(64 * KiB,), dtype="uint8")


@pytest.fixture(scope="module")
def pool() -> Iterator[kvservice.Pool]:
    with kvservice.connect("embedded", memory=8 * MiB) as made:
        yield made


@pytest.fixture
def cache(pool: kvservice.Pool) -> Iterator[kvservice.Cache]:
    with pool.attach(os.urandom(4).hex(), LAYOUT, verify="full") as made:
        yield made


def some(count: int, layout: Layout = LAYOUT) -> Any:
    return np.random.default_rng(count).random((count, *layout.shape)).astype(layout.numpy_type)


def leases(pool: kvservice.Pool) -> int:
    runtime = pool._thread._runtime
    assert runtime is not None
    return runtime.state.lease_count


def test_a_hit_is_the_longest_stored_prefix(cache: kvservice.Cache) -> None:
    blocks = some(3)
    assert cache.put(range(12), blocks) == kvservice.PutResult(3, 0, 0)
    with cache.get([*range(12), 99, 98, 97, 96, 95]) as hit:
        assert (len(hit), hit.tokens, hit.miss, hit.fetched) == (3, 12, "never_stored", 0)
        assert np.array_equal(hit.view, blocks) and np.array_equal(hit.tensor().numpy(), blocks)
    with cache.get([0, 1, 2, 3, 9, 9, 9, 9]) as hit:
        assert hit.tokens == 4 and np.array_equal(hit.copy(), blocks[:1])


def test_explain_says_what_is_here_and_why_no_more(cache: kvservice.Cache) -> None:
    cache.put(range(8), some(2))
    assert cache.get(range(8)).explain().endswith("None is missing.")
    hit = cache.get(range(12), start=1, request_id="r9")
    assert "Found 1 block from block 1 on, 0 of them" in hit.explain()
    assert "Block 2 is missing: no node is known to have it." in hit.explain() and "pool.explain('r9')" in hit.explain()


def test_every_reason_has_words_and_stands_on_the_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "python.md").read_text()
    assert set(WORDS) == {reason.value for reason in MissReason} - {"none"} | {"too_long", "unavailable"}
    assert [reason for reason in WORDS if f"`{reason}`" not in page] == []


def test_a_part_of_a_block_is_neither_stored_nor_found(cache: kvservice.Cache) -> None:
    cache.put(range(7), some(1))
    assert cache.get(range(7)).tokens == 4
    assert cache.get(range(3)).miss == "" and not cache.get(range(3))
    assert cache.warm(range(3)) == 0
    assert len(cache.get(range(3), request_id="x" * 10_000).request_id) < 1000
    with pytest.raises(InvalidRequest, match="whole blocks"):
        cache.put(range(7), some(2))


def test_start_leaves_out_the_blocks_that_the_caller_has(cache: kvservice.Cache) -> None:
    blocks = some(4)
    assert cache.put(range(16), blocks[:2]).stored == 2
    assert cache.put(range(16), blocks[2:], start=2).stored == 2
    with cache.get(range(16), start=3) as hit:
        assert (hit.start, len(hit), hit.tokens) == (3, 1, 16) and np.array_equal(hit.view, blocks[3:])
    assert cache.get(range(16), start=4).tokens == 16
    for start in (-1, 5):
        with pytest.raises(InvalidRequest, match="start"):
            cache.get(range(16), start=start)
        with pytest.raises(InvalidRequest):
            cache.put(range(16), some(1), start=start)


def test_a_put_of_what_is_there_changes_nothing(cache: kvservice.Cache) -> None:
    first = some(2)
    cache.put(range(8), first)
    assert cache.put(range(8), first + 1) == kvservice.PutResult(0, 2, 0)
    assert np.array_equal(cache.get(range(8)).copy(), first)


def test_a_put_into_a_full_pool_stores_a_prefix(pool: kvservice.Pool) -> None:
    """What hits hold cannot be evicted."""
    with pool.attach("large", LARGE) as cache:
        count = 200
        result = cache.put(range(4 * count), some(count, LARGE))
        assert 0 < result.stored < count and result.dropped == count - result.stored and result.reason == "full"
        with cache.get(range(4 * count)) as hit:
            assert len(hit) == result.stored
            other = cache.put([7] * 4 * count, some(count, LARGE))
            assert (other.stored + other.dropped, other.reason) == (count, "full")
        eventually(lambda: cache.put([8] * 4, some(1, LARGE)).is_complete, "room again")


@pytest.mark.parametrize(
    "form", [torch.from_numpy, list, lambda a: [torch.from_numpy(x) for x in a], np.asfortranarray]
)
def test_every_form_of_blocks_is_stored(cache: kvservice.Cache, form: Any) -> None:
    blocks = some(3)
    assert cache.put(range(12), form(blocks)).stored == 3
    assert np.array_equal(cache.get(range(12)).copy(), blocks)


def test_a_salt_separates_equal_prompts(cache: kvservice.Cache) -> None:
    cache.put(range(8), some(2), salt="a")
    assert [cache.get(range(8), salt=salt).tokens for salt in ("", "a", "b")] == [0, 8, 0]


def test_equal_programs_of_two_namespaces_share_nothing(pool: kvservice.Pool) -> None:
    with pool.attach("m", LAYOUT, namespace="a") as one, pool.attach("m", LAYOUT, namespace="b") as other:
        assert one.put(range(8), some(2)).stored == 2
        with one.get(range(8)) as mine, other.get(range(8)) as theirs:
            assert (mine.tokens, theirs.tokens) == (8, 0)


def test_a_view_ends_with_its_hit(cache: kvservice.Cache) -> None:
    cache.put(range(8), some(2))
    with cache.get(range(8)) as hit:
        view, part, tensor = hit.view, hit.view[1, 1:], hit.tensor()
        assert not np.isnan(view).any()
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0
        tensor[0] = 5  # into this process's memory
        assert not np.array_equal(view[0], some(2)[0])
    assert np.isnan(view).all() and np.isnan(part).all() and tensor.isnan().all()
    assert not np.isnan(cache.get(range(8)).copy()).any()
    for use in (lambda: hit.view, hit.tensor, hit.copy, hit.check):
        with pytest.raises(InvalidRequest, match="closed"):
            use()
    hit.close()


@pytest.mark.parametrize("end", ["close", "__del__"])
def test_a_copy_of_a_hit_that_has_ended_is_closed(cache: kvservice.Cache, end: str) -> None:
    """It read whatever lay in the program's own memory, and its check passed."""
    cache.put(range(8), some(2))
    hit = cache.get(range(8))
    other = copy.copy(hit)
    if end == "close":
        hit.close()
    del hit
    gc.collect()
    for read in (other.copy, other.tensor, lambda: other.view):
        with pytest.raises(InvalidRequest, match="this hit is closed"):
            read()


def test_a_hit_that_nobody_keeps_gives_its_blocks_back(pool: kvservice.Pool, cache: kvservice.Cache) -> None:
    cache.put(range(8), some(2))
    hit = cache.get(range(8))
    view = hit.view
    assert leases(pool) == 1
    del hit
    gc.collect()
    eventually(lambda: leases(pool) == 0, "no lease")
    assert np.isnan(view).all()


def test_an_error_inside_the_with_is_not_covered(cache: kvservice.Cache, pool: kvservice.Pool) -> None:
    cache.put(range(8), some(2))
    with pytest.raises(KeyError), cache.get(range(8)) as hit:
        raise KeyError(len(hit))
    eventually(lambda: leases(pool) == 0, "no lease")


def test_copy_to_refuses_another_shape_or_type(cache: kvservice.Cache, pool: kvservice.Pool) -> None:
    cache.put(range(8), some(2))
    with cache.get(range(8)) as hit:
        target = torch.zeros((2, 2, 5))
        hit.copy_to(target)
        assert np.array_equal(target.numpy(), some(2))
        for other in (np.zeros((3, 2, 5), "f4"), np.zeros((2, 2, 5), "i4"), torch.zeros((2, 2, 5)).half()):
            with pytest.raises(InvalidRequest, match="the hit is"):
                hit.copy_to(other)
        with pytest.raises(InvalidRequest, match="only for reading"):
            hit.copy_to(hit.view)
    with pool.attach("bits", Layout(4, (3,), "bfloat16")) as stood_for:
        stood_for.put(range(4), torch.ones((1, 3), dtype=torch.bfloat16))
        with stood_for.get(range(4)) as hit, pytest.raises(InvalidRequest, match="of uint16, the target"):
            hit.copy_to(np.zeros((1, 3), "f4"))  # would be 16256.0


@pytest.mark.parametrize("kind", ["bool", "complex64", "complex128", "uint64", "float8_e5m2"])
def test_blocks_come_back_as_tensors_of_their_type(pool: kvservice.Pool, kind: str) -> None:
    layout = Layout(4, (2, 3), kind)
    tensor = torch.arange(-6, 6).reshape(2, 2, 3).to(getattr(torch, kind))
    with pool.attach(kind, layout) as cache:
        cache.put(range(8), tensor)
        with cache.get(range(8)) as hit:
            assert hit.tensor().dtype is tensor.dtype
            assert torch.equal(hit.tensor().to(torch.complex128), tensor.to(torch.complex128))


def test_a_tensor_that_only_says_it_is_conjugate_is_stored_so(pool: kvservice.Pool) -> None:
    tensor = torch.randn((2, 3), dtype=torch.complex64)
    for name, given in (("conj", tensor.conj()), ("neg", tensor.conj().imag)):
        with pool.attach(name, Layout(4, (3,), given.dtype)) as cache:
            cache.put(range(8), given)
            assert np.array_equal(cache.get(range(8)).copy(), given.numpy(force=True))


def test_bfloat16_comes_back_as_bfloat16(pool: kvservice.Pool) -> None:
    with pool.attach("bf16", Layout(4, (3,), "bfloat16")) as cache:
        tensor = torch.tensor([[1.5, -2.0, 3.0]], dtype=torch.bfloat16)
        cache.put(range(4), tensor)
        with cache.get(range(4)) as hit:
            assert hit.tensor().dtype is torch.bfloat16 and hit.view.dtype == np.uint16
            assert torch.equal(hit.tensor(), tensor)
            held = hit.tensor()
        assert held.isnan().all()


def test_damaged_memory_is_a_miss_when_digests_are_checked(cache: kvservice.Cache) -> None:
    cache.put(range(12), some(3))
    with cache.get(range(12)) as hit:
        assert hit._held is not None
        segment, slot = hit._held.watch._segment, hit._held.watch._slots[1]
        segment.payload(slot, LAYOUT.block_bytes)[3] ^= 1
    with cache.get(range(12)) as hit:
        assert (len(hit), hit.miss) == (1, "corrupt")
    eventually(lambda: cache.get(range(12)).miss == "never_stored", "the pool gives the damaged block up")
    assert cache.put(range(12), some(3)) == kvservice.PutResult(stored=1, present=2, dropped=0, reason="")
    with cache.get(range(12)) as hit:
        assert len(hit) == 3


def test_a_damaged_header_is_a_miss_until_it_is_written_again(cache: kvservice.Cache) -> None:
    cache.put(range(12), some(3))
    with cache.get(range(12)) as hit:
        assert hit._held is not None
        segment, slot = hit._held.watch._segment, hit._held.watch._slots[1]
        header = segment.buffer[segment.geometry.header_offset(slot) :]
    header[0] ^= 1
    assert cache.get(range(12)).tokens == 4
    eventually(lambda: cache.get(range(12)).tokens == 12, "the pool makes the digest anew and keeps the block")
    with cache.get(range(12)) as hit:
        assert np.array_equal(hit.view, some(3))


def test_only_leading_blocks_count_as_stored(cache: kvservice.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block behind one that was not sealed may be there, but nobody is told so."""
    session = cache._attached._program.session

    async def store(*_: object) -> list[SealStatus]:
        return [SealStatus.SEALED, SealStatus.STALE, SealStatus.SEALED]

    monkeypatch.setattr(session, "store", store)
    assert cache.put(range(12), some(3)).stored == 1


def test_another_layout_of_one_model_is_refused_by_name(pool: kvservice.Pool, cache: kvservice.Cache) -> None:
    with pytest.raises(kvservice.FingerprintMismatch, match=r"shape: \(3,\).*\(2, 5\)"):
        pool.attach(cache.model, Layout(4, (3,)))
    with pytest.raises(kvservice.FingerprintMismatch, match=r"identity\.weights"):
        pool.attach(cache.model, LAYOUT, identity={"weights": "step-2"})
    pool.attach(cache.model, Layout(4, (3,)), namespace="other").close()


def test_equal_caches_share_blocks_and_others_do_not(pool: kvservice.Pool, cache: kvservice.Cache) -> None:
    cache.put(range(8), some(2))
    with pool.attach(cache.model, LAYOUT) as same, pool.attach("another", LAYOUT) as other:
        assert (same.get(range(8)).tokens, other.get(range(8)).tokens) == (8, 0)


def test_what_is_closed_says_so() -> None:
    pool = kvservice.connect("embedded", memory=8 * MiB)
    cache = pool.attach("m", LAYOUT)
    cache.put(range(8), some(2))
    hit, left = cache.get(range(8)), pool.attach("left", LAYOUT)
    left.close()
    assert not left.is_attached and left.get(range(8)).miss == "unavailable"
    assert left.put(range(8), some(2)) == kvservice.PutResult(0, 0, 2, "unavailable")
    pool.close()
    pool.close()
    cache.close()
    assert np.array_equal(hit.copy(), some(2))  # the memory is this program's until the hit is closed
    hit.close()
    for use in (lambda: cache.get(range(8)), lambda: cache.put(range(8), some(2)), lambda: pool.attach("m", LAYOUT)):
        with pytest.raises(InvalidRequest, match="closed"):
            use()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "nowhere"}, "mode"),
        ({"mode": "embedded", "socket": "/x"}, "embedded"),
        ({"mode": "embedded", "memory": "1KiB"}, "memory"),
        ({"mode": "embedded", "memory": "8MiB", "eviction": "no-such"}, "no-such"),
    ],
)
def test_connect_names_the_wrong_argument(arguments: dict[str, Any], said: str) -> None:
    before = threading.active_count()
    with pytest.raises(kvservice.ConfigError, match=said):
        kvservice.connect(**arguments)
    assert threading.active_count() == before


def test_a_program_is_told_no_option_of_an_engine() -> None:
    with pytest.raises(kvservice.ConfigError, match="at least 4") as found:
        kvservice.connect("embedded", memory=0)
    assert "--" not in found.value.message


@pytest.mark.parametrize("kind", [str, Path])
def test_without_a_shard_service_mode_is_unavailable(tmp_path: Path, kind: type[str | Path]) -> None:
    before = threading.active_count()
    with pytest.raises(kvservice.Unavailable, match="kvservice up"):
        kvservice.connect("service", socket=kind(tmp_path / "no.sock"), token_file=kind(tmp_path / "token"))
    assert threading.active_count() == before


def test_a_disk_may_be_named_by_a_path(tmp_path: Path) -> None:
    disk = tmp_path / "blocks"
    with kvservice.connect("embedded", memory="8MiB", disk_path=disk, disk_bytes="8MiB") as pool:
        assert pool.attach("m", LAYOUT).is_attached
    assert disk.is_dir()


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("get", {"timeout": -1}),
        ("get", {"timeout": float("nan")}),
        ("get", {"timeout": None}),
        ("get", {"timeout": 10**400}),
        ("get", {"start": 3}),
        ("get", {"start": 8 / 4}),
        ("get", {"salt": "\ud800"}),
        ("get", {"salt": b"salt"}),
        ("get", {"request_id": 1}),
        ("warm", {"hold": None}),
        ("warm", {"hold": "1"}),
    ],
)
def test_a_wrong_argument_is_refused_and_harms_nothing(
    cache: kvservice.Cache, call: str, arguments: dict[str, Any]
) -> None:
    """A pool in this process has no wire that would refuse it first."""
    with pytest.raises(InvalidRequest):
        getattr(cache, call)(range(8), **arguments)
    assert cache.put(range(8), some(2)).is_complete


@pytest.mark.parametrize(
    "identity", ["step-1", {"weights": object()}, {"code": [test_a_hit_is_the_longest_stored_prefix]}]
)
def test_an_identity_that_no_other_process_repeats_is_refused(pool: kvservice.Pool, identity: Any) -> None:
    """It would share blocks with nobody, and nobody would notice."""
    with pytest.raises(InvalidRequest, match="identity"):
        pool.attach(os.urandom(4).hex(), LAYOUT, identity=identity)
    with pool.attach(os.urandom(4).hex(), LAYOUT, identity={"dtype": torch.float16, "step": 1, "code": None}) as cache:
        assert cache.is_attached


@pytest.mark.parametrize(
    "value",
    [np.arange(2000), np.arange(2), torch.tensor([0.12345678]), [{"scales": np.arange(2000)}], {"a", "b"}, [{"a"}]],
)
def test_an_identity_whose_text_is_not_all_of_it_is_refused(pool: kvservice.Pool, value: Any) -> None:
    """NumPy and torch leave out numbers and digits, so that other weights would have one name."""
    with pytest.raises(InvalidRequest, match=r"identity\.weights is an? (array|set)"):
        pool.attach(os.urandom(4).hex(), LAYOUT, identity={"weights": value})
    told = {"scale": np.float32(0.1), "sizes": (1, 2), "rope": {"theta": 1e4}}
    with pool.attach(os.urandom(4).hex(), LAYOUT, identity=told) as cache:
        assert cache.is_attached


def test_bits_of_a_foreign_type_are_not_copied_as_numbers(pool: kvservice.Pool) -> None:
    layout = Layout(block_tokens=4, shape=(2, 5), dtype="bfloat16")
    ones = torch.ones((1, 2, 5), dtype=torch.bfloat16)
    with pool.attach(os.urandom(4).hex(), layout) as cache:
        cache.put(range(4), ones)
        with cache.get(range(4)) as hit:
            with pytest.raises(InvalidRequest, match="uint16"):
                hit.copy_to(np.empty((1, 2, 5), "float32"))
            with pytest.raises(InvalidRequest, match="list"):
                hit.copy_to([1.0])  # type: ignore[arg-type]
            bits = np.empty((1, 2, 5), "uint16")
            hit.copy_to(bits)
            assert bits.tobytes() == ones.view(torch.int16).numpy().tobytes()


def test_a_request_id_that_is_no_text_is_refused(pool: kvservice.Pool) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        pool.explain(3)  # type: ignore[arg-type]


def test_a_program_without_logging_reads_the_reason_of_a_warning() -> None:
    """Python itself would print the name of the event alone."""
    program = (
        "import logging, kvservice\n"
        "kvservice.connect('embedded', memory='8MiB').close()\n"
        "logging.getLogger('kvservice.pool').warning('tier_unusable', extra={'reason': '/proc/none'})\n"
    )
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "tier_unusable" in plain.stderr and "/proc/none" in plain.stderr, plain.stderr
    own = f"import logging\nlogging.basicConfig(format='mine %(message)s')\n{program}"
    said = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, check=True, timeout=60).stderr
    assert said == "mine tier_unusable\n"


@pytest.mark.parametrize("name", ["\ud800", 5, "x" * 513, ""])
def test_a_model_or_namespace_that_is_no_name_is_refused(pool: kvservice.Pool, name: Any) -> None:
    with pytest.raises(InvalidRequest):
        pool.attach(name, LAYOUT)
    if name:
        with pytest.raises(InvalidRequest):
            pool.attach("m", LAYOUT, namespace=name)
    with pytest.raises(InvalidRequest):
        pool.attach("m", LAYOUT, identity={"weights": "\ud800"})


def test_what_belongs_to_a_process_is_not_sent_to_another(pool: kvservice.Pool, cache: kvservice.Cache) -> None:
    cache.put(range(8), some(2))
    with cache.get(range(8)) as hit:
        for own, said in ((pool, "connect"), (cache, "connect"), (hit, "copy")):
            with pytest.raises(InvalidRequest, match=said):
                copy.deepcopy(own)  # as multiprocessing does


def test_a_pool_and_a_cache_say_what_they_are() -> None:
    pool = kvservice.connect("embedded", memory=8 * MiB)
    cache = pool.attach("m", LAYOUT)
    assert (repr(pool), repr(cache)) == ("Pool(embedded)", "Cache('m', attached)")
    pool.close()
    assert (repr(pool), repr(cache)) == ("Pool(embedded, closed)", "Cache('m', not attached)")


def test_threads_share_one_cache(cache: kvservice.Cache) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            tokens = [number, turn, 0, 0] * 3
            blocks = some(3) + number
            cache.put(tokens, blocks)
            if not np.array_equal(cache.get(tokens).copy(), blocks):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


async def test_async_calls_are_the_same(pool: kvservice.Pool) -> None:
    async with await kvservice.connect_async("embedded", memory=8 * MiB) as own:
        assert own.mode == "embedded"
        async with await own.attach("m", LAYOUT) as cache:
            assert (cache.model, cache.layout, cache.is_attached) == ("m", LAYOUT, True)
            blocks = some(2)
            put, other = await asyncio.gather(cache.put(range(8), blocks), cache.put([9] * 4, some(1)))
            assert (put.stored, other.stored, await cache.warm(range(8))) == (2, 1, 8)
            async with await cache.get(range(8)) as hit:
                assert np.array_equal(hit.view, blocks)


async def test_a_cancelled_get_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await kvservice.connect_async("embedded", memory=8 * MiB) as pool:
        cache = await pool.attach("m", LAYOUT)
        await cache.put(range(8), some(2))
        runtime, answered = pool._thread._runtime, threading.Event()
        assert runtime is not None
        acquire = type(runtime).acquire

        async def slow(self: Any, *arguments: Any) -> AcquireResult:
            result = await acquire(self, *arguments)
            answered.set()
            return result

        monkeypatch.setattr(type(runtime), "acquire", slow)
        for _ in range(20):
            answered.clear()
            task = asyncio.create_task(cache.get(range(8)))
            await asyncio.to_thread(answered.wait, 5)
            task.cancel()
            await asyncio.wait([task])
            del task
        gc.collect()
        eventually(lambda: runtime.state.lease_count == 0, "no lease")


@pytest.mark.processes
def test_a_forked_child_is_told_to_connect_again(pool: kvservice.Pool, cache: kvservice.Cache) -> None:
    cache.put(range(8), some(2))
    hit = cache.get(range(8))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cache.get(range(8))
            said = "nothing"
        except InvalidRequest as error:
            said = f"{error.message}; attached: {cache.is_attached}"
        except BaseException as error:  # noqa: BLE001  the parent judges it
            said = repr(error)
        hit.close()
        cache.close()
        pool.close()
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1000).decode().endswith("connect() again after a fork; attached: False")
    assert leases(pool) == 1 and np.array_equal(hit.copy(), some(2))
    hit.close()
    os.close(reading)
    os.close(writing)


def test_a_promise_that_the_slots_do_not_keep_is_a_miss(
    cache: kvservice.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(range(12), some(3))
    session = cache._attached._program.session
    ask = session.ask

    async def late(*arguments: Any) -> AcquireResult:
        found = await ask(*arguments)
        first, second, third = found.blocks
        return replace(found, blocks=(first, second._replace(generation=Generation(second.generation + 2)), third))

    monkeypatch.setattr(session, "ask", late)
    with cache.get(range(12)) as hit:
        assert (len(hit), hit.miss) == (1, "stale") and np.array_equal(hit.view, some(3)[:1])


def test_a_slot_that_is_not_reserved_is_not_written(cache: kvservice.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(range(12), some(3))
    hit = cache.get(range(12))
    assert hit._held is not None
    of_others = [BlockRef(slot, Generation(3)) for slot in hit._held.watch._slots]

    async def reserve(*arguments: Any) -> list[BlockRef]:
        return of_others

    monkeypatch.setattr(cache._attached._program.session, "reserve", reserve)
    assert cache.put([9] * 12, some(3) + 1) == kvservice.PutResult(0, 0, 3, "unavailable")
    assert np.array_equal(hit.copy(), some(3))
    hit.close()


def test_a_pool_in_this_process_has_metrics_where_asked_for() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with kvservice.connect("embedded", memory=8 * MiB, metrics_port=port) as made:
        made.attach("m", LAYOUT).put(range(8), np.zeros((2, *LAYOUT.shape), "float32"))
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        assert re.search(r'kvservice_blocks_sealed_total{node="[0-9a-f]+",service="embedded"} 2.0', text)
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10).status == 200
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
