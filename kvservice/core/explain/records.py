"""What one shard remembers of recent requests, for `kvservice explain`. It is not read on a request's path.

A record holds the requested keys, so that their history can be looked up later, and how far the promise went. Records
are bounded in three ways: by age, by their number, and by the number of keys in them. Pure; one caller at a time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvservice.core.block.fingerprint import DIFFERENCES_TOLD, FieldDifference
from kvservice.core.block.keys import KEY_BYTES, KEYS_PER_REQUEST_MAX
from kvservice.core.block.tenants import NOBODY
from kvservice.core.explain.evictions import KEEP_SECONDS as EVICTIONS_KEEP_SECONDS
from kvservice.core.messages import EngineSpec, MissReason, RequestReport
from kvservice.units import NodeId, printable

KEEP_SECONDS = 900.0  # people ask about what just happened; older records are dropped
RECORDS_MAX = 4096  # with a few hundred bytes each; the oldest is dropped
KEYS_MAX = 262_144  # in all records: 4 MiB. The oldest records are dropped.
REQUEST_ID_CHARS_MAX = 128  # ids of engines are shorter; a client's longer one is cut, which does not fail its request
ANSWERED_MAX = 16  # records in one answer, the newest; Explanation.matching says how many there are
REFUSED_MAX = 16  # refused attaches that are remembered, the newest
assert KEEP_SECONDS <= EVICTIONS_KEEP_SECONDS, "a record is explained by evictions from before it"
assert KEYS_MAX >= KEYS_PER_REQUEST_MAX
LOCAL = "local"
TIER_MARK = "~"  # a tier is a source, and a holder, whose name begins with it; no node's name does


def place_name(source: str) -> str:
    """For people: a node by its id, or a tier in words, as 'disk tier'."""
    return f"{source.removeprefix(TIER_MARK)} tier" if source.startswith(TIER_MARK) else source


@dataclass(frozen=True, slots=True)
class SourceRun:
    """`count` consecutive blocks of a chain, from index `start` on, that came from one place."""

    start: int
    count: int
    source: str  # LOCAL, or the node or tier that they came from


@dataclass(slots=True)
class RequestRecord:
    """One request at this shard. Mutable: the answer and the report come later."""

    request_id: str
    spec: EngineSpec
    asked_at: float
    keys: bytes = b""  # the whole chain, packed
    skip: int = 0
    answered_at: float | None = None
    promised: int = 0
    runs: tuple[SourceRun, ...] = ()
    miss: MissReason = MissReason.NONE
    miss_at: int = 0  # index of the first block that was not promised
    miss_node: str = ""  # the node that was asked for that block and did not deliver it
    found_until: int = 0  # the directory knew a holder of each block before this index
    report: RequestReport | None = None
    reported_at: float | None = None  # when the engine reported the end
    account: str = NOBODY  # the tenant that it belongs to
    handoff_node: str = ""  # the node whose engine computes the missing blocks; "" = no hand-off
    handed_from: int = 0  # with a hand-off: the request waited for the blocks from this index on


@dataclass(frozen=True, slots=True)
class RefusedAttach:
    at: float
    model: str
    namespace: str
    message: str
    account: str = NOBODY
    differences: tuple[FieldDifference, ...] = ()  # the first DIFFERENCES_TOLD; `ours` is the refused engine's
    difference_count: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `Explain`."""

    records: tuple[RequestRecord, ...]
    matching: int  # requests that match, which may be more than `records` has
    remembered: int
    refused: tuple[RefusedAttach, ...]


class RequestRecords:
    """Records by request id and time. A request that asks again (preempted) has a record each time, with one id."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, RequestRecord] = OrderedDict()  # by number, oldest first
        self._by_op: dict[int, int] = {}  # open calls
        self._latest: dict[tuple[bytes, str], int] = {}  # by engine and request id: two engines may use the same id
        self._key_bytes = 0
        self._next = 1
        self._refused: deque[RefusedAttach] = deque(maxlen=REFUSED_MAX)

    def __len__(self) -> int:
        return len(self._records)

    def asked(
        self,
        op: int,
        spec: EngineSpec,
        request_id: str,
        keys: bytes,
        skip: int,
        now: float,
        account: str = NOBODY,
        handoff_node: str = "",
    ) -> None:
        """A request begins. `keys` is its whole chain, packed; `handoff_node` the node that it waits for, if any."""
        count = len(keys) // KEY_BYTES
        record = RequestRecord(
            request_id, spec, now, keys, skip, account=account, handoff_node=handoff_node, handed_from=count
        )
        self._by_op[op] = self._add(record, now)

    def answered(
        self,
        op: int,
        promised: int,
        origins: Mapping[int, NodeId],
        miss: MissReason,
        miss_node: str,
        now: float,
        found_until: int = 0,
        handed_from: int | None = None,
    ) -> None:
        """Note the answer of a request.

        `origins` maps the index of every fetched block to the node it came from. `handed_from` is the first block that
        the request waited for in a hand-off; None when it waited for none.
        """
        record = self._records.get(self._by_op.pop(op, 0))
        if record is None:
            return
        record.answered_at, record.promised, record.found_until = now, promised, found_until
        record.miss, record.miss_at, record.miss_node = miss, record.skip + promised, miss_node
        record.runs = _runs(record.skip, record.skip + promised, origins)
        record.handed_from = record.handed_from if handed_from is None else handed_from

    def cancelled(self, op: int) -> None:
        self._by_op.pop(op, None)

    def reported(self, spec: EngineSpec, report: RequestReport, now: float, account: str = NOBODY) -> None:
        """The engine has finished a request. A request that never asked the shard gets its record now."""
        number = self._latest.get((spec.engine_id, report.request_id))
        record = None if number is None else self._records.get(number)
        if record is None:
            record = self._records[self._add(RequestRecord(report.request_id, spec, now, account=account), now)]
        record.report, record.reported_at = report, now

    def refused(
        self,
        spec: EngineSpec,
        message: str,
        now: float,
        account: str = NOBODY,
        differences: Sequence[FieldDifference] = (),
    ) -> None:
        told = tuple(differences[:DIFFERENCES_TOLD])
        self._refused.append(RefusedAttach(now, spec.model, spec.namespace, message, account, told, len(differences)))

    def slowest(self, count: int, now: float, account: str | None = None) -> list[RequestRecord]:
        """The requests that waited longest for their answer, the slowest first. O(RECORDS_MAX): for people."""
        self._expire(now)
        answered = (
            record
            for record in self._records.values()
            if record.answered_at is not None and (account is None or record.account == account)
        )
        return heapq.nlargest(count, answered, key=took_seconds)

    def latest_refused(self, account: str | None = None) -> list[RefusedAttach]:
        return [refused for refused in self._refused if account is None or refused.account == account]

    def find(self, wanted: str, now: float, account: str | None = None) -> Explanation:
        """The records of the request with this id, else of all whose id begins with it, the newest last.

        With an account, only its own requests are looked at.
        """
        self._expire(now)
        records = [record for record in self._records.values() if account is None or record.account == account]
        refused = tuple(self.latest_refused(account))
        matching = [record for record in records if record.request_id == wanted]
        if not matching and wanted:
            matching = [record for record in records if record.request_id.startswith(wanted)]
        found = tuple(replace(record) for record in matching[-ANSWERED_MAX:])
        requests = len({record.request_id for record in matching})
        return Explanation(found, requests, len({r.request_id for r in records}), refused)

    def _add(self, record: RequestRecord, now: float) -> int:
        self._expire(now)
        number = self._next
        self._next += 1
        self._records[number] = record
        self._latest[_asker(record)] = number
        self._key_bytes += len(record.keys)
        while len(self._records) > RECORDS_MAX or (self._key_bytes > KEY_BYTES * KEYS_MAX and len(self._records) > 1):
            self._drop()
        return number

    def _expire(self, now: float) -> None:
        while self._records and next(iter(self._records.values())).asked_at + KEEP_SECONDS < now:
            self._drop()

    def _drop(self) -> None:
        number, record = self._records.popitem(last=False)
        self._key_bytes -= len(record.keys)
        if self._latest.get(_asker(record)) == number:
            del self._latest[_asker(record)]

    def check_invariants(self) -> None:
        assert self._key_bytes == sum(len(record.keys) for record in self._records.values())
        assert len(self._records) <= RECORDS_MAX
        for asker, number in self._latest.items():
            assert _asker(self._records[number]) == asker


def took_seconds(record: RequestRecord) -> float:
    """From the request to its answer; 0 for a request without an answer."""
    return 0.0 if record.answered_at is None else record.answered_at - record.asked_at


def _asker(record: RequestRecord) -> tuple[bytes, str]:
    return record.spec.engine_id, record.request_id


def _runs(start: int, end: int, origins: Mapping[int, NodeId]) -> tuple[SourceRun, ...]:
    found: list[SourceRun] = []
    for index in range(start, end):
        source = origins.get(index, LOCAL)
        if found and found[-1].source == source:
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(SourceRun(index, 1, source))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One thing that a shard knows of one block. `at` is on the shard's clock."""

    index: int  # of the block's key in the question
    state: str  # "held", "sealing" or "gone"
    at: float
    cause: str = ""
    caused_by: str = ""
    engine: str = ""  # the engine that stored it or is storing it: the beginning of its id
    held_seconds: float = 0.0  # for state "gone": how long it had been here
    idle_seconds: float = 0.0  # for state "gone": since its last use, at its eviction
    reason: str = ""  # for state "gone": why the policy chose it, in words; "" when it had waited longest


def name_engine(engine_id: bytes) -> str:
    """An engine's name for people; "" for none."""
    return engine_id.hex()[:8]


def check_request_id(text: str) -> str:
    """The id, cut and made printable. It comes from a client, and a request must not fail because of its id."""
    return printable(text[:REQUEST_ID_CHARS_MAX])[:REQUEST_ID_CHARS_MAX]
