"""Rules of core.store.leases: a promise ends by its holder, by its holder's end, or by time, and exactly once."""

from __future__ import annotations

from kvservice.core.store.leases import Lease, LeaseTable
from kvservice.core.store.slots import Slot
from kvservice.units import Generation, LeaseId, SlotIndex

ENGINE, PEER = ("engine", 1), ("peer", "node")
SLOTS = [Slot(SlotIndex(number), 1, Generation(0)) for number in range(4)]


def grant(table: LeaseTable, holder: tuple[str, int | str] = ENGINE, now: float = 0.0, duration: float = 10.0) -> Lease:
    lease = table.grant(holder, (SLOTS[1], SLOTS[2]), now, duration)
    table.check_invariants()
    return lease


def test_release_gives_the_lease_back_once() -> None:
    table = LeaseTable()
    lease = grant(table)
    assert table.release(lease.lease_id, ENGINE) is lease
    assert table.release(lease.lease_id, ENGINE) is None
    assert table.counters["leases_released"] == 1
    assert table.counters["lease_release_ignored"] == 1
    assert len(table) == 0


def test_the_wrong_holder_is_refused_without_side_effect() -> None:
    table = LeaseTable()
    lease = grant(table)
    for holder in (PEER, ("engine", 2), ("peer", 1)):
        assert table.release(lease.lease_id, holder) is None
    assert table.slots() == {1: 1, 2: 1}
    assert table.release(lease.lease_id, ENGINE) is lease


def test_ids_are_single_use() -> None:
    table = LeaseTable()
    ids = []
    for _ in range(3):
        lease = grant(table)
        ids.append(lease.lease_id)
        table.release(lease.lease_id, ENGINE)
    assert len(set(ids)) == 3
    assert 0 not in ids, "zero means: no lease"
    assert table.release(LeaseId(99), ENGINE) is None


def test_a_lease_ends_at_its_time_and_not_before() -> None:
    table = LeaseTable()
    lease = grant(table, now=5.0)
    assert table.next_deadline() == 15.0
    assert table.expire(14.999) == []
    assert table.expire(15.0) == [lease]
    assert table.expire(99.0) == []
    assert table.counters["leases_expired"] == 1
    assert table.next_deadline() is None


def test_renewal_moves_only_the_holders_named_leases() -> None:
    table = LeaseTable()
    mine = [grant(table), grant(table, now=2.0)]
    other, unnamed = grant(table, PEER), grant(table)
    table.renew(ENGINE, [lease.lease_id for lease in [*mine, other]], 8.0, 10.0)
    assert table.expire(17.9) == [other, unnamed]
    assert sorted(lease.lease_id for lease in table.expire(18.0)) == sorted(lease.lease_id for lease in mine)


def test_renewal_never_shortens() -> None:
    table = LeaseTable()
    lease = grant(table, duration=100.0)
    table.renew(ENGINE, [lease.lease_id], 1.0, 10.0)
    assert table.expire(99.0) == []
    assert table.expire(100.0) == [lease]


def test_renewed_many_times_a_lease_still_ends() -> None:
    table = LeaseTable()
    lease = grant(table)
    for second in range(1, 50):
        table.renew(ENGINE, [lease.lease_id], float(second), 10.0)
        assert table.expire(float(second)) == []
        table.check_invariants()
    assert len(table._deadlines) == 1, "renewing must not pile up entries"
    assert table.expire(59.0) == [lease]


def test_nobody_is_woken_for_leases_that_have_ended() -> None:
    table = LeaseTable()
    first, second, third = (grant(table, now=float(second)) for second in range(3))
    for lease in (second, first):
        table.release(lease.lease_id, ENGINE)
        table.check_invariants()
    assert table.next_deadline() == third.expires_at
    table.release(third.lease_id, ENGINE)
    assert table.next_deadline() is None


def test_renewing_what_nobody_holds_makes_no_lease() -> None:
    table = LeaseTable()
    table.renew(ENGINE, [LeaseId(1)], 0.0, 10.0)
    assert len(table) == 0 and table.next_deadline() is None


def test_the_end_of_a_holder_ends_its_leases_only() -> None:
    table = LeaseTable()
    mine, other = [grant(table), grant(table)], grant(table, PEER)
    assert table.end_holder(ENGINE) == mine
    assert table.end_holder(ENGINE) == []
    assert table.counters["leases_fenced"] == 2
    assert table.slots() == {1: 1, 2: 1}
    assert table.expire(10.0) == [other], "ended leases do not expire again"


def test_slots_are_counted_once_per_lease() -> None:
    table = LeaseTable()
    grant(table)
    table.grant(PEER, (SLOTS[2], SLOTS[2], SLOTS[3]), 0.0, 1.0)
    assert table.slots() == {1: 1, 2: 3, 3: 1}


def test_ended_leases_leave_nothing_behind_after_their_time() -> None:
    table = LeaseTable()
    for _ in range(100):
        table.release(grant(table).lease_id, ENGINE)
    assert table.expire(10.0) == []
    assert not table._deadlines and not table._by_holder and not table._leases
