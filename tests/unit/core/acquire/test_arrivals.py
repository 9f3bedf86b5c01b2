"""Blocks that come to this node by another way than the fetch that an acquisition waits for."""

from __future__ import annotations

from kvservice.core.events import PullResult
from kvservice.core.messages import MissReason
from kvservice.testing.builders import LARGE, CoreHarness, make_chain, make_located, make_spec, run_of

CHAIN = make_chain(4)


def test_a_block_that_fails_its_digest_does_not_end_its_fetch() -> None:
    """A peer brings it at the same time."""
    harness = CoreHarness()
    engine, writer = harness.attach(), harness.attach(make_spec("writer"))
    op = harness.acquire(engine, CHAIN[:1])
    harness.resolved(op, run_of(0, 1))
    (ref,) = harness.reserve(writer)
    harness.begin_seal(writer, harness.items([ref], CHAIN))
    harness.digest_all(readable=False)
    assert harness.open(op)
    harness.located(harness.locates[-1], make_located(CHAIN[:1]))
    harness.pulled(harness.pulls[-1], PullResult.OK)
    assert len(harness.result(op).blocks) == 1


def test_a_block_of_another_size_is_not_promised() -> None:
    """An engine with a wrong layout stored it under the name that another one waits for."""
    harness = CoreHarness()
    engine, wrong = harness.attach(), harness.attach(make_spec("wrong", "other", payload_bytes=LARGE))
    op = harness.acquire(engine, CHAIN[:1])
    harness.resolved(op, run_of(0, 1))
    harness.store(wrong, CHAIN[:1])
    assert (harness.result(op).blocks, harness.result(op).miss) == ((), MissReason.STALE)
