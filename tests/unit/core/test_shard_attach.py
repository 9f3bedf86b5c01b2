"""Rules of core.shard: who may attach, and what becomes of an engine's slots and promises when it leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.core import events as ev
from kvservice.core.actions import Reply
from kvservice.core.attachments import ATTACHMENTS_MAX
from kvservice.core.block.window_groups import WINDOW_GROUPS_MAX, Window, WindowGroup
from kvservice.core.messages import EngineSpec, MissReason, SealStatus
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.refs import BlockRef
from kvservice.core.shard import ShardState
from kvservice.discovery import EPOCH_MAX
from kvservice.errors import Exhausted, FingerprintMismatch, InvalidRequest, NotAttached, Unavailable, UnsupportedLayout
from kvservice.testing.builders import SMALL, CoreHarness, make_chain, make_layout, make_spec
from kvservice.units import AttachmentId, BootEpoch, LeaseId, MiB, NodeId
from kvservice.wire.v1 import shard_pb2

CHAIN = make_chain(3)


def state_of(harness: CoreHarness) -> tuple[object, ...]:
    return (
        harness.slots("writing"),
        harness.slots("quarantined"),
        harness.state.attachment_count,
        dict(harness.headers),
    )


def test_attaching_tells_epoch_and_lease() -> None:
    harness = CoreHarness(lease_seconds=7.0)
    op = harness.next_op()
    harness.send(ev.Attach(op, make_spec()))
    reply = harness.reply(op)
    assert (reply.epoch, reply.lease_seconds) == (1, 7.0)  # type: ignore[attr-defined]
    assert harness.state.attachment_count == 1


@pytest.mark.parametrize("engine_id", [b"", b"short", bytes(15), bytes(17), bytes(16)])
def test_an_engine_id_is_16_bytes_and_not_the_shards_own(engine_id: bytes) -> None:
    spec = make_spec()
    with pytest.raises(InvalidRequest):
        CoreHarness().attach(EngineSpec(engine_id, spec.model, spec.fingerprint, spec.layout))


def test_another_fingerprint_is_refused_naming_the_fields() -> None:
    harness = CoreHarness()
    harness.attach(make_spec("one", dtype="bf16"))
    before = state_of(harness)
    with pytest.raises(FingerprintMismatch, match=r"dtype: fp16 here, bf16 there"):
        harness.attach(make_spec("two", dtype="fp16"))
    assert state_of(harness) == before
    assert harness.count("attach_fingerprint_refused") == 1


def test_other_models_and_namespaces_live_side_by_side() -> None:
    harness = CoreHarness()
    harness.attach(make_spec("one", dtype="bf16"))
    harness.attach(make_spec("two", dtype="fp16", namespace="other"))
    harness.attach(make_spec("three", "another model"))
    assert harness.state.attachment_count == 3
    assert [kind.attached for kind in harness.state.engine_stats().engines] == [1, 1, 1]


def test_engines_of_other_kinds_live_side_by_side() -> None:
    """None expects the other's exact blocks, so there is nothing to warn of."""
    harness = CoreHarness()
    harness.attach(make_spec("one", engine="vllm 0.32.0"))
    harness.attach(make_spec("two", engine="sglang"))
    assert [kind.attached for kind in harness.state.engine_stats().engines] == [1, 1]
    with pytest.raises(FingerprintMismatch, match=r"engine: vllm 0\.33\.0 here, vllm 0\.32\.0 there"):
        harness.attach(make_spec("three", engine="vllm 0.33.0"))


def test_a_fingerprint_is_free_again_when_its_engine_left() -> None:
    harness = CoreHarness()
    harness.send(ev.Detach(harness.attach(make_spec("one", dtype="bf16"))))
    assert harness.attach(make_spec("two", dtype="fp16"))


def test_a_block_that_fits_no_slab_is_refused_with_both_sizes() -> None:
    with pytest.raises(UnsupportedLayout) as caught:
        CoreHarness().attach(make_spec(payload_bytes=MiB))
    assert caught.value.attributes == {"payload_bytes": MiB, "slab_bytes": MiB}


def test_a_draining_shard_takes_no_engine_until_it_stops() -> None:
    harness = CoreHarness()
    harness.send(ev.Drain())
    with pytest.raises(Unavailable):
        harness.attach()
    harness.send(ev.Drain(undo=True))
    assert harness.attach()


def test_a_draining_shard_serves_what_it_has_and_stores_nothing() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, CHAIN[:1])
    harness.send(ev.Drain())
    assert harness.reserve(engine, 2) == []
    answer = harness.result(harness.acquire(engine, CHAIN))
    assert (len(answer.blocks), answer.miss) == (1, MissReason.DRAINING)
    assert harness.resolves == []


def test_re_attaching_takes_no_second_place() -> None:
    """Attachments are limited."""
    harness = CoreHarness()
    for number in range(ATTACHMENTS_MAX):
        harness.attach(make_spec(str(number)))
    with pytest.raises(Exhausted):
        harness.attach(make_spec("one too many"))
    assert harness.attach(make_spec("7"))
    assert harness.state.attachment_count == ATTACHMENTS_MAX


def test_an_overtaken_attach_takes_nothing_back() -> None:
    harness = CoreHarness()
    spec = make_spec()
    first = harness.attach(replace(spec, attempt=1))
    second = harness.attach(replace(spec, attempt=2))
    written = harness.reserve(second, 2)
    for late in (1, 2):  # the first one once more, and the second one doubled
        op = harness.next_op()
        harness.send(ev.Attach(op, replace(spec, attempt=late)))
        with pytest.raises(NotAttached, match="overtaken"):
            harness.reply(op)
    assert harness.slots("writing") == len(written) == 2
    assert harness.count("attach_overtaken") == 2
    assert harness.state.attachment_count == 1
    assert first != second


def test_calls_without_an_attachment_are_refused() -> None:
    harness = CoreHarness()
    gone = harness.attach()
    harness.send(ev.Detach(gone))
    for attachment in (gone, AttachmentId(99)):
        for event in (
            ev.Reserve(harness.next_op(), attachment, 1),
            ev.Seal(harness.next_op(), attachment, ()),
            ev.Abort(harness.next_op(), attachment, ()),
            ev.Release(harness.next_op(), attachment, ()),
            ev.Renew(harness.next_op(), attachment, ()),
        ):
            harness.send(event)
            with pytest.raises(NotAttached):
                harness.reply(event.op)
        with pytest.raises(NotAttached):
            harness.result(harness.acquire(attachment, CHAIN))


def test_leaving_twice_or_never_having_been_there_is_nothing() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    for _ in range(2):
        assert harness.send(ev.Detach(engine)) == []
        assert harness.send(ev.AttachmentLost(engine)) == []
    assert harness.send(ev.EngineGone(make_spec().engine_id)) == []


def test_what_is_aborted_before_a_detach_is_free_at_once() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 3)
    harness.send(ev.Abort(harness.next_op(), engine, tuple(refs)))
    harness.send(ev.Detach(engine))
    assert harness.slots("free") == harness.state.capacity
    assert not harness.headers, "a header that says somebody is writing must not stay"
    assert not harness.watched, "there is nothing to wait for"


@pytest.mark.parametrize("how", [ev.Detach, ev.AttachmentLost])
def test_reservations_rest_until_the_engine_is_gone(
    how: type[ev.Detach] | type[ev.AttachmentLost],
) -> None:
    """A graceful end says nothing about a worker, or a copier, in the middle of a copy."""
    harness = CoreHarness()
    spec = make_spec()
    engine = harness.attach(spec)
    refs = harness.reserve(engine, 3)
    harness.send(how(engine))
    assert harness.watched == [spec.engine_id]
    harness.advance(1e6)
    assert harness.slots("quarantined") == 3, "a write reservation never ends by time"
    assert all(not harness.headers[ref.slot].is_stable for ref in refs)
    harness.send(ev.EngineGone(spec.engine_id))
    assert harness.slots("quarantined") == 0
    assert harness.slots("free") == harness.state.capacity
    assert not harness.headers, "a header that says somebody is writing must not stay"


def test_re_attaching_ends_the_quarantine() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 3)
    harness.send(ev.AttachmentLost(engine))
    again = harness.attach()
    assert harness.slots("quarantined") == 0
    items = harness.items(refs, CHAIN)
    assert harness.statuses(harness.begin_seal(again, items)) == [SealStatus.STALE] * 3


def test_re_attaching_early_ends_the_old_attachment() -> None:
    """The loss of the old one was not noticed yet."""
    harness = CoreHarness()
    old = harness.attach()
    harness.store(old, CHAIN[:1])
    lease = harness.hit(old, CHAIN[:1])
    harness.reserve(old, 2)
    new = harness.attach()
    assert harness.state.attachment_count == 1
    assert (harness.slots("writing"), harness.slots("leased")) == (0, 0)
    kept = harness.reserve(new, 2)
    harness.send(ev.AttachmentLost(old))
    assert harness.slots("writing") == len(kept), "a late loss of the old one must not touch the new one"
    harness.release(new, lease.lease_id)
    assert harness.count("lease_release_ignored") == 1


@pytest.mark.parametrize("epoch", [1 << 31, 1 << 32, 253_402_300_799, EPOCH_MAX])
def test_attachment_numbers_fit_a_message_in_any_year(epoch: int) -> None:
    """The clock may say any year."""
    state = ShardState(NodeId("n"), BootEpoch(epoch), Geometry(MiB, 1))
    (answer,) = state.handle(ev.Attach(1, make_spec()), 0.0)
    assert isinstance(answer, Reply)
    number = answer.value.attachment  # type: ignore[attr-defined]
    said = shard_pb2.Attached(attachment_id=number, epoch=epoch)
    read = shard_pb2.Attached.FromString(said.SerializeToString())
    assert (read.attachment_id, read.epoch) == (number, epoch)
    assert number >> 20 == epoch, "numbers of other boots are others"


def test_a_late_report_of_a_gone_engine_spares_its_return() -> None:
    harness = CoreHarness()
    harness.send(ev.AttachmentLost(harness.attach()))
    again = harness.attach()
    harness.reserve(again, 2)
    harness.send(ev.EngineGone(make_spec().engine_id))
    assert harness.slots("writing") == 2


def test_the_end_of_one_engine_does_not_touch_another() -> None:
    harness = CoreHarness()
    one, other = harness.attach(make_spec("one")), harness.attach(make_spec("other"))
    harness.reserve(one, 1)
    refs = harness.reserve(other, 1)
    harness.send(ev.AttachmentLost(one))
    harness.send(ev.EngineGone(make_spec("one").engine_id))
    harness.write(refs[0], CHAIN[0])
    op = harness.begin_seal(other, harness.items(refs, CHAIN))
    harness.digest_all()
    assert harness.statuses(op) == [SealStatus.SEALED]


@pytest.mark.parametrize("how", [ev.Detach, ev.AttachmentLost])
def test_what_was_sealed_before_the_end_is_kept(how: type[ev.Detach] | type[ev.AttachmentLost]) -> None:
    """Seal means that the workers are done: the digest may come after the engine left."""
    harness = CoreHarness()
    engine = harness.attach()
    refs = harness.reserve(engine, 2)
    harness.write(refs[0], CHAIN[0])
    op = harness.begin_seal(engine, harness.items(refs[:1], CHAIN))
    harness.send(how(engine))
    assert harness.open(op)
    harness.digest_all()
    assert harness.statuses(op) == [SealStatus.SEALED]
    assert harness.keys_held() == {CHAIN[0]}


@pytest.mark.parametrize("how", [ev.Detach, ev.AttachmentLost])
def test_open_acquisitions_of_a_leaving_engine_answer_empty(
    how: type[ev.Detach] | type[ev.AttachmentLost],
) -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, CHAIN[:1])
    op = harness.acquire(engine, CHAIN)
    harness.send(how(engine))
    assert harness.result(op).miss is MissReason.DETACHED
    assert harness.result(op).blocks == ()
    assert (harness.slots("leased"), harness.state.lease_count) == (0, 0)
    assert harness.resolved(op) == []


@pytest.mark.parametrize("how", [ev.Detach, ev.AttachmentLost])
def test_leases_of_an_engine_that_leaves_end(how: type[ev.Detach] | type[ev.AttachmentLost]) -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, CHAIN)
    harness.hit(engine, CHAIN)
    assert harness.slots("leased") == 3
    harness.send(how(engine))
    assert (harness.slots("leased"), harness.state.lease_count) == (0, 0)


def test_a_lease_nobody_renews_frees_its_pins() -> None:
    harness = CoreHarness(lease_seconds=10.0)
    engine = harness.attach()
    harness.store(engine, CHAIN)
    harness.hit(engine, CHAIN)
    harness.advance(9.999)
    assert harness.slots("leased") == 3
    harness.advance(0.001)
    assert harness.slots("leased") == 0
    assert harness.count("leases_expired") == 1


def test_renewing_keeps_the_named_leases() -> None:
    harness = CoreHarness(lease_seconds=10.0)
    engine = harness.attach()
    harness.store(engine, CHAIN)
    leases = (harness.hit(engine, CHAIN[:1]).lease_id, harness.hit(engine, CHAIN).lease_id)
    for _ in range(5):
        harness.advance(9.0)
        harness.send(ev.Renew(harness.next_op(), engine, leases))
    assert (harness.slots("leased"), harness.state.lease_count) == (3, 2)


def test_a_lease_is_released_by_its_holder_and_once() -> None:
    harness = CoreHarness()
    engine, other = harness.attach(make_spec("one")), harness.attach(make_spec("other"))
    harness.store(engine, CHAIN)
    lease = harness.hit(engine, CHAIN).lease_id
    harness.release(other, lease)
    assert harness.slots("leased") == 3
    harness.release(engine, lease, lease, LeaseId(99))
    assert harness.slots("leased") == 0
    assert harness.count("lease_release_ignored") == 3


def test_a_block_leased_twice_stays_until_both_are_released() -> None:
    harness = CoreHarness()
    engine = harness.attach()
    harness.store(engine, CHAIN[:1])
    first, second = harness.hit(engine, CHAIN[:1]), harness.hit(engine, CHAIN[:1])
    assert first.blocks == second.blocks and first.lease_id != second.lease_id
    harness.release(engine, first.lease_id)
    assert harness.slots("leased") == 1
    harness.release(engine, second.lease_id)
    assert harness.slots("leased") == 0


def test_nothing_is_due_when_nothing_is_open() -> None:
    harness = CoreHarness()
    assert harness.state.next_deadline() is None
    assert harness.geometry == Geometry(slab_bytes=MiB, slab_count=2)
    assert isinstance(harness.reserve(harness.attach(), 1)[0], BlockRef)
    assert harness.state.next_deadline() is None, "reservations are not timed"


def test_an_engine_with_too_many_window_groups_is_refused() -> None:
    group = WindowGroup(make_layout(SMALL), Window(sliding_tokens=64))
    with pytest.raises(InvalidRequest, match="window groups"):
        CoreHarness().attach(replace(make_spec(), window_groups=(group,) * (WINDOW_GROUPS_MAX + 1)))
