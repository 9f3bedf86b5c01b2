"""A router's book of what it sent: work ends by itself, requests are counted once, engines forget."""

from __future__ import annotations

import dataclasses

import pytest

from kvservice.serve.load import FIRST_REQUEST_SECONDS, UNCONFIRMED_SECONDS, LoadBook, SentPrefixes
from kvservice.serve.routing import QueueWait
from kvservice.units import BlockHash


def hashes(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


def waits(book: LoadBook, replica: str, reported: int | None, now: float) -> QueueWait:
    """Without what is only expected."""
    return dataclasses.replace(book.wait(replica, reported, now), expected=0.0)


def test_decisions_of_the_same_moment_see_each_other() -> None:
    book = LoadBook()
    book.decided("q1", "a", 2.0, now=0.0)
    assert book.wait("a", None, 0.0).backlog_seconds == 2.0
    assert book.wait("b", None, 0.0) == QueueWait()


def test_prompts_are_computed_one_by_one_then_decoded() -> None:
    book = LoadBook()
    for name in ("q1", "q2"):
        book.decided(name, "a", 1.0, now=0.0)
        book.routed(name, "a", now=0.0)
    assert waits(book, "a", 2, 0.5) == QueueWait(backlog_seconds=1.5, waiting=0, decoding=0)
    assert waits(book, "a", 2, 1.5) == QueueWait(backlog_seconds=0.5, waiting=0, decoding=1)
    assert waits(book, "a", 2, 2.5) == QueueWait(backlog_seconds=0.0, waiting=0, decoding=2)


def test_a_request_that_ends_early_takes_its_remaining_work_away() -> None:
    book = LoadBook()
    for name in ("q1", "q2"):
        book.decided(name, "a", 1.0, now=0.0)
        book.routed(name, "a", now=0.0)
    book.completed("q1", "a", now=0.25)
    assert book.wait("a", 1, 0.25).backlog_seconds == pytest.approx(1.0)
    book.completed("q2", "a", now=0.25)
    assert waits(book, "a", 0, 0.25) == QueueWait()


def test_requests_beyond_ours_are_those_of_other_routers() -> None:
    book = LoadBook()
    book.decided("q1", "a", 1.0, now=0.0)
    book.routed("q1", "a", now=0.0)
    assert book.wait("a", 4, 0.0).waiting == 3
    assert book.wait("b", 4, 0.0).waiting == 4


def test_requests_of_other_routers_are_as_far_as_ours() -> None:
    book = LoadBook()
    for index in range(7):
        book.decided(f"q{index}", "a", 1.0, now=0.0)
        book.routed(f"q{index}", "a", now=0.0)
    found = book.wait("b", 8, 7.5)
    assert (found.waiting, found.decoding) == (1.0, 7.0), "all of ours are past their prefill"


def test_a_request_counts_only_where_it_went() -> None:
    book = LoadBook()
    book.decided("q1", "a", 1.5, now=0.0)
    book.routed("q1", "b", now=0.0)
    assert (book.in_flight("a", 0.0), book.in_flight("b", 0.0)) == (0, 1)
    assert book.wait("b", None, 0.0).backlog_seconds == 1.5


def test_a_decision_without_a_request_is_forgotten() -> None:
    book = LoadBook()
    book.decided("q1", "a", 60.0, now=0.0)
    assert waits(book, "a", None, UNCONFIRMED_SECONDS + 1) == QueueWait()
    assert book.in_flight("a", UNCONFIRMED_SECONDS + 1) == 0


def test_a_decision_without_a_request_counts_for_a_moment() -> None:
    """Also under a policy that never asks for the wait."""
    book = LoadBook()
    book.decided("q1", "a", 1.0, now=0.0)
    assert [book.in_flight("a", at) for at in (0.0, UNCONFIRMED_SECONDS + 1)] == [1, 0]


def test_a_replica_that_left_leaves_nothing() -> None:
    book = LoadBook()
    book.decided("q1", "a", 1.0, now=0.0)
    book.keep(["b"])
    assert book.wait("a", None, 0.0) == QueueWait()
    book.completed("q1", "a", now=0.0)  # its end is told later


def test_only_the_replica_that_has_a_request_ends_it() -> None:
    book = LoadBook()
    book.decided("q1", "full", 1.0, now=0.0)
    book.decided("q1", "b", 1.0, now=0.0)
    book.routed("q1", "b", now=0.0)
    book.completed("q1", "full", now=0.1)
    assert book.in_flight("b", 0.1) == 1
    book.completed("q1", "b", now=0.2)
    assert book.in_flight("b", 0.2) == 0


def test_the_average_follows_what_is_sent() -> None:
    book = LoadBook()
    assert book.request_seconds == FIRST_REQUEST_SECONDS
    for index in range(100):
        book.decided(f"q{index}", "a", 1.0, now=float(index))
    assert book.request_seconds == pytest.approx(1.0, rel=0.01)


def test_only_the_leading_blocks_count() -> None:
    sent = SentPrefixes(blocks_max=10, seconds=60)
    sent.remember("a", hashes("x", "y", "z"), now=0.0)
    assert sent.leading("a", hashes("x", "y", "q", "z"), now=1.0) == 2
    assert sent.leading("b", hashes("x"), now=1.0) == 0


def test_leaves_of_the_oldest_prompt_are_forgotten_first() -> None:
    sent = SentPrefixes(blocks_max=4, seconds=60)
    sent.remember("a", hashes("x", "y", "z"), now=0.0)
    sent.remember("a", hashes("p", "q"), now=1.0)
    assert sent.leading("a", hashes("x", "y", "z"), now=1.0) == 2
    assert sent.leading("a", hashes("p", "q"), now=1.0) == 2


def test_an_engine_is_believed_to_remember_only_for_some_time() -> None:
    sent = SentPrefixes(blocks_max=4, seconds=60)
    sent.remember("a", hashes("x", "y"), now=0.0)
    assert sent.leading("a", hashes("x", "y"), now=59.0) == 2
    assert sent.leading("a", hashes("x", "y"), now=61.0) == 0


def test_a_restarted_engine_is_believed_to_hold_nothing() -> None:
    """Its replica has another name."""
    sent = SentPrefixes(blocks_max=4, seconds=60)
    sent.remember("a#1", hashes("x"), now=0.0)
    sent.keep(["a#2"])
    assert sent.leading("a#1", hashes("x"), now=0.0) == 0
    assert sent.leading("a#2", hashes("x"), now=0.0) == 0


def test_a_replica_that_was_busy_is_expected_busy() -> None:
    book = LoadBook()
    for index in range(30):
        book.decided(f"q{index}", "a", 0.5, now=float(index))
        book.routed(f"q{index}", "a", now=float(index))
        book.completed(f"q{index}", "a", now=index + 0.5)
    half_busy = book.wait("a", 0, 30.0)
    assert (half_busy.backlog_seconds, half_busy.waiting) == (0.0, 0.0)
    assert 0.3 < half_busy.expected < 1.0
    assert book.wait("a", 0, 300.0).expected < 0.001
    assert book.wait("b", 0, 30.0).expected == 0.0
