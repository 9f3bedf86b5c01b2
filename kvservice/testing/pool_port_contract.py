"""The rules that every PoolPort must keep, as an engine sees it. Subclass, give it an async `pool` fixture with an
empty pool of a few slots of `builders.SMALL` bytes, and pytest runs the rules against it.

The engine of these tests has one process and holds no liveness lock, so the pool knows at once that it has gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvservice.core.block.keys import span_route
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    MissReason,
    SealItem,
    SealStatus,
    Statement,
    WarmRequest,
)
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.header_checks import is_as_promised, is_reserved
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import KVServiceError
from kvservice.memory.segment import Segment
from kvservice.pool.port import PoolPort
from kvservice.testing.builders import SMALL, make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, HandoffId, LeaseId

TIMEOUT_SECONDS = 10.0  # For one acquire, which takes milliseconds; a busy machine gets more. Then the rule fails.
MORE_THAN_ALL = 1000  # slots: a small pool has fewer
CHAIN = make_chain(3)


class PortEngine:
    """An engine that is attached to the pool under test, with its segment mapped."""

    def __init__(self, pool: PoolPort, attachment: Attachment, lost: list[str]) -> None:
        self.pool, self.attachment, self.lost = pool, attachment, lost
        self.segment = Segment.attach(Path(attachment.segment_path), attachment.geometry)

    @classmethod
    async def attach(cls, pool: PoolPort, name: str = "engine") -> PortEngine:
        lost: list[str] = []
        return cls(pool, await pool.attach(make_spec(name), lost.append), lost)

    async def reserve(self, count: int, call: int = 0) -> list[BlockRef]:
        return await self.pool.reserve(self.attachment.attachment_id, count, call=call)

    async def seal(self, refs: Sequence[BlockRef], keys: Sequence[BlockKey], start: int = 0) -> list[SealStatus]:
        """Write these blocks of the chain into the slots, and seal them."""
        items = []
        for position, ref in enumerate(refs, start):
            self.segment.payload(ref.slot, SMALL)[:] = _payload(keys[position])
            parent = keys[position - 1] if position else None
            items.append(SealItem(ref, keys[position], parent, position, span_route(keys, position)))
        return await self.pool.seal(self.attachment.attachment_id, items)

    async def store(self, keys: Sequence[BlockKey]) -> list[BlockRef]:
        refs = await self.reserve(len(keys))
        assert await self.seal(refs, keys) == [SealStatus.SEALED] * len(keys)
        return refs

    async def acquire(self, keys: Sequence[BlockKey], skip: int = 0) -> AcquireResult:
        return await self.pool.acquire(
            self.attachment.attachment_id, AcquireRequest(tuple(keys), skip, TIMEOUT_SECONDS)
        )

    async def release(self, *lease_ids: LeaseId) -> None:
        await self.pool.release(self.attachment.attachment_id, lease_ids)

    async def abort(self, refs: Sequence[BlockRef]) -> None:
        await self.pool.abort(self.attachment.attachment_id, refs)

    async def leave(self) -> None:
        self.segment.close()
        await self.pool.detach(self.attachment.attachment_id)

    def holds(self, ref: BlockRef, key: BlockKey) -> bool:
        """Whether the slot's header is as promised, and its bytes are those of this block."""
        header = self.segment.header_bytes(ref.slot)
        is_right = bytes(self.segment.payload(ref.slot, SMALL)) == _payload(key)
        return is_right and is_as_promised(header, self.attachment.epoch, ref, key, SMALL)


def _payload(key: BlockKey) -> bytes:
    return (key * (SMALL // len(key) + 1))[:SMALL]


class PoolPortContract:
    @pytest.fixture
    async def engine(self, pool: PoolPort) -> AsyncIterator[PortEngine]:
        made = await PortEngine.attach(pool)
        yield made
        made.segment.close()

    async def test_a_stored_block_is_promised_with_its_bytes(self, engine: PortEngine) -> None:
        await engine.store(CHAIN)
        result = await engine.acquire(CHAIN)
        assert result.lease_id and len(result.blocks) == len(CHAIN) and result.fetched_count == 0
        for ref, key in zip(result.blocks, CHAIN, strict=True):
            assert ref.generation % 2 == 0, "a promised block is stable"
            assert engine.holds(ref, key)
            header = engine.segment.read_header(ref.slot)
            assert header is not None and header.digest == digest_payload(_payload(key), key)

    async def test_reserved_slots_are_different_and_being_written(self, engine: PortEngine) -> None:
        refs = await engine.reserve(3)
        assert len({ref.slot for ref in refs}) == 3
        for ref in refs:
            assert ref.generation % 2 == 1, "a slot that is written has an odd generation"
            assert is_reserved(engine.segment.header_bytes(ref.slot), engine.attachment.epoch, ref, SMALL)

    async def test_a_full_pool_gives_fewer_slots_and_no_error(self, engine: PortEngine) -> None:
        refs = await engine.reserve(MORE_THAN_ALL)
        assert 0 < len(refs) < MORE_THAN_ALL
        assert await engine.reserve(1) == []

    async def test_a_slot_that_was_given_back_is_reserved_again(self, engine: PortEngine) -> None:
        refs = await engine.reserve(MORE_THAN_ALL)
        await engine.abort(refs[:2])
        again = await engine.reserve(MORE_THAN_ALL)
        assert {ref.slot for ref in again} == {ref.slot for ref in refs[:2]}
        assert not set(again) & set(refs), "under another generation"

    async def test_only_the_longest_prefix_is_promised(self, engine: PortEngine) -> None:
        await engine.store(CHAIN[:1])
        refs = await engine.reserve(1)
        assert await engine.seal(refs, CHAIN, start=2) == [SealStatus.SEALED]
        result = await engine.acquire(CHAIN)
        assert len(result.blocks) == 1, "a gap ends the hit"

    async def test_blocks_that_the_engine_has_are_skipped(self, engine: PortEngine) -> None:
        await engine.store(CHAIN)
        result = await engine.acquire(CHAIN, skip=2)
        assert [engine.holds(ref, CHAIN[2]) for ref in result.blocks] == [True]
        assert result.skipped_held == 2

    async def test_an_answer_says_which_skipped_blocks_are_held(self, engine: PortEngine) -> None:
        """From the first one on, because what is behind a gap is of no use."""
        await engine.store(CHAIN[:1])
        result = await engine.acquire(CHAIN, skip=len(CHAIN))
        assert (result.skipped_held, result.lease_id) == (1, 0)
        nothing = await engine.acquire(make_chain(2, "nobody stored this"), skip=1)
        assert nothing.skipped_held == 0

    async def test_a_miss_has_no_lease(self, engine: PortEngine) -> None:
        result = await engine.acquire(make_chain(2, "nobody stored this"))
        assert result.lease_id == 0 and result.blocks == ()

    async def test_the_second_block_of_one_key_is_a_duplicate(self, engine: PortEngine) -> None:
        """The first one stays, and the slot of the second is free again."""
        await engine.store(CHAIN[:1])
        refs = await engine.reserve(1)
        assert await engine.seal(refs, CHAIN) == [SealStatus.DUPLICATE]
        result = await engine.acquire(CHAIN[:1])
        assert engine.holds(result.blocks[0], CHAIN[0]) and result.blocks[0].slot != refs[0].slot

    async def test_a_slot_that_is_not_reserved_cannot_be_sealed(self, engine: PortEngine) -> None:
        refs = await engine.reserve(2)
        await engine.abort(refs[:1])
        assert await engine.seal(refs, CHAIN) == [SealStatus.STALE, SealStatus.SEALED]
        assert await engine.seal(refs[1:], CHAIN) == [SealStatus.STALE], "a slot is sealed once"

    async def test_a_leased_block_is_not_written_over(self, engine: PortEngine) -> None:
        await engine.store(CHAIN)
        result = await engine.acquire(CHAIN)
        taken = {ref.slot for ref in await engine.reserve(MORE_THAN_ALL)}
        assert not taken & {ref.slot for ref in result.blocks}
        assert all(engine.holds(ref, key) for ref, key in zip(result.blocks, CHAIN, strict=True))

    async def test_giving_back_twice_is_no_error(self, engine: PortEngine) -> None:
        refs = await engine.reserve(1)
        await engine.store(CHAIN)
        result = await engine.acquire(CHAIN)
        for _ in range(2):
            await engine.release(result.lease_id)
            await engine.abort(refs)

    async def test_a_statement_frees_what_it_denies(self, engine: PortEngine) -> None:
        """Only of calls up to its own number: what a later call got stays the engine's."""
        refs, later = await engine.reserve(2, call=1), await engine.reserve(1, call=2)
        attachment = engine.attachment.attachment_id
        await engine.pool.renew(attachment, [], statement=Statement(1, (), (refs[1].slot,), ()))
        statuses = await engine.seal([*refs, *later], CHAIN)
        assert statuses == [SealStatus.STALE, SealStatus.SEALED, SealStatus.SEALED]

    async def test_a_renewed_lease_is_still_there(self, engine: PortEngine) -> None:
        await engine.store(CHAIN)
        result = await engine.acquire(CHAIN)
        await engine.pool.renew(engine.attachment.attachment_id, [result.lease_id])
        taken = {ref.slot for ref in await engine.reserve(MORE_THAN_ALL)}
        assert not taken & {ref.slot for ref in result.blocks}

    @pytest.mark.parametrize("part", ["payload", "header"])
    async def test_a_damaged_block_that_is_named_heals(self, engine: PortEngine, part: str) -> None:
        """A block is given up and may be stored again; a header is written again."""
        await engine.store(CHAIN[:1])
        (ref,) = (await engine.acquire(CHAIN[:1])).blocks
        offset = engine.segment.geometry.header_offset(ref.slot)
        damaged = engine.segment.payload(ref.slot, SMALL)[:1] if part == "payload" else engine.segment.buffer[offset:]
        damaged[0] ^= 1
        assert not engine.holds(ref, CHAIN[0])
        damaged.release()

        async def heals() -> bool:
            await engine.pool.renew(engine.attachment.attachment_id, [], suspects=[ref])
            if part == "payload" and not (await engine.acquire(CHAIN[:1])).blocks:
                await engine.store(CHAIN[:1])
            refs = (await engine.acquire(CHAIN[:1])).blocks
            return bool(refs) and engine.holds(refs[0], CHAIN[0]) and (refs[0] == ref) == (part == "header")

        await eventually_async(heals, "the block is whole again")

    async def test_a_handoff_is_opened_and_closed(self, engine: PortEngine) -> None:
        """A Close may come before a late Open, and twice if an answer was lost."""
        attachment, handoffs = engine.attachment.attachment_id, [HandoffId(bytes([n]) * 16) for n in (1, 2)]
        await engine.pool.open_handoff(attachment, handoffs[0], call=1)
        for handoff in (*handoffs, *handoffs):
            await engine.pool.close_handoff(attachment, handoff)

    async def test_blocks_outlive_the_engine_that_stored_them(self, pool: PoolPort) -> None:
        writer = await PortEngine.attach(pool, "writer")
        await writer.store(CHAIN)
        await writer.leave()
        reader = await PortEngine.attach(pool, "reader")
        result = await reader.acquire(CHAIN)
        assert [reader.holds(ref, key) for ref, key in zip(result.blocks, CHAIN, strict=True)] == [True] * len(CHAIN)
        reader.segment.close()
        assert writer.lost == [], "it left by itself"

    async def test_a_prompt_that_is_here_is_warm(self, engine: PortEngine) -> None:
        await engine.store(CHAIN)
        request = WarmRequest(make_spec().fingerprint.digest, (*CHAIN, BlockKey(bytes(16))), 1.0, 5.0)
        result = await engine.pool.warm(request)
        assert (result.asked, result.local, result.fetched, result.miss) == (
            len(CHAIN) + 1,
            len(CHAIN),
            (),
            MissReason.NEVER_STORED,
        )

    async def test_an_attachment_that_ended_is_refused(self, engine: PortEngine) -> None:
        refs = await engine.reserve(1)
        attachment = engine.attachment.attachment_id
        await engine.pool.detach(attachment)
        with pytest.raises(KVServiceError):
            await engine.acquire(CHAIN)
        with pytest.raises(KVServiceError):
            await engine.seal(refs, CHAIN)

    async def test_slots_of_an_engine_that_left_come_back(self, pool: PoolPort) -> None:
        """What it held in reserve is free once nobody can write into it any more."""
        first = await PortEngine.attach(pool, "first")
        count = len(await first.reserve(MORE_THAN_ALL))
        await first.leave()
        second = await PortEngine.attach(pool, "second")
        found: list[BlockRef] = []

        async def all_are_back() -> bool:
            found.extend(await second.reserve(MORE_THAN_ALL))
            return len(found) == count

        await eventually_async(all_are_back, "the slots of the engine that left")
        second.segment.close()

    async def test_an_engine_that_attaches_again_starts_anew(self, engine: PortEngine) -> None:
        """Under the same id, as after a restart: the attachment before is void, and its loss is reported at most
        once."""
        await engine.store(CHAIN)
        again = await PortEngine.attach(engine.pool)
        assert again.attachment.attachment_id != engine.attachment.attachment_id
        with pytest.raises(KVServiceError):
            await engine.acquire(CHAIN)
        assert len((await again.acquire(CHAIN)).blocks) == len(CHAIN)
        again.segment.close()
        assert len(engine.lost) <= 1 and again.lost == []
