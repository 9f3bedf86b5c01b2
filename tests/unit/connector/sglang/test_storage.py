"""One rank's storage over a real pool: whole pages, prefixes, failures. SGLang's side is its interface in values."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from kvservice.api.pool_thread import PoolThread
from kvservice.api.program import AttachedProgram
from kvservice.connector.sglang import page_pool
from kvservice.connector.sglang import storage as storage_module
from kvservice.connector.sglang.clears import ClearTerms, agreed_name
from kvservice.connector.sglang.options import SGLangOptions
from kvservice.connector.sglang.pages import Ranks
from kvservice.connector.sglang.storage import ALL_LAYERS, TRAILING_PAGES, PageStorage
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment
from kvservice.errors import ConfigError, SegmentError
from kvservice.testing.eventually import eventually
from tests.unit.connector.sglang.host_memory import (
    KV,
    OPTIONS,
    PAGE,
    PROMPT,
    HostMemory,
    LatentMemory,
    page_hashes,
    places,
    storage,
    wanted,
)


def stored(memory: HostMemory, made: PageStorage, pages: list[str], numbers: list[int]) -> None:
    assert made.store([], wanted(pages, numbers)) == [True] * len(pages)


def test_pages_come_back_whole_at_other_places(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    before = memory.pages([0, 1, 2, 3, 4, 5])
    assert made.find(None, pages) == 6
    assert made.load([], wanted(pages, [15, 10, 11, 12, 13, 14])) == [True] * 6
    np.testing.assert_array_equal(memory.pages([15, 10, 11, 12, 13, 14]), before)
    assert made.counters["loaded_pages"] == 6
    assert made.counters["stored_pages"] == 6
    assert not [name for name in made.counters if name.startswith(("missed", "failed", "dropped"))]


def test_what_the_pool_does_not_want_is_not_stored(thread: PoolThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool says at a question that nothing like this prompt comes back. SGLang hears that all is done, because it
    warns of pages that fail. When the pool says otherwise, it is stored again."""
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    ask, is_wanted = AttachedProgram.ask, False

    async def answer(self: AttachedProgram, attachment: Attachment, request: AcquireRequest) -> AcquireResult | None:
        result = await ask(self, attachment, request)
        return None if result is None else replace(result, admitted=is_wanted)

    monkeypatch.setattr(AttachedProgram, "ask", answer)
    assert made.find(None, pages) == 0
    stored(memory, made, pages[:3], [0, 1, 2])
    assert made.store(pages[:3], wanted(pages[3:], [3, 4, 5])) == [True] * 3, "as SGLang goes on with a prompt"
    assert made.counters["dropped_not_admitted"] == 6 and not made.counters["stored_pages"]
    other = page_hashes([7, *PROMPT])
    stored(memory, made, other[:1], [6])
    assert made.counters["stored_pages"] == 1, "nobody asked for it, so nobody refused it"
    is_wanted = True
    assert made.find(None, pages) == 0
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    assert made.counters["stored_pages"] == 7


def test_counts_are_taken_once(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    assert made.take_counts() == {}
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    assert made.take_counts() == {"stored_pages": 6}
    made.find(None, pages[:2])
    assert made.take_counts() == {"asked_pages": 2, "found_pages": 2}


def test_a_prefix_ends_at_the_first_page_not_stored(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages[:2], [0, 1])
    assert made.store(pages[:3], wanted(pages[3:5], [3, 4])) == [True, True]
    assert made.find([], pages) == 2
    assert made.find(pages[:3], pages[3:]) == 2
    assert made.counters["missed_never_stored"] == 4 + 1
    other = page_hashes([7, *PROMPT])
    assert made.find([], other) == 0


def test_pages_behind_a_prefix_are_read_without_it(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    before = memory.pages([4, 5])
    assert made.find(pages[:4], pages[4:]) == 2
    assert made.load(pages[:4], wanted(pages[4:], [8, 9])) == [True, True]
    np.testing.assert_array_equal(memory.pages([8, 9]), before)


def test_pages_read_without_a_question_are_asked_for(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    before = memory.pages([2, 3])
    assert made.load(pages[:2], wanted(pages[2:4], [8, 9])) == [True, True]
    np.testing.assert_array_equal(memory.pages([8, 9]), before)
    assert made.counters["asked_again"] == 1


def test_a_page_that_is_missing_ends_what_is_loaded(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages[:3], [0, 1, 2])
    assert made.find([], pages) == 3
    assert made.load([], wanted(pages[:5], [8, 9, 10, 11, 12])) == [True, True, True, False, False]
    assert made.counters["load_failed"] == 2


def test_a_damaged_page_is_loaded_again_once_it_is_stored_again(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)[:3]
    made = storage(memory, thread=thread, verify_load="full")
    stored(memory, made, pages, [0, 1, 2])
    assert made.find(None, pages) == 3
    promise, number = made._pools[KV]._promised[pages[1]]
    slot = promise.results[0].blocks[number].slot
    promise.mapped._segment.payload(slot, promise.mapped._layout.block_bytes)[0] ^= 1
    assert made.load([], wanted(pages, [8, 9, 10])) == [True, False, False]
    eventually(lambda: made.find(None, pages) == 1, "the pool gives the damaged page up")
    stored(memory, made, pages, [0, 1, 2])
    assert made.find(None, pages) == 3
    assert made.load([], wanted(pages, [8, 9, 10])) == [True, True, True]


def test_what_is_never_read_is_given_back(thread: PoolThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "PROMISE_SECONDS", 0.05)
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    assert made.find([], pages) == 6
    (program,) = thread.attached
    leases = program.session._leases
    assert len(leases) == 1
    eventually(lambda: not leases, "the lease has ended")
    assert made.load([], wanted(pages[:1], [9])) == [True]  # asks again


def test_what_is_promised_again_is_held_once(thread: PoolThread) -> None:
    """SGLang asks for each request, and many begin with one prefix."""
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    for _ in range(5):
        assert made.find([], pages) == 6
    (program,) = thread.attached
    eventually(lambda: len(program.session._leases) == 1, "one lease")
    assert made.find([], pages[:2]) == 2
    eventually(lambda: len(program.session._leases) == 2, "a lease for the four pages behind")
    assert made.load([], wanted(pages, [8, 9, 10, 11, 12, 13])) == [True] * 6
    eventually(lambda: not program.session._leases, "the leases to end")


def test_pages_that_another_request_has_read_are_asked_for(thread: PoolThread) -> None:
    """Also in the middle: that request had the pages before them in its host memory already."""
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    before = memory.pages([0, 1, 2, 3, 4, 5])
    assert made.find([], pages) == 6 and made.find(pages[:2], pages[2:4]) == 2
    assert made.load(pages[:2], wanted(pages[2:4], [8, 9])) == [True] * 2
    assert made.load([], wanted(pages, [10, 11, 12, 13, 14, 15])) == [True] * 6
    np.testing.assert_array_equal(memory.pages([10, 11, 12, 13, 14, 15]), before)


def test_prompts_with_another_salt_share_nothing(thread: PoolThread) -> None:
    memory = HostMemory()
    made = storage(memory, thread=thread)
    stored(memory, made, page_hashes(PROMPT, "aa" * 32), [0, 1, 2, 3, 4, 5])
    assert made.find([], page_hashes(PROMPT)) == 0
    assert made.find([], page_hashes(PROMPT, "bb" * 32)) == 0
    assert made.find([], page_hashes(PROMPT, "aa" * 32)) == 6


def differing(one: PageStorage, other: PageStorage) -> set[str]:
    """The fields in which the names of their pages differ."""
    ours, theirs = (each._pools[KV]._program.fingerprint for each in (one, other))
    return {field.name for field in ours.differences(theirs)}


def test_other_weights_share_nothing(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    other = storage(HostMemory(), thread=thread, weights="b", namespace="beside")
    assert other.find([], pages) == 0 and "weights" in differing(made, other)
    alike = storage(HostMemory(), thread=thread)
    assert alike.find([], pages) == 6


def test_after_clear_nothing_of_before_is_found(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    made.clear()
    assert made.find([], pages) == 0
    stored(memory, made, pages[:2], [0, 1])
    assert made.find([], pages) == 2

    made.register("mamba", LatentMemory(), places([0]))
    assert made.store([], wanted(pages, [0, 1, 2, 3, 4, 5], "mamba")) == [True] * 6
    assert made.find_all([], pages, [wanted(pages[:2], [0, 1], "mamba")]).by_pool == {"kv": 2, "mamba": 2}


def test_a_clear_ends_what_was_promised(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    assert made.find([], pages) == 6
    (program,) = thread.attached
    made.clear()
    eventually(lambda: not program.session._leases, "the lease to end")
    assert made.load([], wanted(pages, [8, 9, 10, 11, 12, 13])) == [False] * 6


def test_a_clear_ends_a_question_under_way(thread: PoolThread, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    ask = AttachedProgram.ask

    async def clear_then_answer(
        self: AttachedProgram, attachment: Attachment, request: AcquireRequest
    ) -> AcquireResult | None:
        result = await ask(self, attachment, request)
        made.clear()
        return result

    with monkeypatch.context() as patched:
        patched.setattr(AttachedProgram, "ask", clear_then_answer)
        assert made.find([], pages) == 0
    assert made.counters["missed_never_stored"] == 6, "by the names that they have now"
    (program,) = thread.attached
    assert not program.session._leases
    assert made.load([], wanted(pages[:1], [8])) == [False]


def test_a_storage_attached_again_finds_nothing_cleared(thread: PoolThread) -> None:
    memory, pages, clears = HostMemory(), page_hashes(PROMPT), ClearTerms(b"an engine")
    made = storage(memory, thread=thread, clears=clears)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    made.clear()
    again = storage(HostMemory(), thread=thread, clears=clears)
    assert again.find([], pages) == 0
    stored(memory, again, pages[:2], [0, 1])
    again.clear()
    assert again.find([], pages) == 0


# -- ranks ----


def test_ranks_find_what_one_stores_after_a_clear(thread: PoolThread) -> None:
    """With MLA the first rank alone stores, and the engine loads what all ranks find."""
    memory, pages = LatentMemory(), page_hashes(PROMPT)

    def ranks_of(engine: bytes) -> list[PageStorage]:
        return [
            storage(memory, ranks=Ranks(number, 2, replicated=True), thread=thread, clears=ClearTerms(engine))
            for number in range(2)
        ]

    ranks, others = ranks_of(b"one start"), ranks_of(b"another start")
    stored(memory, ranks[0], pages, [0, 1, 2, 3, 4, 5])
    for rank in (*ranks, *others):
        rank.clear()
        assert rank.find([], pages) == 0
    stored(memory, ranks[0], pages[:3], [0, 1, 2])
    assert [rank.find([], pages) for rank in ranks] == [3, 3]
    assert [rank.find([], pages) for rank in others] == [0, 0], "each engine has other weights after its clear"
    for rank in ranks:
        rank.clear()
    assert [rank.find([], pages) for rank in ranks] == [0, 0]


def test_ranks_agree_on_a_name_over_their_group() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [server, TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)]
    names = [agreed_name(partial(PrefixStore, "default_pg", store)) for store in ranks]
    assert names[0] == names[1]
    assert agreed_name(HashStore) != agreed_name(HashStore), "another start"
    assert agreed_name() != agreed_name(), "no group, so each rank stands for itself"


@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 4), (1, 2), (2, 1)])
def test_engines_of_other_sizes_share_heads(thread: PoolThread, writers: int, readers: int) -> None:
    pages, whole = page_hashes(PROMPT[: 2 * PAGE]), HostMemory(4, heads=8)

    def rank(size: int, number: int, memory: HostMemory) -> PageStorage:
        return storage(memory, heads=8, ranks=Ranks(number, size), thread=thread, head_group=2)

    for number in range(writers):
        memory = HostMemory(4, heads=8 // writers)
        memory.kv[...] = np.split(whole.kv, writers, axis=4)[number]
        stored(memory, rank(writers, number, memory), pages, [0, 1])
    for number in range(readers):
        memory = HostMemory(4, heads=8 // readers, seed=9)
        made = rank(readers, number, memory)
        assert made.find([], pages) == 2
        assert made.load([], wanted(pages, [3, 2])) == [True, True]
        np.testing.assert_array_equal(memory.pages([3, 2]), np.split(whole.pages([0, 1]), readers, axis=4)[number])


def test_without_a_head_group_ranks_read_their_own_only(thread: PoolThread) -> None:
    pages, memory = page_hashes(PROMPT), HostMemory(heads=2)
    made = storage(memory, ranks=Ranks(0, 2), thread=thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    assert storage(HostMemory(heads=2), ranks=Ranks(0, 2), thread=thread).find([], pages) == 6
    assert storage(HostMemory(heads=2), ranks=Ranks(1, 2), thread=thread).find([], pages) == 0
    wide = storage(HostMemory(heads=4), ranks=Ranks(0, 1), thread=thread, namespace="wide")
    assert wide.find([], pages) == 0 and differing(made, wide) > {"namespace"}


def test_a_part_of_a_page_that_is_missing_is_a_miss(thread: PoolThread) -> None:
    """Rank 1 of the writers has stored nothing: a reader of all heads has half of each page."""
    pages, memory = page_hashes(PROMPT), HostMemory(heads=2)
    stored(memory, storage(memory, ranks=Ranks(0, 2), thread=thread, head_group=2), pages, [0, 1, 2, 3, 4, 5])
    assert storage(HostMemory(heads=4), thread=thread, head_group=2).find([], pages) == 0


def test_latent_pages_are_one_for_all_ranks(thread: PoolThread) -> None:
    memory, pages = LatentMemory(), page_hashes(PROMPT)
    stored(memory, storage(memory, ranks=Ranks(0, 4, replicated=True), thread=thread), pages, [0, 1, 2, 3, 4, 5])
    for size, number in ((4, 3), (2, 1), (1, 0)):
        reader = LatentMemory(seed=9)
        made = storage(reader, ranks=Ranks(number, size, replicated=True), thread=thread)
        assert made.find([], pages) == 6
        assert made.load([], wanted(pages, list(range(6)))) == [True] * 6
        np.testing.assert_array_equal(reader.pages(range(6))[0], memory.pages(range(6))[0])


@pytest.mark.parametrize(("heads", "group"), [(4, 3), (4, 8)])
def test_a_head_group_that_does_not_fit_is_refused(thread: PoolThread, heads: int, group: int) -> None:
    with pytest.raises(ConfigError, match="head_group"):
        storage(HostMemory(heads=heads), thread=thread, head_group=group)


def test_heads_that_ranks_hold_twice_are_kept_apart(thread: PoolThread) -> None:
    """Two heads over four ranks: which rank holds which is the engine's, so each finds its own."""
    memory, pages = HostMemory(heads=1), page_hashes(PROMPT)
    stored(memory, storage(memory, heads=2, ranks=Ranks(0, 4), thread=thread), pages, [0, 1, 2, 3, 4, 5])
    assert storage(HostMemory(heads=1), heads=2, ranks=Ranks(0, 4), thread=thread).find([], pages) == 6
    assert storage(HostMemory(heads=1), heads=2, ranks=Ranks(1, 4), thread=thread).find([], pages) == 0


@pytest.mark.parametrize("by", ["heads held twice", "states", "states beside MLA", "stages"])
def test_every_rank_of_an_engine_has_its_pages_at_one_shard(thread: PoolThread, by: str) -> None:
    """It refuses engines of one name that differ. Ranks do where a page is not cut by heads, and stages do."""
    pages, pool = page_hashes(PROMPT), "mamba" if by.startswith("states") else KV
    memories, made = [HostMemory(heads=1, seed=number) for number in range(3)], []
    for number, memory in enumerate(memories):
        ranks, layers = Ranks(number, 3, replicated=by == "states beside MLA"), ALL_LAYERS
        if by == "stages":
            ranks, layers = Ranks(), f"stage {number} of 3"
        made.append(storage(memory, heads=3 if by == "states" else 1, ranks=ranks, thread=thread, layers=layers))
        made[-1].register(pool, memory, places([0]))
    for memory, one in zip(memories, made, strict=True):
        assert one.store([], wanted(pages, [0, 1, 2, 3, 4, 5], pool)) == [True] * 6
        before = memory.pages([0, 1, 2, 3, 4, 5])
        assert one.load([], wanted(pages, [8, 9, 10, 11, 12, 13], pool)) == [True] * 6
        np.testing.assert_array_equal(memory.pages([8, 9, 10, 11, 12, 13]), before)
    assert [one.counters["stored_pages"] for one in made] == [6, 6, 6]


def test_heads_of_a_draft_beside_mla_are_no_other_ranks(thread: PoolThread, caplog: pytest.LogCaptureFixture) -> None:
    """The latent pages are one for all ranks, and so the first rank alone stores. The draft's heads are not."""
    pages = page_hashes(PROMPT)

    def rank(number: int, size: int) -> PageStorage:
        ranks = Ranks(number, size, replicated=True)
        made = storage(LatentMemory(), ranks=ranks, thread=thread, namespace=f"{size} ranks")
        made.register("draft", HostMemory(heads=2, seed=number), places([0]))
        for pool in (KV, "draft") if number == 0 else ():
            made.store([], wanted(pages, [0, 1, 2, 3, 4, 5], pool))
        return made

    first, second = rank(0, 2), rank(1, 2)
    draft = wanted(pages, [0, 1, 2, 3, 4, 5], "draft")
    assert first.find_all([], pages, [draft]).pages == second.find_all([], pages, [draft]).pages == 0
    assert second.load([], draft) == [False] * 6
    assert "pages of the pool draft are not cached: each rank holds other heads" in caplog.text
    assert rank(0, 1).find_all([], pages, [draft]).pages == 6


# -- several pools ----


def with_state(thread: PoolThread) -> tuple[HostMemory, LatentMemory, PageStorage]:
    memory, state = HostMemory(), LatentMemory(seed=5)
    made = storage(memory, thread=thread)
    made.register("mamba", state, places([0]))
    return memory, state, made


def test_a_prefix_ends_where_a_state_is_stored(thread: PoolThread) -> None:
    pages = page_hashes(PROMPT)
    memory, state, made = with_state(thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    last = wanted(pages[5:], [7], "mamba", TRAILING_PAGES)
    assert made.find_all([], pages, [last]).pages == 0
    for number in (1, 3):
        assert made.store([], wanted(pages[number : number + 1], [number], "mamba", TRAILING_PAGES)) == [True]
    found = made.find_all([], pages, [last])
    assert (found.pages, found.by_pool, found.restorable) == (4, {"kv": 6, "mamba": 4}, [2, 4])
    kept = state.pages([3])
    assert made.load(pages[:3], wanted(pages[3:4], [9], "mamba", TRAILING_PAGES)) == [True]
    np.testing.assert_array_equal(state.pages([9])[0], kept[0])


def test_a_pool_with_all_pages_cuts_the_prefix(thread: PoolThread) -> None:
    pages = page_hashes(PROMPT)
    memory, _, made = with_state(thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    assert made.store([], wanted(pages[:4], [0, 1, 2, 3], "mamba")) == [True] * 4
    found = made.find_all([], pages, [wanted(pages, [0, 1, 2, 3, 4, 5], "mamba")])
    assert (found.pages, found.by_pool) == (4, {"kv": 6, "mamba": 4})


def test_a_window_needs_its_last_pages_together(thread: PoolThread) -> None:
    pages = page_hashes(PROMPT)
    memory, _, made = with_state(thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    for number in (1, 2, 4):
        assert made.store([], wanted(pages[number : number + 1], [number], "mamba", TRAILING_PAGES)) == [True]
    found = made.find_all([], pages, [wanted(pages[:2], [8, 9], "mamba", TRAILING_PAGES)])
    assert (found.pages, found.restorable) == (3, [3])


def test_a_pool_that_nobody_registered_serves_nothing(thread: PoolThread) -> None:
    pages = page_hashes(PROMPT)
    memory, _, made = with_state(thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])
    assert made.find_all([], pages, [wanted(pages, [0], "swa", TRAILING_PAGES)]).pages == 0
    assert made.find_all([], pages, [wanted(pages, [0], "c4", "block_groups")]).pages == 6
    assert made.load([], wanted(pages, places([0]), "swa")) == [False] * 6
    assert made.store([], wanted(pages, places([0]), "swa")) == [False] * 6


# -- what goes wrong ----


def test_without_its_prefix_no_page_is_stored(thread: PoolThread, caplog: pytest.LogCaptureFixture) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    with caplog.at_level(logging.ERROR, "kvservice.connector"):
        for _ in range(3):
            assert made.store(None, wanted(pages, [0, 1, 2, 3, 4, 5])) == [False] * 6
    assert made.counters["failed_store"] == 3
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1
    assert made.find([], pages) == 0


def test_failures_are_misses_and_never_raise(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    assert made.store([], wanted(pages, [0])) == [False] * 6  # places of another number of pages
    assert made.find([], ["no hash"]) == 0
    assert made.load([], wanted(["no hash"], [0])) == [False]
    made.close()
    assert made.find([], pages) == 0
    assert made.find_all([], pages, []).pages == 0
    assert made.load([], wanted(pages, [0, 1, 2, 3, 4, 5])) == [False] * 6
    assert made.store([], wanted(pages, [0, 1, 2, 3, 4, 5])) == [False] * 6
    made.close()
    failed = {name: count for name, count in made.counters.items() if name.startswith("failed")}
    assert failed == {"failed_store": 2, "failed_find": 3, "failed_load": 2}


def test_pools_share_the_time_of_a_question(thread: PoolThread, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, ask, times = page_hashes(PROMPT), AttachedProgram.ask, list[float]()
    memory, _, made = with_state(thread)
    stored(memory, made, pages, [0, 1, 2, 3, 4, 5])

    async def slow(self: AttachedProgram, attachment: Attachment, request: AcquireRequest) -> AcquireResult | None:
        times.append(request.timeout_seconds)
        await asyncio.sleep(0.05)
        return await ask(self, attachment, request)

    monkeypatch.setattr(page_pool, "ALONE_MAX", 1)
    monkeypatch.setattr(storage_module, "ALONE_MAX", 1)
    monkeypatch.setattr(AttachedProgram, "ask", slow)
    assert made.find_all([], pages, [wanted(pages[5:], [7], "mamba", TRAILING_PAGES)]).pages == 0
    assert len(times) == 7, "one question for the keys and values, and one for each state"
    assert all(later <= earlier - 0.05 for earlier, later in pairwise(times))


def test_pieces_of_another_size_are_never_copied(thread: PoolThread) -> None:
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    memory.kv = memory.kv[:, :, :2].copy()
    assert made.store([], wanted(pages, [0, 1, 2, 3, 4, 5])) == [False] * 6
    assert made.counters["failed_store"] == 1


def test_a_full_pool_drops_the_last_pages(thread: PoolThread) -> None:
    memory = HostMemory(600, heads=64)  # 49 KiB a page
    pages = page_hashes(list(range(600 * PAGE)))
    made = storage(memory, heads=64, thread=thread)
    kept = made.store([], wanted(pages, list(range(600))))
    count = kept.index(False)
    assert 100 < count < 600
    assert kept == [True] * count + [False] * (600 - count)
    assert made.counters["dropped_full"] == 600 - count
    assert made.counters["stored_pages"] == count


def test_pages_beyond_the_longest_chain_are_not_stored(thread: PoolThread) -> None:
    before = ["00" * 32] * page_pool.KEYS_PER_REQUEST_MAX
    pages = page_hashes(PROMPT)
    made = storage(HostMemory(), thread=thread)
    assert made.store(before, wanted(pages, [0, 1, 2, 3, 4, 5])) == [False] * 6
    assert made.find(before, pages) == 0
    assert (made.counters["dropped_too_long"], made.counters["missed_too_long"]) == (6, 6)


def test_a_pool_of_an_unknown_kind_is_left_out(thread: PoolThread, caplog: pytest.LogCaptureFixture) -> None:
    made = storage(HostMemory(), thread=thread)

    class Strange(HostMemory):
        def get_page_buffer_meta(self, indices: object) -> tuple[list[int], list[int]]:
            raise NotImplementedError("not this one")

    made.register("draft", Strange(), places([0]))
    assert "pages of the pool draft are not cached: not this one" in caplog.text
    assert made.counters["unsupported_draft"] == 1
    made.register("empty", LatentMemory(), [])
    assert made.counters["unsupported_empty"] == 1


def test_a_pool_without_room_leaves_the_engine_without_the_cache(
    thread: PoolThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def no_room(*_: object) -> None:
        raise SegmentError("/dev/shm is too small")

    monkeypatch.setattr(thread, "attach_program", no_room)
    made = storage(HostMemory(), thread=thread)
    assert made.counters["unsupported_kv"] == 1 and "/dev/shm is too small" in caplog.text
    pages = page_hashes(PROMPT)
    assert made.store([], wanted(pages, [0])) == [False] * len(pages) and made.find([], pages) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"interface_v1": 0}, '"interface_v1": 1'),
        ({"copier": "worker"}, "copier"),
        ({"head_group": 0}, "head_group"),
        ({"mode": "cluster"}, "mode"),
        ({"fetch_timeout_seconds": 9}, "fetch_timeout_seconds"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SGLangOptions.parse({**OPTIONS, **given})


@pytest.mark.parametrize("namespace", ["prod", ""])
def test_a_clear_of_a_namespace_clears_states_of_ranks(thread: PoolThread, namespace: str) -> None:
    pages = page_hashes(PROMPT)
    made = storage(HostMemory(), thread=thread, ranks=Ranks(1, 2), heads=8, namespace=namespace)
    made.register("mamba", LatentMemory(), places([0]))
    for pool in (KV, "mamba"):
        assert made.store([], wanted(pages, [0, 1, 2, 3, 4, 5], pool)) == [True] * 6
    runtime = thread._runtime
    assert runtime is not None and len(runtime.inventory()) == 12
    thread.loop.wait(runtime.clears.clear([Mark(MarkKind.NAMESPACE, time.time(), namespace)]))
    assert not runtime.inventory()
