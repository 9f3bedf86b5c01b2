"""What the puller accepts, and what it says of everything else. The fake transport breaks what real ones break."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvservice.core.events import PullResult
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockHandle
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.eventually import eventually
from kvservice.testing.fake_transport import FakeNetwork, Faults
from kvservice.testing.unique import unique_name
from kvservice.transfer.base import Copy
from kvservice.transfer.job import DoneCallback, PullItem, PullJob
from kvservice.transfer.puller import Puller
from kvservice.transfer.scratch import SCRATCH_HEADERS
from kvservice.transfer.silence import SILENT_SECONDS
from kvservice.transfer.ways import pack_ways
from kvservice.units import BlockKey, BootEpoch, Generation, MiB, NodeId, SlotIndex, SpanRoute
from tests.integration.engine import content

PAYLOAD = 65536
OK, STALE, CORRUPT, FAILED, STUCK = PullResult


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rig:
    puller: Puller
    reader: Segment
    source: Segment
    faults: Faults
    clock: Clock
    description: bytes
    done: queue.SimpleQueue[tuple[int, tuple[PullResult, ...]]]
    writes_ended: queue.SimpleQueue[int]

    def publish(self, slot: int, key: BlockKey, generation: int = 2) -> BlockHandle:
        """Write a sealed block into the source."""
        data = content(key, PAYLOAD)
        self.source.payload(SlotIndex(slot), PAYLOAD)[:] = data
        digest = digest_payload(data, key)
        header = SlotHeader(self.source.epoch, Generation(generation), key, PAYLOAD, SpanRoute(0), digest, slot)
        self.source.write_header(SlotIndex(slot), header)
        return BlockHandle(key, SlotIndex(slot), Generation(generation), PAYLOAD, digest, slot)

    def pull(self, handles: list[BlockHandle], seconds: float = 50.0) -> tuple[PullResult, ...]:
        self.submit(handles, seconds)
        return self.done.get(timeout=10)[1]

    def submit(
        self,
        handles: list[BlockHandle],
        seconds: float = 50.0,
        epoch: int | None = None,
        on_done: DoneCallback | None = None,
    ) -> None:
        items = tuple(PullItem(handle, SlotIndex(20 + i)) for i, handle in enumerate(handles))
        job = PullJob(
            7,
            NodeId("peer"),
            BootEpoch(epoch or self.source.epoch),
            self.description,
            self.source.geometry,
            PAYLOAD,
            items,
            self.clock.now + seconds,
        )
        self.puller.submit(job, on_done or (lambda job_id, v: self.done.put((job_id, v))), self.writes_ended.put)


def key(n: int) -> BlockKey:
    return BlockKey(n.to_bytes(16, "big"))


@pytest.fixture
def rig() -> Iterator[Rig]:
    geometry = plan_geometry(24 * MiB, 12 * MiB)
    service = f"puller{unique_name()}"
    made = [Segment.create(segment_path(service, n, Path("/dev/shm")), geometry, n) for n in ("reader", "source")]
    for segment in made:
        segment.assign_slab(0, PAYLOAD)
    network = FakeNetwork()
    description = pack_ways({"fake": network.transport(made[1]).describe()})
    clock = Clock()
    puller = Puller(made[0], lambda: network.transport(made[0]), clock)
    puller.start()
    reader, source = made
    yield Rig(puller, reader, source, network.faults, clock, description, queue.SimpleQueue(), queue.SimpleQueue())
    puller.close()
    for segment in made:
        segment.unlink()
        segment.close()


def test_unchanged_blocks_arrive_whole(rig: Rig) -> None:
    handles = [rig.publish(i, key(i)) for i in range(12)]
    assert rig.pull(handles) == (OK,) * 12
    for i in range(12):
        assert bytes(rig.reader.payload(SlotIndex(20 + i), PAYLOAD)) == content(key(i), PAYLOAD)
    assert rig.puller.counters()["fake_bytes"] == 12 * PAYLOAD


def test_flipped_byte_is_corrupt(rig: Rig) -> None:
    handles = [rig.publish(0, key(0)), rig.publish(1, key(1))]
    rig.source.payload(SlotIndex(1), PAYLOAD)[1234] ^= 1
    assert rig.pull(handles) == (OK, CORRUPT)


def test_whole_bytes_of_another_block_are_corrupt(rig: Rig) -> None:
    handles = [rig.publish(0, key(0))]
    rig.source.payload(SlotIndex(0), PAYLOAD)[:] = content(key(99), PAYLOAD)
    assert rig.pull(handles) == (CORRUPT,)


def test_slot_rewritten_under_the_reader_is_stale(rig: Rig) -> None:
    handles = [rig.publish(0, key(0))]
    rig.faults.before_copy = lambda: rig.publish(0, key(5), generation=4) and None
    assert rig.pull(handles) == (STALE,)


@pytest.mark.parametrize("change", ["generation", "key", "length", "digest", "epoch", "writing", "cleared"])
def test_header_that_differs_from_the_handle_is_stale(rig: Rig, change: str) -> None:
    handle = rig.publish(0, key(0))
    header = rig.source.read_header(SlotIndex(0))
    assert header is not None
    changed = {
        "generation": replace(header, generation=Generation(4)),
        "writing": replace(header, generation=Generation(3)),
        "key": replace(header, key=key(8)),
        "length": replace(header, length=PAYLOAD - 1),
        "digest": replace(header, digest=header.digest ^ 1),
        "epoch": replace(header, epoch=BootEpoch(header.epoch + 1)),
        "cleared": None,
    }[change]
    if changed is None:
        rig.source.clear_header(SlotIndex(0))
    else:
        rig.source.write_header(SlotIndex(0), changed)
    assert rig.pull([handle]) == (STALE,)


def test_failed_read_fails_the_job_and_the_next_one_works(rig: Rig) -> None:
    handles = [rig.publish(i, key(i)) for i in range(3)]
    rig.faults.fail = True
    assert rig.pull(handles) == (FAILED,) * 3
    rig.faults.fail = False
    assert rig.pull(handles) == (OK,) * 3


def test_refused_post_fails_the_job_and_reconnects(rig: Rig) -> None:
    handles = [rig.publish(0, key(0))]
    rig.faults.refuse = True
    assert rig.pull(handles) == (FAILED,)
    rig.faults.refuse = False
    assert rig.pull(handles) == (OK,)
    assert rig.puller.counters()["connects"] == 2


def test_wedged_transfer_is_stuck_until_its_writes_end(rig: Rig) -> None:
    handles = [rig.publish(0, key(0))]
    rig.faults.hold = True
    rig.submit(handles, seconds=5.0)
    with pytest.raises(queue.Empty):
        rig.done.get(timeout=0.3)
    rig.clock.now += 6.0
    assert rig.done.get(timeout=10) == (7, (STUCK,))
    with pytest.raises(queue.Empty):
        rig.writes_ended.get(timeout=0.3)
    rig.faults.hold = False
    assert rig.writes_ended.get(timeout=10) == 7


def test_stuck_transfer_that_fails_later_has_ended_its_writes(rig: Rig) -> None:
    """Or its slots would be lost: the shard waits for that word."""
    rig.faults.hold = True
    rig.submit([rig.publish(0, key(0))], seconds=5.0)
    with pytest.raises(queue.Empty):
        rig.done.get(timeout=0.2)
    rig.clock.now += 6.0
    assert rig.done.get(timeout=10) == (7, (STUCK,))
    rig.faults.fail, rig.faults.hold = True, False
    assert rig.writes_ended.get(timeout=10) == 7


def test_nothing_is_accepted_after_the_deadline(rig: Rig) -> None:
    handles = [rig.publish(0, key(0))]

    def late() -> None:
        rig.clock.now += 60.0

    rig.faults.before_copy = late
    assert rig.pull(handles, seconds=50.0) == (FAILED,)


def test_handle_outside_the_peer_is_a_failure_not_a_read(rig: Rig) -> None:
    handle = rig.publish(0, key(0))._replace(slot=SlotIndex(500 << 16))
    assert rig.pull([handle]) == (FAILED,)


def test_unreachable_peer_fails_at_once(rig: Rig) -> None:
    handle = rig.publish(0, key(0))
    rig.description = pack_ways({"fake": b"nowhere"})
    assert rig.pull([handle]) == (FAILED,)


def test_new_epoch_of_a_peer_is_a_new_connection(rig: Rig) -> None:
    handle = rig.publish(0, key(0))
    assert rig.pull([handle]) == (OK,)
    rig.submit([handle], epoch=rig.source.epoch + 1)
    assert rig.done.get(timeout=10)[1] == (STALE,), "the header still names the old epoch"
    assert rig.puller.counters()["connects"] == 2


def test_close_answers_everything_that_is_open(rig: Rig) -> None:
    rig.faults.hold = True
    rig.submit([rig.publish(0, key(0))])
    with pytest.raises(queue.Empty):
        rig.done.get(timeout=0.2)
    rig.puller.close()
    assert rig.done.get(timeout=5)[1] == (FAILED,)


def test_close_ends_the_writes_of_what_was_stuck(rig: Rig) -> None:
    rig.faults.hold = True
    rig.submit([rig.publish(0, key(0))], seconds=5.0)
    with pytest.raises(queue.Empty):
        rig.done.get(timeout=0.2)
    rig.clock.now += 6.0
    assert rig.done.get(timeout=10)[1] == (STUCK,)
    rig.puller.close()
    assert rig.writes_ended.get(timeout=5) == 7


def test_job_submitted_after_close_is_answered(rig: Rig) -> None:
    handle = rig.publish(0, key(0))
    rig.puller.close()
    assert rig.pull([handle]) == (FAILED,)


def test_transport_that_raises_fails_jobs_and_works_again(rig: Rig) -> None:
    handle = rig.publish(0, key(0))
    rig.faults.poll_error = RuntimeError("a bug in the transport")
    rig.submit([handle])
    assert rig.done.get(timeout=10)[1][0] in (FAILED, STUCK)
    rig.faults.poll_error = None
    assert rig.pull([handle]) == (OK,)
    assert rig.puller.counters()["poll_errors"] >= 1


def test_callback_that_raises_does_not_stop_the_next_job(rig: Rig) -> None:
    handle = rig.publish(0, key(0))

    def broken(job: int, results: tuple[PullResult, ...]) -> None:
        raise RuntimeError("the loop is closed")

    rig.submit([handle], on_done=broken)
    assert rig.pull([handle]) == (OK,)
    assert rig.puller.counters()["callback_errors"] == 1


def test_completions_reported_twice_are_counted_once(rig: Rig) -> None:
    rig.faults.duplicate = True
    assert rig.pull([rig.publish(i, key(i)) for i in range(4)]) == (OK,) * 4
    assert rig.puller.counters()["blocks_ok"] == 4


def test_failed_read_starts_a_new_connection(rig: Rig) -> None:
    handle = rig.publish(0, key(0))
    rig.faults.fail = True
    assert rig.pull([handle]) == (FAILED,)
    rig.faults.fail = False
    assert rig.pull([handle]) == (OK,)
    assert rig.puller.counters()["connects"] == 2


def test_pull_results_are_counted(rig: Rig) -> None:
    handles = [rig.publish(i, key(i)) for i in range(3)]
    rig.source.clear_header(SlotIndex(0))
    rig.source.payload(SlotIndex(1), PAYLOAD)[:1] = b"!"
    assert rig.pull(handles) == (STALE, CORRUPT, OK)
    counters = rig.puller.counters()
    assert (counters["blocks_stale"], counters["blocks_corrupt"], counters["blocks_ok"]) == (1, 1, 1)
    assert counters["fake_bytes"] == PAYLOAD


def test_scattered_blocks_arrive_in_their_own_slots(rig: Rig) -> None:
    """Neighbouring ones do as well."""
    order = [3, 4, 5, 9, 1, 0, 7, 8]
    handles = [rig.publish(i, key(i)) for i in order]
    assert rig.pull(handles) == (OK,) * len(order)
    for position, i in enumerate(order):
        assert bytes(rig.reader.payload(SlotIndex(20 + position), PAYLOAD)) == content(key(i), PAYLOAD)


def test_source_headers_are_read_after_every_payload(rig: Rig) -> None:
    """In whatever order transfers end. A header read before a payload says nothing about bytes that came after it."""
    handle = rig.publish(0, key(0))
    copies = iter([lambda: None, lambda: rig.publish(0, key(0), generation=4)])
    rig.faults.newest_first = True
    rig.faults.before_copy = lambda: next(copies)() and None
    assert rig.pull([handle]) == (STALE,)


def test_a_deadline_that_passes_as_the_job_is_judged_counts(rig: Rig) -> None:
    handle, copies = rig.publish(0, key(0)), iter([False, True])
    looked = 0

    def clock() -> float:
        """Late from the second look on after the headers have landed: the first one lets the round begin."""
        nonlocal looked
        looked += landed
        return 100.0 + 60.0 * (looked > 1)

    landed = False

    def headers_land() -> None:
        nonlocal landed
        landed = next(copies)
        for verified in rig.puller._active[0].verifying:
            verified.result()

    rig.puller._clock, rig.faults.before_copy = clock, headers_land
    assert rig.pull([handle], seconds=50.0) == (FAILED,)


def test_scratch_headers_are_a_jobs_own_while_read_into(rig: Rig) -> None:
    read_into: list[set[int]] = []

    def hold_headers(copies: Sequence[Copy]) -> bool:
        if copies[0].length >= PAYLOAD:
            return False
        into = {offset for copy in copies for offset in range(copy.local_offset, copy.local_offset + copy.length)}
        if into not in read_into:
            read_into.append(into)
        return True

    rig.faults.holds = hold_headers
    rig.submit([rig.publish(i, key(i)) for i in range(4)], seconds=1.0)
    eventually(lambda: read_into, "the headers of the first job being read")
    rig.clock.now += 1.5
    assert rig.clock.now < 100.0 + SILENT_SECONDS, "the peer does not count as silent yet"
    assert rig.done.get(timeout=10)[1] == (FAILED,) * 4, "the headers are still being read"
    rig.submit([rig.publish(8, key(8))], seconds=5.0)
    eventually(lambda: len(read_into) == 2, "the headers of the second job being read")
    assert read_into[0].isdisjoint(read_into[1])
    rig.faults.holds = None
    assert rig.done.get(timeout=10)[1] == (OK,)


def test_counters_are_read_while_the_puller_adds_new_ones(rig: Rig) -> None:
    is_read = threading.Event()

    def add() -> None:
        number = 0
        while not is_read.is_set():
            rig.puller._count(f"counter_{number}")
            number += 1

    adding = threading.Thread(target=add)
    adding.start()
    try:
        sizes: set[int] = set()
        while len(sizes) < 20:  # each read went through a table that another thread was growing
            sizes.add(sum(1 for _ in rig.puller.counters().items()))
    finally:
        is_read.set()
        adding.join()


def greet(rig: Rig, description: bytes | None = None) -> queue.SimpleQueue[bool]:
    met: queue.SimpleQueue[bool] = queue.SimpleQueue()
    rig.puller.greet(NodeId("peer"), BootEpoch(rig.source.epoch), description or rig.description, met.put)
    return met


def test_a_greeted_peer_is_connected_and_read_once(rig: Rig) -> None:
    """The first pull from it finds the connection, and the page that was read harms no slot."""
    before = bytes(rig.reader.payload(SlotIndex(20), PAYLOAD))
    assert greet(rig).get(timeout=10) is True
    assert bytes(rig.reader.payload(SlotIndex(20), PAYLOAD)) == before
    assert rig.pull([rig.publish(0, key(0))]) == (OK,)
    assert rig.puller.counters()["connects"] == 1


def test_a_peer_that_cannot_be_connected_is_not_met(rig: Rig) -> None:
    assert greet(rig, b"nobody").get(timeout=10) is False
    rig.faults.refuse = True
    assert greet(rig).get(timeout=10) is False
    assert rig.puller._scratch.is_free


def test_a_greeting_that_fails_leaves_no_connection(rig: Rig) -> None:
    rig.faults.fail = True
    assert greet(rig).get(timeout=10) is False
    rig.faults.fail = False
    assert greet(rig).get(timeout=10) is True
    assert rig.puller.counters()["connects"] == 2


def test_a_peer_that_never_answers_a_greeting_delays_no_pull(rig: Rig) -> None:
    """A second greeting of it is refused, so that they do not pile up."""
    rig.faults.holds = lambda copies: copies[0].remote_offset == 0
    waiting = greet(rig)
    assert greet(rig).get(timeout=10) is False
    rig.clock.now += 10.0
    assert rig.pull([rig.publish(0, key(0))]) == (OK,)
    assert waiting.empty()
    rig.puller.close()
    assert waiting.get(timeout=10) is False
    assert greet(rig).get(timeout=10) is False, "the puller has ended"


def test_pulls_that_take_all_scratch_space_go_first(rig: Rig) -> None:
    assert rig.puller._scratch.take(SCRATCH_HEADERS) == 0
    assert greet(rig).get(timeout=10) is False


def silent(rig: Rig) -> None:
    """A pull waits for its peer, which gives nothing for seconds."""
    rig.faults.hold = True
    rig.submit([rig.publish(0, key(0))], seconds=50.0)
    with pytest.raises(queue.Empty):
        rig.done.get(timeout=0.2)
    rig.clock.now += SILENT_SECONDS + 1.0
    with pytest.raises(queue.Empty):  # until it has looked at its transport at this time
        rig.done.get(timeout=0.2)


def test_a_silent_peer_costs_no_further_pull_its_deadline(rig: Rig) -> None:
    """Nor slots, which would rest until those reads end."""
    silent(rig)
    for _ in range(3):
        assert rig.pull([rig.publish(1, key(1))]) == (FAILED,)
    assert rig.puller.counters()["peers_silent"] == 3
    assert rig.puller.counters()["connects"] == 1, "the reads under way go on"
    rig.faults.hold = False
    assert rig.done.get(timeout=10)[1] == (OK,)
    assert rig.pull([rig.publish(1, key(1))]) == (OK,)
    eventually(lambda: rig.puller._scratch.is_free, "the scratch area to be given back")


def test_a_peer_that_lost_one_read_is_read_again(rig: Rig) -> None:
    """Whoever finds it silent has it asked for one page, and its answer says that others need not fear."""
    silent(rig)
    lost = rig.source.geometry.payload_offset(SlotIndex(0), PAYLOAD)
    rig.faults.holds, rig.faults.hold = lambda copies: copies[0].remote_offset == lost, False
    assert rig.pull([rig.publish(1, key(1))]) == (FAILED,)
    eventually(lambda: rig.puller._scratch.is_free, "the page to be read")
    assert rig.pull([rig.publish(1, key(1))]) == (OK,)


def test_a_new_boot_of_a_silent_peer_is_read(rig: Rig) -> None:
    silent(rig)
    lost = rig.source.geometry.payload_offset(SlotIndex(0), PAYLOAD)
    rig.faults.holds, rig.faults.hold = lambda copies: copies[0].remote_offset == lost, False
    rig.submit([rig.publish(1, key(1))], epoch=rig.source.epoch + 1)
    results = {rig.done.get(timeout=10)[1] for _ in range(2)}
    assert results == {(FAILED,), (STALE,)}, "the header still names the old epoch"


def test_a_thread_that_was_busy_calls_nobody_silent(rig: Rig) -> None:
    """What has ended meanwhile is not known before the next look."""
    rig.faults.hold = True
    rig.submit([rig.publish(0, key(0))])
    with pytest.raises(queue.Empty):
        rig.done.get(timeout=0.2)
    is_busy, may_go_on = threading.Event(), threading.Event()

    def work(is_met: bool) -> None:
        is_busy.set()
        may_go_on.wait(10)

    rig.puller.greet(NodeId("other"), BootEpoch(1), pack_ways({"fake": b"nowhere"}), work)
    assert is_busy.wait(10)
    rig.clock.now += SILENT_SECONDS + 1.0
    rig.submit([rig.publish(1, key(1))])
    rig.faults.hold = False
    may_go_on.set()
    assert [rig.done.get(timeout=10)[1] for _ in range(2)] == [(OK,), (OK,)]


def test_reads_that_were_given_up_take_no_processor(rig: Rig) -> None:
    """A peer that stopped may keep them for minutes."""
    rig.faults.hold = True
    rig.submit([rig.publish(0, key(0))], seconds=1.0)
    with pytest.raises(queue.Empty):
        rig.done.get(timeout=0.2)
    rig.clock.now += 1.5
    assert rig.done.get(timeout=10)[1] == (STUCK,)
    before = rig.faults.polls
    time.sleep(1.0)
    assert rig.faults.polls - before < 50
    rig.faults.hold = False
    assert rig.writes_ended.get(timeout=10) == 7


def test_a_puller_needs_no_thread_after_its_start(rig: Rig) -> None:
    threading.stack_size(1 << 46)  # that no system has memory for
    try:
        with pytest.raises(RuntimeError, match="thread"):
            threading.Thread(target=int).start()
        assert rig.pull([rig.publish(0, key(0))]) == (OK,)
    finally:
        threading.stack_size(0)
    assert rig.pull([rig.publish(1, key(1))]) == (OK,)
