"""One request of the engine on its way through the scheduler half, and the literal table of its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvservice.connector.options import Offload
from kvservice.connector.scheduler.request_terms import NO_TERMS, RequestTerms
from kvservice.core.block.keys import term_key
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, Handoff, RequestReport
from kvservice.core.transitions import step
from kvservice.units import AttachmentId, BlockHash, BlockKey, HandoffId, LeaseId


class RequestState(Enum):
    NEW = "new"
    ASKED = "asked"  # an acquire is under way
    EXTENDING = "extending"  # blocks are promised, or there are none, and a partial tail behind them is asked for
    ANSWERED = "answered"  # blocks are promised and leased, or there are none
    LOADING = "loading"  # workers copy the promised blocks into the engine
    RUNNING = "running"
    ENDED = "ended"


class RequestEvent(Enum):
    ASK = "ask"
    EXTEND = "extend"  # ask for a partial tail
    SKIP = "skip"  # there is nothing to ask, or no pool
    ANSWER = "answer"
    GIVE_UP = "give_up"  # the deadline passed
    LOAD = "load"
    DECLINE = "decline"  # the engine scheduled the request without the promise
    LOADED = "loaded"
    END = "end"


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.NEW, RequestEvent.ASK): RequestState.ASKED,
    (RequestState.NEW, RequestEvent.SKIP): RequestState.RUNNING,
    (RequestState.NEW, RequestEvent.END): RequestState.ENDED,
    (RequestState.ASKED, RequestEvent.ANSWER): RequestState.ANSWERED,
    (RequestState.ANSWERED, RequestEvent.EXTEND): RequestState.EXTENDING,
    (RequestState.EXTENDING, RequestEvent.ANSWER): RequestState.ANSWERED,
    (RequestState.EXTENDING, RequestEvent.GIVE_UP): RequestState.ANSWERED,  # what was promised before counts
    (RequestState.ASKED, RequestEvent.GIVE_UP): RequestState.RUNNING,
    (RequestState.ASKED, RequestEvent.END): RequestState.ENDED,
    (RequestState.ANSWERED, RequestEvent.LOAD): RequestState.LOADING,
    (RequestState.ANSWERED, RequestEvent.DECLINE): RequestState.RUNNING,
    (RequestState.ANSWERED, RequestEvent.END): RequestState.ENDED,
    (RequestState.LOADING, RequestEvent.LOADED): RequestState.RUNNING,
    (RequestState.LOADING, RequestEvent.END): RequestState.ENDED,
    (RequestState.RUNNING, RequestEvent.EXTEND): RequestState.EXTENDING,  # too short for a block
    (RequestState.RUNNING, RequestEvent.ASK): RequestState.ASKED,  # preempted; its blocks may come back from the pool
    (RequestState.RUNNING, RequestEvent.END): RequestState.ENDED,
}
WAITING = frozenset({RequestState.ASKED, RequestState.EXTENDING})  # for an answer of the pool


@dataclass(frozen=True, slots=True)
class Naming:
    """What the names of blocks derive from, as an attachment gives it. Secret."""

    tenant_key: bytes = field(default=b"", repr=False)
    public_key: bytes = field(default=b"", repr=False)
    may_publish: bool = False

    @classmethod
    def of(cls, attachment: Attachment) -> Naming:
        return cls(attachment.tenant_key, attachment.public_key, attachment.may_publish)

    def under(self, term: bytes) -> Naming:
        """The same naming in a term of the engine's weights."""
        public = term_key(self.public_key, term) if self.public_key else b""
        return replace(self, tenant_key=term_key(self.tenant_key, term), public_key=public)


@dataclass(slots=True, eq=False)
class EngineRequest:
    request_id: str
    keys: list[BlockKey]
    window_keys: list[list[BlockKey]] = field(default_factory=list)  # keys of each window group, position by position
    tokens: int = 0  # of its prompt, or all tokens that it has so far
    state: RequestState = RequestState.NEW
    attachment: AttachmentId | None = None  # the attachment that holds the lease
    deadline: float = 0.0
    ask_number: int = 0
    asked: AcquireRequest | None = None  # the one ask whose answer counts
    result: AcquireResult | None = None
    prompt_tokens: int = 0  # when the request came; only for tails
    prompt_blocks: int = 0  # full blocks of the prompt when the request came
    engine_blocks: int = 0  # the engine's own hit when the request was first asked about
    local_tokens: int = 0  # the engine's own hit when the promise was made
    loaded_blocks: int = 0
    salted: bool = False
    gave_up: bool = False  # the request did not wait for the pool's answer
    stored: int = 0  # blocks [0, stored) are in the pool, on their way to it, or given up
    terms: RequestTerms = NO_TERMS
    naming: Naming = field(default_factory=Naming)  # the naming that its keys were made with
    trace: str = ""  # W3C traceparent that it came with, then that of its acquire
    adapter: bytes = b""  # identity of its adapter (vllm.lora); empty means computed without one
    admitted: bool = True  # False: the pool sees no reuse, so the blocks are not stored
    read_only: int = 0  # leading public blocks, if its tenant may only read them
    given: int = 0  # leading blocks that may hold other bytes than their names say, as the engine gave or computed them
    expected: int = 0  # slots announced to the session and not taken yet
    known_blocks: int = 0  # leading blocks that were known to be in the pool, so that no slots are expected for them
    offload: Offload = Offload.EAGER  # when its blocks are stored: at once if another engine waits for them
    computed_blocks: int = 0  # full blocks at the end of the last step that computed it
    named: int = 0  # leading blocks whose names are kept for the time when they are near eviction
    hashes: Sequence[BlockHash] = ()  # the engine's, of its full blocks; it grows in the engine's hands
    skip: int = 0  # leading blocks that the engine had when the pool was asked; the answer begins behind them
    asked_again: bool = False  # because the engine had lost some of them
    fetched_blocks: int = 0
    scheduled: bool = False  # the engine has given it blocks; if it is asked about again, it was preempted
    begun: bool = False  # a step computes with these blocks; before, another connector may still load what they hold
    load_failed: bool = False  # nothing is promised to it again, because it could fail for ever
    reads: Handoff | None = None  # another engine computes its prompt
    waits_for_writer: bool = False
    writes: HandoffId | None = None  # it is computed for another engine

    @property
    def chains(self) -> list[list[BlockKey]]:
        """The keys of each KV cache group, group 0 first."""
        return [self.keys, *self.window_keys]

    @property
    def promise(self) -> tuple[AttachmentId, AcquireResult]:
        """What it is promised in state ANSWERED, and the attachment that holds the lease."""
        assert self.result is not None and self.attachment is not None
        return self.attachment, self.result

    @property
    def lease(self) -> tuple[AttachmentId, LeaseId]:
        """The lease of that promise."""
        attachment, result = self.promise
        return attachment, result.lease_id

    @property
    def promised_end(self) -> int:
        """The position behind the last promised block."""
        return self.skip + (0 if self.result is None else len(self.result.blocks))

    @property
    def kept_out(self) -> int:
        """How many leading blocks are never stored."""
        return max(self.read_only, self.given)

    def usable(self, whole: int) -> int:
        """How many leading blocks of what was asked the engine can use, if it takes `whole` at most."""
        return 0 if self.asked is None else min(len(self.asked.keys), whole)

    @property
    def expected_from(self) -> int:
        """Slots are expected for its blocks from this position on."""
        return max(self.stored, self.known_blocks)

    def storable(self, blocks: int) -> int:
        """How many of its first `blocks` may be stored."""
        return min(blocks, self.prompt_blocks) if self.terms.prompt_only else blocks

    @property
    def is_behind(self) -> bool:
        """Whether it has full blocks that are stored as they are filled, or named for when the engine evicts them."""
        if not self.admitted or self.offload is Offload.LAZY:
            return False
        done = self.stored if self.offload is Offload.EAGER else max(self.stored, self.named)
        return self.storable(self.computed_blocks) > done

    @property
    def has_left(self) -> bool:
        """Whether it has full blocks that are not stored, and not left to the engine's eviction."""
        return (
            self.admitted and self.offload is not Offload.EVICTING and self.storable(self.computed_blocks) > self.stored
        )

    def move(self, event: RequestEvent) -> None:
        self.state = step(TRANSITIONS, self.state, event, f"request {self.request_id}")

    def report(self) -> RequestReport:
        """The report about the request, once it has ended."""
        engine = min(self.engine_blocks, self.prompt_blocks)
        loaded = 0 if self.load_failed else min(self.loaded_blocks, self.prompt_blocks - engine)
        computed = max(self.prompt_blocks - engine - loaded, 0)
        return RequestReport(
            self.request_id,
            self.prompt_blocks,
            engine,
            loaded,
            computed,
            self.load_failed,
            self.gave_up,
            self.ask_number > 0,
            self.salted,
        )
