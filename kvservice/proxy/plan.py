"""Decides what one exchange does: a client's request, its prefill and its decode, from the first byte to the last.

Pure: events in, actions out, one literal table of transitions. No clock and no I/O: `now` (seconds, monotonic) and the
hand-off ids come from the caller. One Exchange lives on the proxy's event loop as long as its request.

The rules that the table spells out:
- Prefill and decode are sent together if the node of the prefill server is known. Otherwise decode waits for prefill.
- Prefill may fail in any way. Another prefill server is tried, then decode runs alone. The client never sees the error.
- Until the client has a byte, everything can start again, with a new hand-off id unless prefill had finished.
- A request may be what crashes a server, so at most `tries` servers get it. A server that answered it, or never got it,
  does not count; one that failed, or was told to stop, does. A request without room for a decode server is refused.
- Once the client has a byte, only the decode server counts, and its failure ends the stream with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvservice.proxy.servers import Role, Server, ServerFault, ServerPool


class State(Enum):
    NEW = "new"
    PREFILLING = "prefilling"  # the node is not known, so decode waits for the prefill's answer
    BOTH = "both"  # prefill and decode are under way, the client has no byte
    DECODING = "decoding"  # decode is under way, prefill has finished or was given up, the client has no byte
    STREAMING_BOTH = "streaming both"  # the client has bytes, prefill has not answered yet
    STREAMING = "streaming"
    DONE = "done"


class Sign(Enum):
    """What an event means. The server's health and the attempt are already accounted for."""

    BEGIN = "begin"
    PREFILL_DONE = "prefill done"
    PREFILL_LOST = "prefill lost"
    PREFILL_REFUSED = "prefill refused"  # the server says that the request is at fault
    DECODE_STARTED = "decode started"
    DECODE_ENDED = "decode ended"
    DECODE_LOST = "decode lost"
    DECODE_REFUSED = "decode refused"
    CLIENT_LEFT = "client left"
    STOPPED = "stopped"  # the time is up, or the proxy is stopping


class Way(Enum):
    """How the exchange can go on with the servers that are available."""

    PAIR = "pair"  # prefill and decode together
    SEQUENTIAL = "sequential"  # prefill first
    DELIVER = "deliver"  # decode loads what the finished prefill handed off
    ALONE = "alone"  # decode computes the whole prompt
    KEEP = "keep"  # nothing changes: what is under way stays
    NOWHERE = "nowhere"  # no decode server can take the request


class Move(Enum):
    SEND_PREFILL = "send prefill"
    SEND_DECODE = "send decode"
    CANCEL_PREFILL = "cancel prefill"
    CANCEL_DECODE = "cancel decode"
    RELAY = "relay"  # from here on the decode server's answer goes to the client
    PASS_ON = "pass on"  # the client gets the server's refusal
    REFUSE = "refuse"  # the client gets an error of the proxy's own
    BREAK = "break"  # end the stream with an error event
    FINISH = "finish"


TRANSITIONS: Mapping[tuple[State, Sign, Way | None], tuple[State, tuple[Move, ...]]] = {
    # Nothing has been sent yet.
    (State.NEW, Sign.BEGIN, Way.PAIR): (State.BOTH, (Move.SEND_PREFILL, Move.SEND_DECODE)),
    (State.NEW, Sign.BEGIN, Way.SEQUENTIAL): (State.PREFILLING, (Move.SEND_PREFILL,)),
    (State.NEW, Sign.BEGIN, Way.ALONE): (State.DECODING, (Move.SEND_DECODE,)),
    (State.NEW, Sign.BEGIN, Way.NOWHERE): (State.DONE, (Move.REFUSE,)),
    (State.NEW, Sign.CLIENT_LEFT, None): (State.DONE, ()),
    (State.NEW, Sign.STOPPED, None): (State.DONE, (Move.REFUSE,)),
    # The prefill is under way alone; the decode comes after it.
    (State.PREFILLING, Sign.PREFILL_DONE, Way.DELIVER): (State.DECODING, (Move.SEND_DECODE,)),
    (State.PREFILLING, Sign.PREFILL_DONE, Way.ALONE): (State.DECODING, (Move.SEND_DECODE,)),
    (State.PREFILLING, Sign.PREFILL_DONE, Way.NOWHERE): (State.DONE, (Move.REFUSE,)),
    (State.PREFILLING, Sign.PREFILL_LOST, Way.PAIR): (State.BOTH, (Move.SEND_PREFILL, Move.SEND_DECODE)),
    (State.PREFILLING, Sign.PREFILL_LOST, Way.SEQUENTIAL): (State.PREFILLING, (Move.SEND_PREFILL,)),
    (State.PREFILLING, Sign.PREFILL_LOST, Way.ALONE): (State.DECODING, (Move.SEND_DECODE,)),
    (State.PREFILLING, Sign.PREFILL_LOST, Way.NOWHERE): (State.DONE, (Move.REFUSE,)),
    (State.PREFILLING, Sign.PREFILL_REFUSED, None): (State.DONE, (Move.PASS_ON,)),
    (State.PREFILLING, Sign.CLIENT_LEFT, None): (State.DONE, (Move.CANCEL_PREFILL,)),
    (State.PREFILLING, Sign.STOPPED, None): (State.DONE, (Move.CANCEL_PREFILL, Move.REFUSE)),
    # Prefill and decode are under way; neither has answered.
    (State.BOTH, Sign.PREFILL_DONE, Way.KEEP): (State.DECODING, ()),
    (State.BOTH, Sign.PREFILL_DONE, Way.DELIVER): (State.DECODING, (Move.CANCEL_DECODE, Move.SEND_DECODE)),
    (State.BOTH, Sign.PREFILL_DONE, Way.ALONE): (State.DECODING, (Move.CANCEL_DECODE, Move.SEND_DECODE)),
    (State.BOTH, Sign.PREFILL_DONE, Way.NOWHERE): (State.DONE, (Move.CANCEL_DECODE, Move.REFUSE)),
    (State.BOTH, Sign.PREFILL_LOST, Way.PAIR): (State.BOTH, (Move.CANCEL_DECODE, Move.SEND_PREFILL, Move.SEND_DECODE)),
    (State.BOTH, Sign.PREFILL_LOST, Way.SEQUENTIAL): (State.PREFILLING, (Move.CANCEL_DECODE, Move.SEND_PREFILL)),
    (State.BOTH, Sign.PREFILL_LOST, Way.ALONE): (State.DECODING, (Move.CANCEL_DECODE, Move.SEND_DECODE)),
    (State.BOTH, Sign.PREFILL_LOST, Way.NOWHERE): (State.DONE, (Move.CANCEL_DECODE, Move.REFUSE)),
    (State.BOTH, Sign.PREFILL_REFUSED, None): (State.DONE, (Move.CANCEL_DECODE, Move.PASS_ON)),
    (State.BOTH, Sign.DECODE_STARTED, None): (State.STREAMING_BOTH, (Move.RELAY,)),
    (State.BOTH, Sign.DECODE_LOST, Way.PAIR): (State.BOTH, (Move.CANCEL_PREFILL, Move.SEND_PREFILL, Move.SEND_DECODE)),
    (State.BOTH, Sign.DECODE_LOST, Way.SEQUENTIAL): (State.PREFILLING, (Move.CANCEL_PREFILL, Move.SEND_PREFILL)),
    (State.BOTH, Sign.DECODE_LOST, Way.ALONE): (State.DECODING, (Move.CANCEL_PREFILL, Move.SEND_DECODE)),
    (State.BOTH, Sign.DECODE_LOST, Way.KEEP): (State.PREFILLING, ()),
    (State.BOTH, Sign.DECODE_LOST, Way.NOWHERE): (State.DONE, (Move.CANCEL_PREFILL, Move.REFUSE)),
    (State.BOTH, Sign.DECODE_REFUSED, None): (State.DONE, (Move.CANCEL_PREFILL, Move.PASS_ON)),
    (State.BOTH, Sign.CLIENT_LEFT, None): (State.DONE, (Move.CANCEL_PREFILL, Move.CANCEL_DECODE)),
    (State.BOTH, Sign.STOPPED, None): (State.DONE, (Move.CANCEL_PREFILL, Move.CANCEL_DECODE, Move.REFUSE)),
    # The decode is under way alone.
    (State.DECODING, Sign.DECODE_STARTED, None): (State.STREAMING, (Move.RELAY,)),
    (State.DECODING, Sign.DECODE_LOST, Way.DELIVER): (State.DECODING, (Move.SEND_DECODE,)),
    (State.DECODING, Sign.DECODE_LOST, Way.ALONE): (State.DECODING, (Move.SEND_DECODE,)),
    (State.DECODING, Sign.DECODE_LOST, Way.NOWHERE): (State.DONE, (Move.REFUSE,)),
    (State.DECODING, Sign.DECODE_REFUSED, None): (State.DONE, (Move.PASS_ON,)),
    (State.DECODING, Sign.CLIENT_LEFT, None): (State.DONE, (Move.CANCEL_DECODE,)),
    (State.DECODING, Sign.STOPPED, None): (State.DONE, (Move.CANCEL_DECODE, Move.REFUSE)),
    # The decode answers, the prefill goes on.
    (State.STREAMING_BOTH, Sign.PREFILL_DONE, Way.KEEP): (State.STREAMING, ()),
    (State.STREAMING_BOTH, Sign.PREFILL_LOST, Way.KEEP): (State.STREAMING, ()),
    (State.STREAMING_BOTH, Sign.PREFILL_REFUSED, None): (State.STREAMING, ()),
    (State.STREAMING_BOTH, Sign.DECODE_ENDED, None): (State.DONE, (Move.CANCEL_PREFILL, Move.FINISH)),
    (State.STREAMING_BOTH, Sign.DECODE_LOST, Way.KEEP): (State.DONE, (Move.CANCEL_PREFILL, Move.BREAK)),
    (State.STREAMING_BOTH, Sign.CLIENT_LEFT, None): (State.DONE, (Move.CANCEL_PREFILL, Move.CANCEL_DECODE)),
    (State.STREAMING_BOTH, Sign.STOPPED, None): (State.DONE, (Move.CANCEL_PREFILL, Move.CANCEL_DECODE, Move.BREAK)),
    # The decode answers.
    (State.STREAMING, Sign.DECODE_ENDED, None): (State.DONE, (Move.FINISH,)),
    (State.STREAMING, Sign.DECODE_LOST, Way.KEEP): (State.DONE, (Move.BREAK,)),
    (State.STREAMING, Sign.CLIENT_LEFT, None): (State.DONE, (Move.CANCEL_DECODE,)),
    (State.STREAMING, Sign.STOPPED, None): (State.DONE, (Move.CANCEL_DECODE, Move.BREAK)),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error of the proxy's own for the client. `retry_after` is in seconds; None means that retrying does not
    help."""

    status: int
    kind: str  # the `type` of OpenAI's error object
    message: str
    retry_after: int | None = None


NO_DECODE = Problem(503, "service_unavailable", "no decode server is healthy; see /health of this proxy")
BUSY = Problem(503, "overloaded", "every decode server has as many requests in flight as --in-flight allows; retry", 1)
NO_CONNECTION = Problem(
    503, "overloaded", "this proxy has no file descriptor or port left for a connection to a decode server; retry", 1
)
DECODE_FAILED = Problem(502, "upstream_error", "the decode server failed and no other one could take the request")
BROKEN = Problem(502, "upstream_error", "the decode server failed in the middle of its answer")
TIMED_OUT = Problem(504, "timeout", "the request took longer than this proxy allows")
LOST = Problem(
    502,
    "upstream_error",
    "servers failed while they worked on this request; it is not sent to more servers than "
    "--tries allows, because the request itself may be what makes them fail",
)
STOPPING = Problem(503, "service_unavailable", "this proxy is stopping; retry elsewhere", 1)


@dataclass(frozen=True, slots=True)
class HandoffSource:
    """What decode is told: the id that both requests carry, and the node whose shard has the blocks."""

    id: str
    node: str


# Events. `attempt` is the number of the Send action that the event answers. An event of an attempt that was given up is
# ignored.
@dataclass(frozen=True, slots=True)
class Begin:
    hand_off: bool  # whether the prompt is long enough for a prefill on another server


@dataclass(frozen=True, slots=True)
class PrefillAnswered:
    attempt: int
    node: str | None  # None: the server has no connector that hands blocks off


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    attempt: int
    fault: ServerFault


@dataclass(frozen=True, slots=True)
class PrefillRefused:
    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """The first bytes for the client have arrived."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    attempt: int
    fault: ServerFault


@dataclass(frozen=True, slots=True)
class DecodeRefused:
    attempt: int


@dataclass(frozen=True, slots=True)
class ClientLeft:
    pass


@dataclass(frozen=True, slots=True)
class Stopped:
    problem: Problem


PrefillEvent = PrefillAnswered | PrefillFailed | PrefillRefused
DecodeEvent = DecodeStarted | DecodeEnded | DecodeFailed | DecodeRefused
ProxyEvent = Begin | PrefillEvent | DecodeEvent | ClientLeft | Stopped

SIGNS: Mapping[type[ProxyEvent], Sign] = {
    Begin: Sign.BEGIN,
    PrefillAnswered: Sign.PREFILL_DONE,
    PrefillFailed: Sign.PREFILL_LOST,
    PrefillRefused: Sign.PREFILL_REFUSED,
    DecodeStarted: Sign.DECODE_STARTED,
    DecodeEnded: Sign.DECODE_ENDED,
    DecodeFailed: Sign.DECODE_LOST,
    DecodeRefused: Sign.DECODE_REFUSED,
    ClientLeft: Sign.CLIENT_LEFT,
    Stopped: Sign.STOPPED,
}


# Actions. The caller performs them in order.
@dataclass(frozen=True, slots=True)
class SendPrefill:
    attempt: int
    server: Server
    handoff_id: str


@dataclass(frozen=True, slots=True)
class SendDecode:
    attempt: int
    server: Server
    handoff: HandoffSource | None  # None: the client's body as it came


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    attempt: int


@dataclass(frozen=True, slots=True)
class Relay:
    attempt: int


@dataclass(frozen=True, slots=True)
class PassOn:
    attempt: int


@dataclass(frozen=True, slots=True)
class RefuseClient:
    problem: Problem


@dataclass(frozen=True, slots=True)
class Break:
    problem: Problem


@dataclass(frozen=True, slots=True)
class Finish:
    pass


ProxyAction = SendPrefill | SendDecode | CancelAttempt | Relay | PassOn | RefuseClient | Break | Finish


@dataclass(frozen=True, slots=True)
class _Leg:
    """One request that is under way to one server."""

    attempt: int
    server: Server
    is_first: bool  # the server had not got this request before


class Exchange:
    """One client request as a state machine. `handle` never blocks, and raises on nothing that servers or clients do.

    It acquires and releases servers in the pool. Once DONE it holds none.
    """

    def __init__(self, pool: ServerPool, new_handoff_id: Callable[[], str], *, tries: int) -> None:
        self.state = State.NEW
        self._pool = pool
        self._new_handoff_id = new_handoff_id
        self._hand_off = False
        self._legs: dict[Role, _Leg | None] = {Role.PREFILL: None, Role.DECODE: None}
        self._dropped: dict[Role, int] = {}  # attempts that are to be cancelled
        # URLs that failed and are not tried again
        self._lost: dict[Role, set[str]] = {Role.PREFILL: set(), Role.DECODE: set()}
        self._next: dict[Role, Server | None] = {Role.PREFILL: None, Role.DECODE: None}  # chosen for the next Send
        self._tries = tries
        self._exposed: set[str] = set()  # URLs that got the request and did not answer; it may have crashed them
        self._decoded_by: Server | None = None  # the decode server that got the request last
        self._attempts = 0
        self._handoff_id = ""
        self._promised: HandoffSource | None = None  # what decode was told, or will be told
        self._delivered = False  # the prefill of the promised hand-off has finished
        self._problem = NO_DECODE

    def handle(self, event: ProxyEvent, now: float) -> list[ProxyAction]:
        """The actions that follow from the event. Empty for events of attempts that were given up, and after DONE."""
        if self.state is State.DONE or not self._is_current(event):
            return []
        before = {role: leg.attempt for role, leg in self._legs.items() if leg is not None}
        self._account(event, now)
        sign = SIGNS[type(event)]
        self.state, moves = TRANSITIONS[self.state, sign, self._way(event)]
        return [self._perform(move, before, sign) for move in moves]

    def _is_current(self, event: ProxyEvent) -> bool:
        if isinstance(event, PrefillEvent):
            leg = self._legs[Role.PREFILL]
        elif isinstance(event, DecodeEvent):
            leg = self._legs[Role.DECODE]
        else:
            return True
        return leg is not None and leg.attempt == event.attempt

    def _account(self, event: ProxyEvent, now: float) -> None:
        """Tell the pool what the event says about a server, and end the leg that the event ends."""
        if isinstance(event, Begin):
            self._hand_off = event.hand_off
        elif isinstance(event, PrefillEvent):
            if isinstance(event, PrefillFailed):
                self._lose(Role.PREFILL, event.fault, now)
            else:
                server = self._end(Role.PREFILL)
                self._exposed.discard(server.url)
                self._pool.answered(server)
                if isinstance(event, PrefillAnswered):
                    self._pool.learnt(server, event.node)
        elif isinstance(event, DecodeFailed):
            self._lose(Role.DECODE, event.fault, now)
            lost = NO_CONNECTION if event.fault is ServerFault.BUSY else DECODE_FAILED
            self._problem = BROKEN if self._is_streaming() else lost
        elif isinstance(event, DecodeEnded | DecodeRefused):
            self._pool.answered(self._end(Role.DECODE))
        elif isinstance(event, Stopped):
            self._problem = event.problem

    def _lose(self, role: Role, fault: ServerFault, now: float) -> None:
        """End a leg that failed. The request counts the failure before the pool does: the pool has the server's health
        checked before it takes the server for sick."""
        leg = self._legs[role]
        server = self._end(role)
        self._lost[role].add(server.url)
        if leg is not None and leg.is_first and not fault.blames_request:
            self._exposed.discard(server.url)
        self._pool.failed(server, fault, now)

    def _is_streaming(self) -> bool:
        return self.state in (State.STREAMING_BOTH, State.STREAMING)

    def _end(self, role: Role) -> Server:
        leg = self._legs[role]
        assert leg is not None, f"no {role.value} under way"
        self._legs[role] = None
        self._pool.release(leg.server)
        return leg.server

    def _way(self, event: ProxyEvent) -> Way | None:
        """How the exchange goes on, if that depends on the servers. The servers for it are chosen here."""
        if isinstance(event, PrefillAnswered):
            return self._after_prefill(event.node)
        if isinstance(event, PrefillFailed | DecodeFailed) and self._is_streaming():
            return Way.KEEP
        if isinstance(event, DecodeFailed) and self.state is State.DECODING:
            return self._decode_only()
        if isinstance(event, DecodeFailed) and len(self._exposed) >= self._tries:
            return Way.KEEP  # prefill still runs; after its answer there is room for another decode server
        if isinstance(event, Begin | PrefillFailed | DecodeFailed):
            return self._afresh()
        return None

    def _after_prefill(self, node: str | None) -> Way:
        if self._is_streaming() or (
            self.state is State.BOTH and self._promised is not None and self._promised.node == node
        ):
            self._delivered = True
            return Way.KEEP
        self._delivered = node is not None
        self._promised = None if node is None else HandoffSource(self._handoff_id, node)
        return self._decode_only()

    def _decode_only(self) -> Way:
        """Start decode, for the first time or again, with what prefill has handed off."""
        self._drop(Role.DECODE)
        if not self._delivered:
            self._promised = None
        if not self._find_decode():
            return Way.NOWHERE
        return Way.ALONE if self._promised is None else Way.DELIVER

    def _afresh(self) -> Way:
        """Start from the beginning with a new hand-off id, on the same servers if they are still healthy."""
        leg = self._legs[Role.PREFILL]
        self._drop(Role.PREFILL)
        self._drop(Role.DECODE)
        self._promised, self._delivered = None, False
        if not self._find_decode():
            return Way.NOWHERE
        prefill = None
        if self._hand_off:
            prefill = self._pool.choose(
                Role.PREFILL, exclude=self._lost[Role.PREFILL], prefer=None if leg is None else leg.server
            )
        if not self._has_room(prefill, self._next[Role.DECODE]):
            prefill = None
        self._next[Role.PREFILL] = prefill
        if prefill is None:
            return Way.ALONE
        self._handoff_id = self._new_handoff_id()
        if prefill.node is None:
            return Way.SEQUENTIAL
        self._promised = HandoffSource(self._handoff_id, prefill.node)
        return Way.PAIR

    def _find_decode(self) -> bool:
        """Choose the decode server for the next Send. Returns False if there is none.

        The server that had the request last is preferred while it is healthy, because it needs no room under `tries`.
        It is also taken if there is no room for another one: it did not fail, since we ended its work ourselves, even
        if it is slow to answer its checks.
        """
        had = self._decoded_by
        found = self._pool.choose(Role.DECODE, exclude=self._lost[Role.DECODE], prefer=had)
        if (
            found is not None
            and not self._has_room(found)
            and had is not None
            and had.url not in self._lost[Role.DECODE]
        ):
            found = had
        if found is not None and not self._has_room(found):
            self._next[Role.DECODE], self._problem = None, LOST
            return False
        self._next[Role.DECODE] = found
        if found is None and not self._lost[Role.DECODE]:
            self._problem = BUSY if self._pool.healthy(Role.DECODE) else NO_DECODE
        return found is not None

    def _has_room(self, *servers: Server | None) -> bool:
        return len(self._exposed | {server.url for server in servers if server is not None}) <= self._tries

    def _drop(self, role: Role) -> None:
        """Give a leg up. Its server is free for the choice that follows; its attempt is noted for cancelling."""
        leg = self._legs[role]
        if leg is not None:
            self._dropped[role] = leg.attempt
            self._end(role)

    def _perform(self, move: Move, before: Mapping[Role, int], sign: Sign) -> ProxyAction:
        if move is Move.SEND_PREFILL:
            attempt, server = self._send(Role.PREFILL)
            return SendPrefill(attempt, server, self._handoff_id)
        if move is Move.SEND_DECODE:
            attempt, server = self._send(Role.DECODE)
            return SendDecode(attempt, server, self._promised)
        if move is Move.CANCEL_PREFILL or move is Move.CANCEL_DECODE:
            role = Role.PREFILL if move is Move.CANCEL_PREFILL else Role.DECODE
            self._drop(role)
            return CancelAttempt(self._dropped.pop(role))
        if move is Move.RELAY:
            return Relay(before[Role.DECODE])
        if move is Move.PASS_ON:
            return PassOn(before[Role.PREFILL if sign is Sign.PREFILL_REFUSED else Role.DECODE])
        if move is Move.REFUSE:
            return RefuseClient(self._problem)
        return Break(self._problem) if move is Move.BREAK else Finish()

    def _send(self, role: Role) -> tuple[int, Server]:
        server = self._next[role]
        assert server is not None, f"no {role.value} server was chosen"
        self._attempts += 1
        self._legs[role] = _Leg(self._attempts, server, is_first=server.url not in self._exposed)
        self._exposed.add(server.url)
        if role is Role.DECODE:
            self._decoded_by = server
        self._pool.acquire(server)
        return self._attempts, server
