"""The rules that every Tier must keep. Subclass, give it a `place` fixture, and pytest runs the rules against it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import pytest

from kvservice.codec.base import EXTRA_BYTES_MAX
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.testing.eventually import eventually
from kvservice.tier.base import Tier, TierRead, TierWrite, WriteResult
from kvservice.tier.file_io import aligned_memory
from kvservice.units import BlockKey, KiB, MiB, SpanRoute

# For one job, which takes milliseconds; a busy machine gets more. Then the rule fails.
WAIT_SECONDS = 30.0
SIZES = (1, 4 * KiB, 4 * KiB + 1, 64 * KiB, 100_001, 720 * KiB, 2 * MiB)  # bytes of a payload
STORED_AT = 1_795_000_000.0  # of each block
OK, STALE, CORRUPT, FAILED = PullResult.OK, PullResult.STALE, PullResult.CORRUPT, PullResult.FAILED


class TierPlace(Protocol):
    """Where a tier keeps its blocks, and what a test may do there behind its back."""

    def make(self) -> Tier:
        """A tier on this place that was not started. Whatever an earlier one wrote is still there."""
        ...

    def take(self, key: BlockKey) -> bytes | None:
        """The block's file, header and payload; None when it is not there."""
        ...

    def put(self, key: BlockKey, data: bytes) -> None:
        """Replace the block's file."""
        ...


class StartedTier:
    """A tier whose answers are waited for."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.found = tier.start()
        self.stored_bytes: dict[BlockKey, int] = {}  # that the tier said of what it wrote
        self._jobs = 0

    def close(self) -> None:
        self.tier.close()

    def write(self, *items: tuple[TierBlock, bytes]) -> tuple[WriteResult, ...]:
        self._jobs += 1
        job, answers, done = self._jobs, list[Any](), threading.Event()
        given = tuple((block, page_aligned(payload)) for block, payload in items)

        def answered(*answer: Any) -> None:
            answers.append(answer)
            done.set()

        self.tier.write(TierWrite(job, given), answered)
        assert done.wait(WAIT_SECONDS), "the write was not answered"
        ((job_id, results, *sizes),) = answers
        assert job_id == job and len(results) == len(items)
        written: tuple[WriteResult, ...] = results
        for (block, _), stored_bytes in zip(items, sizes[0], strict=True) if sizes else ():
            assert 0 <= stored_bytes <= block.payload_bytes + EXTRA_BYTES_MAX
            self.stored_bytes[block.key] = stored_bytes
        return written

    def read(
        self, *blocks: TierBlock, deadline: float | None = None, urgent: bool = True
    ) -> list[tuple[PullResult, bytes]]:
        """Of each block the result, and what is in its target."""
        self._jobs += 1
        done = threading.Event()
        answers = list[tuple[int, tuple[BroughtBlock, ...]]]()
        targets = [page_aligned(bytes(block.payload_bytes)) for block in blocks]
        until = time.monotonic() + WAIT_SECONDS if deadline is None else deadline
        job = TierRead(self._jobs, tuple(zip(blocks, targets, strict=True)), until, urgent)

        def answered(*answer: Any) -> None:
            answers.append(answer)
            done.set()

        self.tier.read(job, answered)
        assert done.wait(WAIT_SECONDS), "the read was not answered"
        ((job_id, found),) = answers
        assert job_id == job.job_id and len(found) == len(blocks)
        for block, target, answer in zip(blocks, targets, found, strict=True):
            is_here = answer.result is OK
            assert answer.digest == (digest_payload(target, block.key) if is_here else 0)
            assert answer.stored_at == (STORED_AT if is_here else 0.0), "as the header says, whatever was asked"
        return [(answer.result, bytes(target)) for answer, target in zip(found, targets, strict=True)]

    def result_of(self, block: TierBlock) -> PullResult:
        return self.read(block)[0][0]


def page_aligned(payload: bytes) -> memoryview:
    room = aligned_memory(len(payload))[: len(payload)]
    room[:] = payload
    return room


def a_block(number: int, payload: bytes) -> TierBlock:
    """Block `number` with these bytes."""
    key = BlockKey(number.to_bytes(2, "big") * 8)
    return TierBlock(
        key, len(payload), digest_payload(payload, key), number, SpanRoute(7), 3, bytes(range(16)), STORED_AT
    )


def some(number: int, size: int = 8 * KiB) -> tuple[TierBlock, bytes]:
    payload = os.urandom(size)
    return a_block(number, payload), payload


class TierContract:
    """`lists`: the tier names what it has when it starts. `rewrites`: it writes a block that it knows to have."""

    lists = True
    rewrites = True

    @pytest.fixture
    def started(self, place: TierPlace) -> object:
        tier = StartedTier(place.make())
        yield tier
        tier.close()

    def test_what_was_written_comes_back(self, started: StartedTier) -> None:
        items = [some(number, size) for number, size in enumerate(SIZES)]
        assert started.write(*items) == (WriteResult.OK,) * len(items)
        assert started.read(*(block for block, _ in items)) == [(OK, payload) for _, payload in items]
        assert started.read(items[3][0], urgent=False) == [(OK, items[3][1])]

    def test_what_is_not_there_is_stale(self, started: StartedTier) -> None:
        here, payload = some(1)
        started.write((here, payload))
        assert started.read(some(2)[0], here)[0][0] is STALE

    def test_a_job_without_blocks_is_answered(self, started: StartedTier) -> None:
        assert started.write() == ()
        assert started.read() == []

    def test_a_file_of_another_block_is_never_a_hit(self, place: TierPlace, started: StartedTier) -> None:
        one, other = some(1), some(2)
        started.write(one, other)
        stored = place.take(one[0].key)
        assert stored is not None
        place.put(other[0].key, stored)
        assert started.result_of(other[0]) in (STALE, CORRUPT)
        assert started.result_of(one[0]) is OK

    def test_a_block_of_another_length_or_engine_is_stale(self, started: StartedTier) -> None:
        block, payload = some(1)
        for asked in (
            replace(block, payload_bytes=4 * KiB),
            replace(block, payload_bytes=64 * KiB),
            replace(block, fingerprint=bytes(16)),
        ):
            started.write((block, payload))
            assert started.result_of(asked) in (STALE, CORRUPT)

    def test_what_comes_back_has_the_age_of_its_file(self, started: StartedTier) -> None:
        """Of what another node wrote nobody knows it, and it is asked for as not older than so much."""
        block, payload = some(1)
        started.write((block, payload))
        for least in (0.0, STORED_AT - 60.0, STORED_AT):
            assert started.read(replace(block, digest=0, stored_at=least)) == [(OK, payload)]
        assert started.result_of(replace(block, digest=0, stored_at=STORED_AT + 1.0)) is STALE

    def test_a_flipped_bit_is_never_a_hit(self, place: TierPlace, started: StartedTier) -> None:
        block, payload = some(1)
        started.write((block, payload))
        stored = place.take(block.key)
        assert stored is not None
        for bit in (0, 70, 8 * 40 + 1, 8 * 100, 8 * 300 + 5, 8 * 4095, 8 * 4096, 8 * 6000 + 3, 8 * len(stored) - 1):
            damaged = bytearray(stored)
            damaged[bit // 8] ^= 1 << bit % 8
            place.put(block.key, bytes(damaged))
            assert started.result_of(block) in ((CORRUPT,) if bit >= 8 * 4096 else (CORRUPT, STALE)), bit
        place.put(block.key, stored)
        assert started.result_of(block) is OK

    def test_a_file_of_a_wrong_length_is_never_a_hit(self, place: TierPlace, started: StartedTier) -> None:
        block, payload = some(1)
        started.write((block, payload))
        stored = place.take(block.key)
        assert stored is not None
        for length in (0, 100, 4096, len(stored) - 1, len(stored) - 4096):
            place.put(block.key, stored[:length])
            assert started.result_of(block) in (STALE, CORRUPT), length
        place.put(block.key, stored + b"x")
        assert started.result_of(block) in (STALE, CORRUPT)

    def test_what_was_erased_is_stale(self, place: TierPlace, started: StartedTier) -> None:
        gone, kept = some(1), some(2)
        started.write(gone, kept)
        started.tier.erase([gone[0].key, some(3)[0].key])
        eventually(lambda: place.take(gone[0].key) is None, "the file is gone")
        assert [result for result, _ in started.read(gone[0], kept[0])] == [STALE, OK]

    def test_what_is_written_after_an_erase_stays(self, started: StartedTier) -> None:
        """Erasing is not answered, so nobody can wait for it: what was cleared may be stored again at once."""
        old, new = [some(number) for number in range(20)], [some(number) for number in range(20)]
        started.write(*old)
        started.tier.erase([block.key for block, _ in old])
        assert set(started.write(*new)) == {WriteResult.OK}
        later = some(99)
        started.write(later)
        started.tier.erase([later[0].key])
        eventually(lambda: started.result_of(later[0]) is STALE, "an erase that was asked for later is done")
        assert started.read(*[block for block, _ in new]) == [(OK, payload) for _, payload in new]

    def test_a_block_that_is_written_again_is_the_last_one(self, started: StartedTier) -> None:
        first, second = some(1), some(1)
        assert first != second
        started.write(first)
        started.write(second)
        assert started.read(second[0]) == [(OK, second[1] if self.rewrites else first[1])]
        started.tier.erase([second[0].key])
        eventually(lambda: started.result_of(second[0]) is STALE, "it is gone")
        started.write(first)
        assert started.read(first[0]) == [(OK, first[1])]

    def test_a_read_past_its_deadline_is_not_begun(self, started: StartedTier) -> None:
        block, payload = some(1)
        started.write((block, payload))
        assert started.read(block, deadline=time.monotonic() - 1) == [(FAILED, bytes(len(payload)))]

    def test_a_read_passes_writes_that_wait(self, started: StartedTier) -> None:
        wanted = some(1)
        started.write(wanted)
        ended, done = list[str](), threading.Semaphore(0)

        def note(name: str) -> None:
            ended.append(name)
            done.release()

        payload = page_aligned(os.urandom(256 * KiB))
        blocks = [a_block(number, bytes(payload)) for number in range(2, 66)]
        target = page_aligned(bytes(len(wanted[1])))
        for block in blocks:
            started.tier.write(TierWrite(1000, ((block, payload),)), lambda *_: note("write"))
        read = TierRead(2000, ((wanted[0], target),), time.monotonic() + WAIT_SECONDS)
        started.tier.read(read, lambda *_: note("read"))
        written = len(ended)  # at least as many as before the read was there
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in range(65))
        assert ended.index("read") - written <= 32, "it waits for the writes under way at most"

    def test_many_jobs_at_once_do_not_mix(self, started: StartedTier) -> None:
        items = [some(number, 4 * KiB + number) for number in range(24)]
        assert set(started.write(*items)) == {WriteResult.OK}
        wrong = list[object]()

        def use(mine: Sequence[tuple[TierBlock, bytes]]) -> None:
            for _ in range(4):
                found = started.read(*(block for block, _ in mine), urgent=False)
                wrong.extend(one for one, (_, payload) in zip(found, mine, strict=True) if one != (OK, payload))
                wrong.extend(result for result in started.write(mine[0]) if result is not WriteResult.OK)

        threads = [threading.Thread(target=use, args=(items[start::4],)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert not any(thread.is_alive() for thread in threads) and wrong == []

    def test_close_answers_everything_once(self, place: TierPlace) -> None:
        tier = StartedTier(place.make())
        block, payload = some(1)
        tier.write((block, payload))
        answers, memory = list[int](), page_aligned(payload)
        for number in range(40):
            given = ((a_block(number + 2, payload), memory),)
            tier.tier.write(TierWrite(number, given), lambda job, *_: answers.append(job))
            target = ((block, page_aligned(bytes(len(payload)))),)
            read = TierRead(100 + number, target, time.monotonic() + WAIT_SECONDS)
            tier.tier.read(read, lambda job, *_: answers.append(job))
        tier.close()
        assert sorted(answers) == [*range(40), *range(100, 140)]
        tier.close()

    def test_a_closed_tier_refuses_and_answers(self, place: TierPlace) -> None:
        tier = StartedTier(place.make())
        tier.close()
        assert tier.write(some(1)) == (WriteResult.FAILED,)
        assert tier.result_of(some(1)[0]) is FAILED

    def test_the_next_start_finds_what_was_written(self, place: TierPlace) -> None:
        first = StartedTier(place.make())
        items = [some(number, 4 * KiB + number) for number in range(5)]
        first.write(*items)
        first.tier.erase([items[0][0].key])
        eventually(lambda: place.take(items[0][0].key) is None, "the file is gone")
        first.close()
        second = StartedTier(place.make())
        try:
            found = sorted(second.found, key=lambda block: block.key)
            said = [replace(block, stored_bytes=first.stored_bytes.get(block.key, 0)) for block, _ in items[1:]]
            assert found == (said if self.lists else [])
            assert second.read(*(block for block, _ in items)) == [
                (STALE, bytes(4 * KiB)),
                *((OK, payload) for _, payload in items[1:]),
            ]
        finally:
            second.close()

    def test_a_probe_never_says_too_much(self, started: StartedTier) -> None:
        items = [some(number) for number in range(4)]
        started.write(*items[:2], items[3])
        found = list[tuple[int, int, bool]]()
        for count in range(5):
            keys = [block.key for block, _ in items[:count]]
            started.tier.probe(
                keys,
                time.monotonic() + WAIT_SECONDS,
                lambda there, is_end=False, asked=count: found.append((asked, there, is_end)),
            )
        eventually(lambda: len(found) == 5, "the probes", detail=lambda: found)
        for asked, there, is_end in found:
            assert there <= min(asked, 2)
            assert not is_end or (there, asked > 2) == (2, True), "it lacks a block that it has, or was not asked for"

    def test_counters_are_totals(self, started: StartedTier) -> None:
        before = dict(started.tier.counters())
        started.write(some(1))
        after = dict(started.tier.counters())
        assert before.keys() <= after.keys() and all(after[name] >= before[name] for name in before)
        assert after != before
