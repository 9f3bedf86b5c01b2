"""An engine hears of blocks that are gone with the heartbeat behind the Seal that said they were there."""

from __future__ import annotations

from dataclasses import replace

from kvservice.core import events as ev
from kvservice.core.messages import Removed, SealStatus
from kvservice.testing.builders import CoreHarness, make_chain, make_spec
from kvservice.units import AttachmentId, BlockKey

CHAIN = make_chain(4)


def listener(name: str, harness: CoreHarness) -> AttachmentId:
    return harness.attach(replace(make_spec(name), hears_removals=True))


def heard(harness: CoreHarness, engine: AttachmentId) -> set[BlockKey]:
    op = harness.next_op()
    harness.send(ev.Renew(op, engine, ()))
    removed = harness.reply(op)
    assert isinstance(removed, Removed) and not removed.lost
    return set(removed.keys)


def test_block_evicted_before_its_seals_answer_is_heard_of() -> None:
    harness = CoreHarness(slab_count=1)  # 4 slots
    engine = listener("one", harness)
    refs = harness.reserve(engine, 2)
    for ref, key in zip(refs, CHAIN, strict=False):
        harness.write(ref, key)
    op = harness.begin_seal(engine, harness.items(refs, CHAIN))
    first, second = (ev.SlotDigest(d.slot, d.key, harness.digest_now(d.slot, d.key)) for d in list(harness.digests))
    harness.send(ev.Digested((first,)))
    assert len(harness.reserve(engine, 3)) == 3, "this evicts the first block"
    assert heard(harness, engine) == {CHAIN[0]}
    harness.send(ev.Digested((second,)))
    assert harness.statuses(op) == [SealStatus.SEALED] * 2
    assert heard(harness, engine) == {CHAIN[0]}, "again, as the answer of the Seal says otherwise"


def test_duplicate_of_a_block_never_sealed_is_heard_of() -> None:
    harness = CoreHarness(slab_count=1)
    writer, other = listener("one", harness), listener("other", harness)
    (ref,) = harness.reserve(writer, 1)
    harness.begin_seal(writer, harness.items([ref], CHAIN))
    refs = harness.reserve(other, 1)
    op = harness.begin_seal(other, harness.items(refs, CHAIN))
    assert harness.statuses(op) == [SealStatus.DUPLICATE]
    assert heard(harness, other) == set(), "it is being sealed"
    harness.digest_all(readable=False)
    assert heard(harness, other) == {CHAIN[0]}


def test_block_stored_again_is_not_heard_of() -> None:
    harness = CoreHarness(slab_count=1)
    engine = listener("one", harness)
    harness.store(engine, CHAIN[:1])
    refs = harness.reserve(engine, 4)
    harness.send(ev.Abort(harness.next_op(), engine, tuple(refs)))
    assert harness.store(engine, CHAIN[:1]) == [SealStatus.SEALED]
    assert heard(harness, engine) == set()
