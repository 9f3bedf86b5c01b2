"""Rules of acquire.pulls: when a slot may be used again, and when a peer's lease goes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from kvservice.core.acquire.pulls import LEASE_MARGIN_SECONDS, PULL_SECONDS_MAX, SUSPECT_SECONDS, Pulls
from kvservice.core.actions import Action, Locate, Pull, ReleaseRemote
from kvservice.core.context import ShardContext
from kvservice.core.events import PullResult
from kvservice.core.explain.records import RequestRecords
from kvservice.core.messages import LocateResult
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.core.slices import DEFAULT_SLICES, Slices
from kvservice.core.store.admission import Admission
from kvservice.core.store.blocks import NO_KEY, BlockStore, Want
from kvservice.core.store.freshness import Freshness
from kvservice.core.store.leases import LeaseTable
from kvservice.core.store.slots import Slot, SlotState
from kvservice.core.store.worth import GuardedWorth
from kvservice.core.transitions import InvalidTransition
from kvservice.testing.builders import SMALL, make_chain, make_holder, make_located
from kvservice.units import BootEpoch, MiB, NodeId

CHAIN = make_chain(3)
PEER = make_holder("peer")


class Owner:
    """Gives back every slot that arrives, and remembers what it was told."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.located_calls: list[tuple[int, LocateResult | None]] = []
        self.arrivals: list[tuple[int, BlockHandle]] = []
        self.ends: list[tuple[PullResult, ...]] = []

    def located(self, number: int, result: LocateResult | None, sent_at: float, now: float) -> None:
        self.located_calls.append((number, result))

    def arrived(self, number: int, position: int, handle: BlockHandle, slot: Slot, now: float) -> None:
        self.arrivals.append((position, handle))
        self._store.abort(slot)

    def pulled(self, number: int, results: tuple[PullResult, ...], now: float) -> None:
        self.ends.append(results)


class Bench:
    def __init__(self) -> None:
        self.actions: list[Action] = []
        geometry, counters = Geometry(MiB, 2), Counter[str]()
        self.store = BlockStore(geometry, BootEpoch(1), GuardedWorth(), self.actions.append)
        context = ShardContext(
            NodeId("here"),
            BootEpoch(1),
            geometry,
            10.0,
            has_directory=True,
            store=self.store,
            leases=LeaseTable(),
            admission=Admission(lambda: 8, counters),
            records=RequestRecords(),
            counters=counters,
            emit=self.actions.append,
            is_draining=lambda: False,
            model_of=lambda attachment: "model",
            fingerprint_of=lambda attachment: b"",
            freshness=Freshness(),
            slices=Slices(DEFAULT_SLICES, self.actions.append),
        )
        self.pulls = Pulls(context)
        self.owner = Owner(self.store)

    def begin(self) -> tuple[int, tuple[Slot, ...]]:
        """A pull of three blocks that is under way."""
        number = self.pulls.open(self.owner, PEER, SMALL)
        located = make_located(CHAIN)
        slots = self.store.reserve(3, NO_KEY, Want(SMALL, now=0.0)).slots
        handles = [handle for handle in located.handles if handle is not None]
        self.pulls.begin(number, located, handles, slots, sent_at=0.0)
        return number, slots

    @property
    def released(self) -> int:
        return sum(isinstance(action, ReleaseRemote) for action in self.actions)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.pulls.check_invariants()
    made.store.check_invariants()


OK, STALE, STUCK, CORRUPT = PullResult.OK, PullResult.STALE, PullResult.STUCK, PullResult.CORRUPT


def test_each_pull_has_a_number_of_its_own(bench: Bench) -> None:
    numbers = [bench.pulls.open(bench.owner, PEER, SMALL) for _ in range(3)]
    assert len(set(numbers)) == 3 and bench.pulls.owned_by(bench.owner) == set(numbers)
    bench.pulls.locate(numbers[1], CHAIN)
    (asked,) = bench.actions
    assert isinstance(asked, Locate) and (asked.fetch, asked.holder, asked.keys) == (numbers[1], PEER, CHAIN)


def test_lease_goes_back_when_nothing_is_read(bench: Bench) -> None:
    number = bench.pulls.open(bench.owner, PEER, SMALL)
    bench.pulls.drop(number, make_located(CHAIN))
    assert bench.released == 1 and bench.pulls.is_idle
    bench.pulls.drop(bench.pulls.open(bench.owner, PEER, SMALL))
    assert bench.released == 1, "nothing was leased"


def test_answer_to_a_dropped_pull_reaches_nobody(bench: Bench) -> None:
    number = bench.pulls.open(bench.owner, PEER, SMALL)
    bench.pulls.drop(number)
    bench.pulls.located(number, make_located(CHAIN), 0.0, 0.0)
    assert bench.owner.located_calls == []


def test_lease_goes_back_once_when_all_is_read(bench: Bench) -> None:
    number, slots = bench.begin()
    bench.pulls.pulled(number, (OK, STALE, OK), 1.0)
    bench.pulls.pulled(number, (OK, OK, OK), 1.0)
    assert [position for position, _ in bench.owner.arrivals] == [0, 2]
    assert bench.owner.ends == [(OK, STALE, OK)]
    assert bench.released == 1 and bench.pulls.is_idle
    assert all(slot.state is SlotState.FREE for slot in slots)


def test_stuck_slot_rests_until_its_writes_end(bench: Bench) -> None:
    number, slots = bench.begin()
    bench.pulls.pulled(number, (OK, STUCK), 1.0)
    assert bench.owner.ends == [(OK, STUCK, STUCK)], "a block that nothing was said about may still arrive"
    assert [slot.state for slot in slots[1:]] == [SlotState.QUARANTINED] * 2
    assert bench.released == 0, "something still reads under the lease"
    assert bench.pulls.owned_by(bench.owner) == set(), "its owner hears nothing more of it"
    bench.pulls.tick(1.0 + 10 * SUSPECT_SECONDS)
    assert slots[1].state is SlotState.QUARANTINED
    bench.pulls.writes_ended(number)
    assert [slot.state for slot in slots[1:]] == [SlotState.FREE] * 2 and bench.pulls.is_idle


def test_end_of_writes_before_the_results_frees_nothing(bench: Bench) -> None:
    number, slots = bench.begin()
    bench.pulls.writes_ended(number)
    assert [slot.state for slot in slots] == [SlotState.WRITING] * 3


def test_slot_with_wrong_bytes_rests_for_a_while(bench: Bench) -> None:
    number, slots = bench.begin()
    bench.pulls.pulled(number, (CORRUPT, OK, OK), 1.0)
    assert bench.released == 1 and slots[0].state is SlotState.QUARANTINED
    assert bench.pulls.next_deadline() == 1.0 + SUSPECT_SECONDS
    bench.pulls.tick(SUSPECT_SECONDS)
    assert slots[0].state is SlotState.QUARANTINED
    bench.pulls.tick(1.0 + SUSPECT_SECONDS)
    assert slots[0].state is SlotState.FREE and bench.pulls.next_deadline() is None


def test_the_holder_hears_of_what_was_not_as_leased(bench: Bench) -> None:
    number, _ = bench.begin()
    leased = bench.pulls._open[number].handles
    bench.pulls.pulled(number, (OK, CORRUPT, STALE), 1.0)
    (release,) = [action for action in bench.actions if isinstance(action, ReleaseRemote)]
    assert release.suspects == tuple(BlockRef(handle.slot, handle.generation) for handle in leased[1:])


@pytest.mark.parametrize(
    ("lease_seconds", "until", "deadline"),
    [(7.0, 100.0, 7.0), (7.0, 3.0, 3.0 + LEASE_MARGIN_SECONDS), (1e9, 1e9, PULL_SECONDS_MAX)],
)
def test_reading_stops_before_the_lease_ends(bench: Bench, lease_seconds: float, until: float, deadline: float) -> None:
    number = bench.pulls.open(bench.owner, PEER, SMALL)
    located = make_located(CHAIN[:1], lease_seconds=lease_seconds)
    slots = bench.store.reserve(1, NO_KEY, Want(SMALL, now=0.0)).slots
    handles = [handle for handle in located.handles if handle is not None]
    assert bench.pulls.begin(number, located, handles, slots, 0.0, until) == deadline - LEASE_MARGIN_SECONDS
    pull = bench.actions[-1]
    assert isinstance(pull, Pull) and pull.deadline == deadline - LEASE_MARGIN_SECONDS


def test_a_pull_begins_once(bench: Bench) -> None:
    number, _ = bench.begin()
    with pytest.raises(InvalidTransition, match=f"pull {number} is pulling, cannot drop"):
        bench.pulls.drop(number)
