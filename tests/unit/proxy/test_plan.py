"""Rules of proxy.plan: every state against every way in which a leg can end, and what never happens in any order."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.proxy import plan
from kvservice.proxy.plan import (
    BROKEN,
    BUSY,
    DECODE_FAILED,
    NO_DECODE,
    TIMED_OUT,
    TRANSITIONS,
    Begin,
    Break,
    CancelAttempt,
    ClientLeft,
    DecodeEnded,
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    Exchange,
    Finish,
    HandoffSource,
    Move,
    PassOn,
    PrefillAnswered,
    PrefillFailed,
    PrefillRefused,
    ProxyAction,
    ProxyEvent,
    RefuseClient,
    Relay,
    SendDecode,
    SendPrefill,
    Sign,
    State,
    Stopped,
    Way,
)
from kvservice.proxy.servers import Role, Server, ServerFault, ServerPool

NOW = 1.0


class World:
    """A pool of healthy servers, one exchange, and what it has under way."""

    def __init__(
        self, prefill: int = 2, decode: int = 2, *, known: bool = True, in_flight_max: int = 4, tries: int = 2
    ) -> None:
        self.pool = ServerPool(
            [f"http://p{i}" for i in range(prefill)],
            [f"http://d{i}" for i in range(decode)],
            in_flight_max=in_flight_max,
            check_seconds=5.0,
        )
        for server in self.pool.due(0.0):
            self.pool.check_passed(server, 0.0)
            if known and server.role is Role.PREFILL:
                self.pool.learnt(server, node_of(server))
        ids = itertools.count(1)
        self.exchange = Exchange(self.pool, lambda: f"{next(ids):032x}", tries=tries)
        self.prefill: SendPrefill | None = None
        self.decode: SendDecode | None = None
        self.actions: list[ProxyAction] = []

    def give(self, event: ProxyEvent) -> list[ProxyAction]:
        actions = self.exchange.handle(event, NOW)
        for action in actions:
            if isinstance(action, SendPrefill):
                assert self.prefill is None, "two prefills under way"
                self.prefill = action
            elif isinstance(action, SendDecode):
                assert self.decode is None, "two decodes under way"
                self.decode = action
            elif isinstance(action, CancelAttempt):
                self.cancel(action.attempt)
        self.actions += actions
        return actions

    def cancel(self, attempt: int) -> None:
        if self.prefill is not None and self.prefill.attempt == attempt:
            self.prefill = None
        else:
            assert self.decode is not None and self.decode.attempt == attempt, "cancelled what was not under way"
            self.decode = None

    def begin(self, *, hand_off: bool = True) -> list[ProxyAction]:
        return self.give(Begin(hand_off))

    def prefill_answers(self, node: str | None = "") -> list[ProxyAction]:
        """With the server's own node unless another is given."""
        sent, self.prefill = self.prefill, None
        assert sent is not None
        return self.give(PrefillAnswered(sent.attempt, node_of(sent.server) if node == "" else node))

    def prefill_fails(self, fault: ServerFault = ServerFault.UNREACHABLE) -> list[ProxyAction]:
        sent, self.prefill = self.prefill, None
        assert sent is not None
        return self.give(PrefillFailed(sent.attempt, fault))

    def prefill_refuses(self) -> list[ProxyAction]:
        sent, self.prefill = self.prefill, None
        assert sent is not None
        return self.give(PrefillRefused(sent.attempt))

    def decode_starts(self) -> list[ProxyAction]:
        assert self.decode is not None
        return self.give(DecodeStarted(self.decode.attempt))

    def decode_fails(self, fault: ServerFault = ServerFault.UNREACHABLE) -> list[ProxyAction]:
        sent, self.decode = self.decode, None
        assert sent is not None
        return self.give(DecodeFailed(sent.attempt, fault))

    def decode_ends(self) -> list[ProxyAction]:
        sent, self.decode = self.decode, None
        assert sent is not None
        return self.give(DecodeEnded(sent.attempt))

    def decode_refuses(self) -> list[ProxyAction]:
        sent, self.decode = self.decode, None
        assert sent is not None
        return self.give(DecodeRefused(sent.attempt))

    @property
    def in_flight(self) -> int:
        return sum(server.in_flight for server in self.pool)


def node_of(server: Server) -> str:
    return f"node-of-{server.url[-2:]}"


def names(actions: list[ProxyAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def in_state(state: State, **options: int) -> World:
    """An exchange brought into this state."""
    world = World(known=state is not State.PREFILLING, **options)
    if state is not State.NEW:
        world.begin()
    if state in (State.STREAMING_BOTH, State.STREAMING):
        world.decode_starts()
    if state in (State.DECODING, State.STREAMING):
        world.prefill_answers()
    assert world.exchange.state is state
    return world


UNDER_WAY = [State.PREFILLING, State.BOTH, State.DECODING, State.STREAMING_BOTH, State.STREAMING]
WITH_PREFILL = [State.PREFILLING, State.BOTH, State.STREAMING_BOTH]
WITH_DECODE = [State.BOTH, State.DECODING, State.STREAMING_BOTH, State.STREAMING]


# ---- how it begins


def test_with_a_known_node_both_halves_go_out_with_one_id() -> None:
    world = World()
    prefill, decode = world.begin()
    assert isinstance(prefill, SendPrefill) and isinstance(decode, SendDecode)
    assert decode.handoff == HandoffSource(prefill.handoff_id, node_of(prefill.server))


def test_decode_waits_for_prefill_while_the_node_is_unknown() -> None:
    world = World(known=False)
    assert names(world.begin()) == ["SendPrefill"]
    assert world.prefill is not None
    handoff = HandoffSource(world.prefill.handoff_id, node_of(world.prefill.server))
    (decode,) = world.prefill_answers()
    assert isinstance(decode, SendDecode) and decode.handoff == handoff


def test_a_short_prompt_goes_straight_to_decode() -> None:
    (decode,) = World().begin(hand_off=False)
    assert isinstance(decode, SendDecode) and decode.handoff is None


def test_without_prefill_servers_decode_works_alone() -> None:
    (decode,) = World(prefill=0).begin()
    assert isinstance(decode, SendDecode) and decode.handoff is None


def test_without_a_healthy_decode_server_it_is_refused() -> None:
    world = World(decode=0)
    assert world.begin() == [RefuseClient(NO_DECODE)]
    assert world.in_flight == 0


def test_with_decode_at_its_limit_a_time_to_retry_is_given() -> None:
    world = World(decode=1, in_flight_max=1)
    world.pool.acquire(next(server for server in world.pool if server.role is Role.DECODE))
    assert world.begin() == [RefuseClient(BUSY)]
    assert BUSY.retry_after is not None


def test_prefill_at_its_limit_costs_the_hand_off_only() -> None:
    world = World(prefill=1, decode=2, in_flight_max=1)
    world.pool.acquire(next(server for server in world.pool if server.role is Role.PREFILL))
    assert names(world.begin()) == ["SendDecode"]


# ---- prefill dies


def test_prefill_lost_while_decode_waits_is_tried_elsewhere() -> None:
    world = in_state(State.PREFILLING)
    assert world.prefill is not None
    first = world.prefill
    (again,) = world.prefill_fails()
    assert isinstance(again, SendPrefill)
    assert again.server is not first.server and again.handoff_id != first.handoff_id


@pytest.mark.parametrize("fault", list(ServerFault))
def test_prefill_lost_beside_a_silent_decode_restarts_both(fault: ServerFault) -> None:
    """Both start with a new id."""
    world = in_state(State.BOTH, tries=3)
    assert world.prefill is not None and world.decode is not None
    first, waiting = world.prefill, world.decode
    cancel, prefill, decode = world.prefill_fails(fault)
    assert cancel == CancelAttempt(waiting.attempt)
    assert isinstance(prefill, SendPrefill) and isinstance(decode, SendDecode)
    assert prefill.server is not first.server and prefill.handoff_id != first.handoff_id
    assert decode.handoff == HandoffSource(prefill.handoff_id, node_of(prefill.server))


@pytest.mark.parametrize("state", [State.PREFILLING, State.BOTH])
def test_when_no_prefill_server_is_left_decode_works_alone(state: State) -> None:
    world = in_state(state)
    world.prefill_fails()
    world.prefill_fails()
    assert world.exchange.state is State.DECODING
    assert world.decode is not None and world.decode.handoff is None
    world.decode_starts()
    assert world.decode_ends() == [Finish()]


def test_prefill_lost_after_decode_spoke_changes_nothing() -> None:
    world = in_state(State.STREAMING_BOTH)
    assert world.prefill_fails() == []
    assert world.decode_ends() == [Finish()]


def test_a_lone_decode_at_its_limit_can_start_again() -> None:
    world = in_state(State.BOTH, decode=1, in_flight_max=1)
    assert names(world.prefill_fails()) == ["CancelAttempt", "SendPrefill", "SendDecode"]


# ---- what prefill says


def test_a_prefill_that_confirms_the_node_leaves_decode_alone() -> None:
    world = in_state(State.BOTH)
    assert world.prefill_answers() == []
    assert world.exchange.state is State.DECODING


def test_prefill_found_on_another_node_restarts_decode() -> None:
    world = in_state(State.BOTH)
    assert world.prefill is not None and world.decode is not None
    sent, waiting = world.prefill, world.decode
    cancel, decode = world.prefill_answers("elsewhere")
    assert cancel == CancelAttempt(waiting.attempt)
    assert isinstance(decode, SendDecode) and decode.handoff == HandoffSource(sent.handoff_id, "elsewhere")
    assert sent.server.node == "elsewhere"


@pytest.mark.parametrize("state", [State.PREFILLING, State.BOTH])
def test_prefill_that_hands_nothing_off_leaves_decode_alone(state: State) -> None:
    world = in_state(state)
    assert world.prefill is not None
    server = world.prefill.server
    world.prefill_answers(None)
    assert server.plain and server.node is None
    assert world.decode is not None and world.decode.handoff is None
    assert world.exchange.state is State.DECODING


def test_the_node_is_learnt_from_every_answer() -> None:
    world = in_state(State.STREAMING_BOTH)
    assert world.prefill is not None
    server = world.prefill.server
    assert world.prefill_answers("elsewhere") == []
    assert server.node == "elsewhere"


# ---- decode dies


@pytest.mark.parametrize("fault", [ServerFault.UNREACHABLE, ServerFault.BUSY])
def test_decode_lost_beside_prefill_restarts_both(
    fault: ServerFault,
) -> None:
    """Both start with a new id, on the same prefill server."""
    world = in_state(State.BOTH)
    assert world.prefill is not None and world.decode is not None
    prefilling, lost = world.prefill, world.decode
    cancel, prefill, decode = world.decode_fails(fault)
    assert cancel == CancelAttempt(prefilling.attempt)
    assert isinstance(prefill, SendPrefill) and isinstance(decode, SendDecode)
    assert prefill.server is prefilling.server and prefill.handoff_id != prefilling.handoff_id
    assert decode.server is not lost.server and decode.handoff is not None
    assert decode.handoff.id == prefill.handoff_id


def test_a_lone_prefill_at_its_limit_can_start_again() -> None:
    world = in_state(State.BOTH, prefill=1, decode=2, in_flight_max=1)
    assert names(world.decode_fails()) == ["CancelAttempt", "SendPrefill", "SendDecode"]


def test_decode_lost_after_prefill_keeps_its_id_elsewhere() -> None:
    world = in_state(State.DECODING)
    assert world.decode is not None
    lost = world.decode
    (decode,) = world.decode_fails()
    assert isinstance(decode, SendDecode)
    assert decode.server is not lost.server and decode.handoff == lost.handoff is not None


def test_decode_lost_alone_is_tried_elsewhere_alone() -> None:
    world = World()
    world.begin(hand_off=False)
    (decode,) = world.decode_fails()
    assert isinstance(decode, SendDecode) and decode.handoff is None


@pytest.mark.parametrize("state", [State.BOTH, State.DECODING])
def test_without_decode_before_the_first_byte_an_error_is_sent(state: State) -> None:
    world = in_state(state)
    world.decode_fails()
    assert world.decode_fails()[-1] == RefuseClient(DECODE_FAILED)
    assert world.in_flight == 0 and world.prefill is None


@pytest.mark.parametrize("state", [State.STREAMING_BOTH, State.STREAMING])
def test_decode_lost_after_the_first_byte_breaks_the_stream(state: State) -> None:
    """It cancels prefill."""
    world = in_state(state)
    assert world.decode_fails()[-1] == Break(BROKEN)
    assert world.in_flight == 0 and world.prefill is None


# ---- refusals, the client, time


@pytest.mark.parametrize("state", [State.PREFILLING, State.BOTH])
def test_a_refusal_of_prefill_is_the_clients_answer(state: State) -> None:
    """This holds before the first byte."""
    world = in_state(state)
    assert world.prefill is not None
    attempt = world.prefill.attempt
    assert world.prefill_refuses()[-1] == PassOn(attempt)
    assert world.exchange.state is State.DONE and world.decode is None and world.in_flight == 0


def test_a_refusal_of_prefill_after_the_first_byte_is_late() -> None:
    world = in_state(State.STREAMING_BOTH)
    assert world.prefill_refuses() == []
    assert world.decode_ends() == [Finish()]


@pytest.mark.parametrize("state", [State.BOTH, State.DECODING])
def test_a_refusal_of_decode_is_passed_on_and_cancels_prefill(state: State) -> None:
    world = in_state(state)
    assert world.decode is not None
    attempt = world.decode.attempt
    assert world.decode_refuses()[-1] == PassOn(attempt)
    assert world.exchange.state is State.DONE and world.prefill is None and world.in_flight == 0


@pytest.mark.parametrize("state", [State.NEW, *UNDER_WAY])
def test_a_client_that_leaves_cancels_everything(state: State) -> None:
    world = in_state(state)
    assert all(isinstance(action, CancelAttempt) for action in world.give(ClientLeft()))
    assert world.exchange.state is State.DONE
    assert world.prefill is None and world.decode is None and world.in_flight == 0


@pytest.mark.parametrize("state", [State.NEW, *UNDER_WAY])
def test_running_out_of_time_cancels_all_and_tells_the_client(state: State) -> None:
    world = in_state(state)
    last = world.give(Stopped(TIMED_OUT))[-1]
    streaming = state in (State.STREAMING_BOTH, State.STREAMING)
    assert last == (Break(TIMED_OUT) if streaming else RefuseClient(TIMED_OUT))
    assert world.exchange.state is State.DONE
    assert world.prefill is None and world.decode is None and world.in_flight == 0


@pytest.mark.parametrize("state", [State.BOTH, State.DECODING])
def test_the_first_byte_commits_to_the_attempt_that_sent_it(state: State) -> None:
    world = in_state(state)
    assert world.decode is not None
    assert world.decode_starts() == [Relay(world.decode.attempt)]


def test_what_attempts_given_up_still_say_is_ignored() -> None:
    world = in_state(State.BOTH)
    assert world.decode is not None and world.prefill is not None
    decode, prefill = world.decode.attempt, world.prefill.attempt
    world.prefill_fails()
    state, held = world.exchange.state, world.in_flight
    for late in (
        DecodeStarted(decode),
        DecodeFailed(decode, ServerFault.ERROR),
        DecodeEnded(decode),
        DecodeRefused(decode),
        PrefillAnswered(prefill, "node"),
        PrefillFailed(prefill, ServerFault.ERROR),
        PrefillRefused(prefill),
    ):
        assert world.exchange.handle(late, NOW) == []
    assert (world.exchange.state, world.in_flight) == (state, held)


def test_nothing_follows_once_it_is_done() -> None:
    world = in_state(State.STREAMING)
    world.give(ClientLeft())
    assert world.give(ClientLeft()) == [] and world.give(Stopped(TIMED_OUT)) == []


# ---- the table as a whole


def test_the_table_answers_every_possible_event_in_each_state() -> None:
    come = {(State.NEW, sign) for sign in (Sign.BEGIN, Sign.CLIENT_LEFT, Sign.STOPPED)}
    come |= {(state, sign) for state in UNDER_WAY for sign in (Sign.CLIENT_LEFT, Sign.STOPPED)}
    come |= {
        (state, sign) for state in WITH_PREFILL for sign in (Sign.PREFILL_DONE, Sign.PREFILL_LOST, Sign.PREFILL_REFUSED)
    }
    come |= {(state, Sign.DECODE_LOST) for state in WITH_DECODE}
    come |= {(s, sign) for s in (State.BOTH, State.DECODING) for sign in (Sign.DECODE_STARTED, Sign.DECODE_REFUSED)}
    come |= {(state, Sign.DECODE_ENDED) for state in (State.STREAMING_BOTH, State.STREAMING)}
    assert {(state, sign) for state, sign, _ in TRANSITIONS} == come


def test_a_row_leaves_running_exactly_what_its_state_says() -> None:
    ended = {
        Sign.PREFILL_DONE: Move.CANCEL_PREFILL,
        Sign.PREFILL_LOST: Move.CANCEL_PREFILL,
        Sign.PREFILL_REFUSED: Move.CANCEL_PREFILL,
        Sign.DECODE_ENDED: Move.CANCEL_DECODE,
        Sign.DECODE_LOST: Move.CANCEL_DECODE,
        Sign.DECODE_REFUSED: Move.CANCEL_DECODE,
    }
    for (state, sign, way), (after, moves) in TRANSITIONS.items():
        running = {Role.PREFILL: state in WITH_PREFILL, Role.DECODE: state in WITH_DECODE}
        for move in (*([ended[sign]] if sign in ended else []), *moves):
            if move in (Move.CANCEL_PREFILL, Move.CANCEL_DECODE):
                role = Role.PREFILL if move is Move.CANCEL_PREFILL else Role.DECODE
                assert running[role], (state, sign, way)
                running[role] = False
            elif move in (Move.SEND_PREFILL, Move.SEND_DECODE):
                role = Role.PREFILL if move is Move.SEND_PREFILL else Role.DECODE
                assert not running[role], (state, sign, way)
                running[role] = True
        expected = {Role.PREFILL: after in WITH_PREFILL, Role.DECODE: after in WITH_DECODE}
        assert running == expected, (state, sign, way)
        ends = {Move.PASS_ON, Move.REFUSE, Move.BREAK, Move.FINISH} & set(moves)
        assert bool(ends) == (after is State.DONE and sign is not Sign.CLIENT_LEFT), (state, sign, way)


HAPPENINGS = (
    "answers",
    "moves",
    "plain",
    "p fails",
    "p refuses",
    "starts",
    "d fails",
    "d ends",
    "d refuses",
    "a server comes back",
    "the client leaves",
    "time is up",
)


@given(
    prefill=st.integers(0, 3),
    decode=st.integers(0, 3),
    known=st.booleans(),
    limit=st.integers(1, 2),
    tries=st.integers(2, 4),
    happenings=st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.sampled_from(list(ServerFault))), max_size=40),
)
def test_no_order_of_events_leaks_or_answers_twice(
    prefill: int, decode: int, known: bool, limit: int, tries: int, happenings: list[tuple[str, ServerFault]]
) -> None:
    """None blames prefill for what decode did."""
    world = World(prefill, decode, known=known, in_flight_max=limit, tries=tries)
    world.begin()
    decode_lost = False
    for name, fault in happenings:
        decode_lost |= name == "d fails" and world.decode is not None
        happen(world, name, fault)
        sent = [leg for leg in (world.prefill, world.decode) if leg is not None]
        assert world.in_flight == len(sent)
        if world.exchange.state is State.BOTH:
            assert world.prefill is not None and world.decode is not None and world.decode.handoff is not None
            assert world.decode.handoff.id == world.prefill.handoff_id
    if decode and not decode_lost:
        assert not any(isinstance(each, RefuseClient) and each.problem is not TIMED_OUT for each in world.actions)
    if world.exchange.state is not State.DONE:
        world.give(ClientLeft())
    assert world.in_flight == 0
    endings = [each for each in world.actions if isinstance(each, PassOn | RefuseClient | Break | Finish)]
    assert len(endings) <= 1
    assert len([each for each in world.actions if isinstance(each, Relay)]) <= 1
    # Every restart has lost a server for good, or found a prefill server elsewhere once per prefill.
    prefills = [each for each in world.actions if isinstance(each, SendPrefill)]
    assert len(prefills) <= prefill + decode + 1
    assert len({each.handoff_id for each in prefills}) == len(prefills)


def happen(world: World, name: str, fault: ServerFault) -> None:
    streaming = world.exchange.state in (State.STREAMING_BOTH, State.STREAMING)
    if world.prefill is not None and name in ("answers", "moves", "plain"):
        world.prefill_answers({"answers": "", "moves": "elsewhere", "plain": None}[name])
    elif world.prefill is not None and name == "p fails":
        world.prefill_fails(fault)
    elif world.prefill is not None and name == "p refuses":
        world.prefill_refuses()
    elif world.decode is not None and name == "starts" and not streaming:
        world.decode_starts()
    elif world.decode is not None and name == "d fails":
        world.decode_fails(fault)
    elif world.decode is not None and name == "d ends" and streaming:
        world.decode_ends()
    elif world.decode is not None and name == "d refuses" and not streaming:
        world.decode_refuses()
    elif name == "a server comes back":
        for server in world.pool.due(NOW):
            world.pool.check_passed(server, NOW)
    elif name == "the client leaves":
        world.give(ClientLeft())
    elif name == "time is up":
        world.give(Stopped(TIMED_OUT))


@pytest.mark.parametrize("module", ["plan", "servers", "bodies"])
def test_decisions_import_no_clock_socket_or_loop(module: str) -> None:
    source = Path(plan.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    found = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else node.names[0].name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert found <= {"__future__", "collections", "dataclasses", "enum", "json", "re", "typing", "kvservice"}


def test_way_keep_never_sends_anything() -> None:
    sends = {Move.SEND_PREFILL, Move.SEND_DECODE}
    assert all(not sends & set(moves) for (_, _, way), (_, moves) in TRANSITIONS.items() if way is Way.KEEP)
