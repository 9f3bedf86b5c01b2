"""What one shard remembers of recent requests, for `kvservice explain`. Nothing here is asked on a request's path.

A record holds the keys that were asked for, so that their history can be looked up later, and how far the promise went.
Bounded three ways: by time, by the number of records, and by the keys in them. Pure, with one caller.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvservice.core.block.keys import KEY_BYTES, pack_keys
from kvservice.core.block.tenants import NOBODY
from kvservice.core.explain.evictions import Eviction
from kvservice.core.messages import AcquireRequest, EngineSpec, MissReason, RequestReport
from kvservice.units import BlockKey, NodeId, printable

KEEP_SECONDS = 900.0
RECORDS_MAX = 4096
KEYS_MAX = 262_144  # in all records: 4 MiB
REQUEST_ID_CHARS_MAX = 128
ANSWERED_MAX = 16
REFUSED_MAX = 16
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class SourceRun:
    """`count` consecutive blocks of a chain, from `start` on, that came from one place."""

    start: int
    count: int
    source: str  # LOCAL, or the node they were fetched from


@dataclass(slots=True)
class RequestRecord:
    """One request at this shard. Mutable: answer and report come later."""

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
    miss_node: str = ""  # the node that was asked for it in vain
    sought: int = 0  # blocks before this index had a holder, said the directory
    report: RequestReport | None = None
    reported_at: float | None = None  # when the engine said that it ended
    account: str = NOBODY  # whose request it was
    handoff_node: str = ""  # the node whose engine was to compute what was missing; "" = no hand-off
    handed_from: int = 0  # of a hand-off: blocks from this index on were waited for


@dataclass(frozen=True, slots=True)
class RefusedAttach:
    at: float
    model: str
    namespace: str
    message: str
    account: str = NOBODY


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Explain` answers."""

    records: tuple[RequestRecord, ...]
    matching: int  # requests that fit, which may be more than are given
    remembered: int
    refused: tuple[RefusedAttach, ...]


class RequestRecords:
    """By request id and time. A request that asks again (preempted) has one record each time, under one id."""

    def __init__(self, keep_seconds: float = KEEP_SECONDS) -> None:
        self._keep_seconds = keep_seconds
        self._records: OrderedDict[int, RequestRecord] = OrderedDict()  # by number, oldest first
        self._by_op: dict[int, int] = {}  # open calls
        self._latest: dict[tuple[bytes, str], int] = {}  # by engine and request id: another engine may use the same
        self._key_bytes = 0
        self._next = 1
        self._refused: deque[RefusedAttach] = deque(maxlen=REFUSED_MAX)

    def __len__(self) -> int:
        return len(self._records)

    def asked(self, op: int, spec: EngineSpec, request: AcquireRequest, now: float, account: str = NOBODY) -> None:
        if not request.request_id:
            return
        keys = pack_keys(request.keys)
        node = "" if request.handoff is None else str(request.handoff.node_id)
        record = RequestRecord(
            request.request_id,
            spec,
            now,
            keys,
            request.skip,
            account=account,
            handoff_node=node,
            handed_from=len(request.keys),
        )
        number = self._add(record, now)
        self._by_op[op] = number

    def answered(
        self,
        op: int,
        promised: int,
        origins: Mapping[int, NodeId],
        miss: MissReason,
        miss_node: str,
        now: float,
        sought: int = 0,
        handed_from: int | None = None,
    ) -> None:
        """`origins`: the node of every block that was fetched, by its index in the chain. `handed_from`: the first
        that a hand-off was waited for; None where there was nothing to wait for."""
        record = self._records.get(self._by_op.pop(op, 0))
        if record is None:
            return
        record.answered_at, record.promised, record.sought = now, promised, sought
        record.miss, record.miss_at, record.miss_node = miss, record.skip + promised, miss_node
        record.runs = _runs(record.skip, record.skip + promised, origins)
        record.handed_from = record.handed_from if handed_from is None else handed_from

    def cancelled(self, op: int) -> None:
        self._by_op.pop(op, None)

    def reported(self, spec: EngineSpec, report: RequestReport, now: float, account: str = NOBODY) -> None:
        """The engine is done with a request. One that never asked gets its record now."""
        number = self._latest.get((spec.engine_id, report.request_id))
        record = None if number is None else self._records.get(number)
        if record is None:
            record = self._records[self._add(RequestRecord(report.request_id, spec, now, account=account), now)]
        record.report, record.reported_at = report, now

    def refused(self, spec: EngineSpec, message: str, now: float, account: str = NOBODY) -> None:
        self._refused.append(RefusedAttach(now, spec.model, spec.namespace, message, account))

    def find(self, wanted: str, now: float, account: str | None = None) -> Explanation:
        """Records of the request of this id; else of those whose id begins so, the newest last. With an account, as if
        there were only its requests."""
        self._expire(now)
        records = [record for record in self._records.values() if account is None or record.account == account]
        refused = tuple(refused for refused in self._refused if account is None or refused.account == account)
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
        while self._records and next(iter(self._records.values())).asked_at + self._keep_seconds < now:
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

    index: int  # in the question
    state: str  # "held", "sealing" or "gone"
    at: float
    cause: str = ""
    caused_by: str = ""
    engine: str = ""  # who stored it, or is storing it: the beginning of its id
    held_seconds: float = 0.0  # of a gone one: how long it had been here
    idle_seconds: float = 0.0  # of a gone one: since its last use when it went


def name_engine(engine_id: bytes) -> str:
    """As people are told of an engine; "" for none."""
    return engine_id.hex()[:8]


def check_request_id(text: str) -> str:
    """Ids come from clients: cut and made printable, not refused, because a request must not fail for it."""
    return printable(text[:REQUEST_ID_CHARS_MAX])[:REQUEST_ID_CHARS_MAX]


def find_history(
    keys: tuple[BlockKey, ...],
    held: Mapping[BlockKey, tuple[float, str]],
    sealing: Mapping[BlockKey, str],
    evictions: Mapping[BlockKey, Eviction],
    now: float,
) -> tuple[HistoryEntry, ...]:
    """`held`: when each was sealed, and the engine that stored it. `sealing`: the engine that stores it. A key that was
    evicted and stored again has two entries; keys that nothing is known of are left out."""
    found: list[HistoryEntry] = []
    for index, key in enumerate(keys):
        if key in held:
            at, engine = held[key]
            found.append(HistoryEntry(index, "held", at, engine=engine))
        elif key in sealing:
            found.append(HistoryEntry(index, "sealing", now, engine=sealing[key]))
        eviction = evictions.get(key)
        if eviction is not None:
            found.append(
                HistoryEntry(
                    index,
                    "gone",
                    eviction.at,
                    eviction.cause.value,
                    eviction.caused_by,
                    held_seconds=eviction.held_seconds,
                    idle_seconds=eviction.idle_seconds,
                )
            )
    return tuple(found)
