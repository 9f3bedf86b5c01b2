"""Rules of proxy.servers: who is chosen, what makes a server sick and well, when its health is due."""

from __future__ import annotations

import pytest

from kvservice.proxy.servers import ERRORS_MAX, Role, Server, ServerFault, ServerPool

PREFILL = ("http://p0", "http://p1")
DECODE = ("http://d0", "http://d1", "http://d2")
SECONDS = 5.0


def make_pool(*, healthy: bool = True, in_flight_max: int = 2) -> ServerPool:
    pool = ServerPool(PREFILL, DECODE, in_flight_max=in_flight_max, check_seconds=SECONDS)
    if healthy:
        for server in pool.due(0.0):
            pool.check_passed(server, 0.0)
    return pool


def by_url(pool: ServerPool, url: str) -> Server:
    return next(server for server in pool if server.url == url)


def take(pool: ServerPool, role: Role = Role.DECODE) -> str:
    server = pool.choose(role)
    assert server is not None
    pool.acquire(server)
    return server.url


def test_nobody_is_chosen_before_the_first_check() -> None:
    pool = make_pool(healthy=False)
    assert pool.choose(Role.DECODE) is None
    assert not pool.healthy(Role.DECODE)


def test_ties_go_round() -> None:
    pool = make_pool(in_flight_max=9)
    assert [take(pool) for _ in range(6)] == [*DECODE, *DECODE]


def test_servers_without_work_take_turns() -> None:
    pool, taken = make_pool(), []
    for _ in range(6):
        taken.append(take(pool))
        pool.release(by_url(pool, taken[-1]))
    assert taken == [*DECODE, *DECODE]


def test_looking_without_sending_leaves_the_turn_as_it_is() -> None:
    pool = make_pool()
    assert pool.choose(Role.DECODE) is pool.choose(Role.DECODE)


def test_the_least_busy_server_is_chosen() -> None:
    pool = make_pool(in_flight_max=9)
    for _ in range(5):
        take(pool)
    pool.release(by_url(pool, "http://d0"))
    pool.release(by_url(pool, "http://d0"))
    assert take(pool) == "http://d0"


def test_a_server_at_its_limit_is_left_out() -> None:
    pool = make_pool(in_flight_max=1)
    assert {take(pool) for _ in DECODE} == set(DECODE)
    assert pool.choose(Role.DECODE) is None
    assert pool.healthy(Role.DECODE)


def test_a_preferred_server_wins_only_while_it_is_usable() -> None:
    pool = make_pool(in_flight_max=1)
    wanted = by_url(pool, "http://d2")
    assert pool.choose(Role.DECODE, prefer=wanted) is wanted
    assert pool.choose(Role.DECODE, prefer=wanted, exclude={wanted.url}) is not wanted
    pool.acquire(wanted)
    assert pool.choose(Role.DECODE, prefer=wanted) is not wanted


def test_a_release_too_many_is_a_bug() -> None:
    pool = make_pool()
    with pytest.raises(AssertionError):
        pool.release(by_url(pool, "http://d0"))


def test_a_lost_connection_makes_a_server_sick_at_once() -> None:
    """Its node is forgotten."""
    pool = make_pool()
    server = by_url(pool, "http://p0")
    pool.learnt(server, "node-0")
    pool.failed(server, ServerFault.UNREACHABLE, 1.0)
    assert not server.healthy and server.node is None and "unreachable" in server.reason


def test_a_server_is_asked_for_its_health_before_it_is_sick() -> None:
    """It failed under a request."""
    pool = make_pool()
    server = by_url(pool, "http://d0")
    pool.failed(server, ServerFault.BROKEN, 1.0)
    assert server.healthy and pool.due(1.0) == [server]


@pytest.mark.parametrize("fault", [ServerFault.BROKEN, ServerFault.ERROR, ServerFault.TIMEOUT])
def test_errors_make_a_server_sick_only_in_a_row(fault: ServerFault) -> None:
    pool = make_pool()
    server = by_url(pool, "http://d0")
    for _ in range(ERRORS_MAX - 1):
        pool.failed(server, fault, 1.0)
    pool.answered(server)
    for _ in range(ERRORS_MAX - 1):
        pool.failed(server, fault, 1.0)
    assert server.healthy
    pool.failed(server, fault, 1.0)
    assert not server.healthy


def test_an_error_forgets_the_node_of_a_server_that_stays_in_use() -> None:
    pool = make_pool()
    server = by_url(pool, "http://p0")
    pool.learnt(server, "node-0")
    pool.failed(server, ServerFault.ERROR, 1.0)
    assert server.healthy and server.node is None


def test_being_busy_is_no_illness() -> None:
    pool = make_pool()
    server = by_url(pool, "http://p0")
    pool.learnt(server, "node-0")
    for _ in range(ERRORS_MAX + 1):
        pool.failed(server, ServerFault.BUSY, 1.0)
    assert server.healthy and server.node == "node-0"


def test_a_failed_server_is_checked_at_once_and_comes_back() -> None:
    pool = make_pool()
    server = by_url(pool, "http://d1")
    assert pool.due(1.0) == []
    pool.failed(server, ServerFault.UNREACHABLE, 1.0)
    assert pool.seconds_to_next_check(1.0) == 0.0
    assert pool.due(1.0) == [server]
    pool.check_passed(server, 1.2)
    assert server.healthy and server.reason == "" and server.errors == 0


@pytest.mark.parametrize("fault", [ServerFault.UNREACHABLE, ServerFault.BROKEN])
def test_a_check_that_began_before_a_failure_says_nothing(fault: ServerFault) -> None:
    pool = make_pool()
    server = by_url(pool, "http://d1")
    assert server in pool.due(SECONDS)
    pool.failed(server, fault, 5.1)
    healthy = server.healthy
    pool.check_passed(server, 5.2)
    assert server.healthy is healthy and server.errors == 1
    assert pool.due(5.2) == [server]
    pool.check_passed(server, 5.3)
    assert server.healthy and server.errors == 0 and pool.due(5.3) == []


def test_a_check_is_handed_out_once_until_it_is_reported() -> None:
    pool = make_pool(healthy=False)
    first = pool.due(0.0)
    assert len(first) == len(PREFILL) + len(DECODE)
    assert pool.due(100.0) == []
    assert pool.seconds_to_next_check(100.0) == SECONDS
    pool.check_failed(first[0], "refused", 100.0, slow=False)
    assert pool.due(100.0 + SECONDS) == [first[0]]


def test_one_slow_check_is_forgiven_and_a_refused_one_is_not() -> None:
    pool = make_pool()
    slow, refused = by_url(pool, "http://d0"), by_url(pool, "http://d1")
    pool.check_failed(refused, "refused", 5.0, slow=False)
    assert not refused.healthy and refused.reason == "refused"
    pool.check_failed(slow, "slow", 5.0, slow=True)
    assert slow.healthy
    pool.check_passed(slow, 10.0)
    pool.check_failed(slow, "slow", 15.0, slow=True)
    assert slow.healthy
    pool.check_failed(slow, "slow", 20.0, slow=True)
    assert not slow.healthy


def test_prefill_that_hands_nothing_off_is_not_used() -> None:
    pool = make_pool()
    plain, other = by_url(pool, "http://p0"), by_url(pool, "http://p1")
    pool.learnt(plain, None)
    assert pool.choose(Role.PREFILL) is other
    assert pool.choose(Role.PREFILL, exclude={other.url}) is None
    pool.learnt(plain, "node-0")
    assert pool.choose(Role.PREFILL, exclude={other.url}) is plain
