"""The last event of a block says whether it is in the pool: of a told one that has gone, and of one that came back."""

from __future__ import annotations

from kvservice.connector.scheduler.half import IDLE_SECONDS, SchedulerHalf
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.connector.scheduler.told import ANSWER_SECONDS_MAX
from kvservice.session.news import BlockNews
from tests.unit.connector.line import Line, half, hashes, keys_of, report, run_step

CHAIN = hashes(1, 3)
KEYS = keys_of(CHAIN)


def half_that_sent(line: Line) -> SchedulerHalf:
    """Three blocks are sent to be sealed."""
    made = half(line, remember_stored=True)
    store(made, "r")
    return made


def store(made: SchedulerHalf, request: str) -> None:
    made.on_new_request(request, CHAIN, 0.0, terms=RequestTerms(may_load=False))
    made._known.forget(KEYS)  # as when an acquire finds them gone
    made.reported(report(run_step(made, request, CHAIN, len(CHAIN) * 16)))


def told(made: SchedulerHalf) -> tuple[list[bytes], list[bytes]]:
    gone, stored = made.take_told()
    return list(gone), [block.block_hash for block in stored]


def test_stored_block_is_told_when_the_pool_has_answered() -> None:
    line = Line()
    made = half_that_sent(line)
    line.news()
    assert told(made) == ([], [])
    assert made.has_pending_work(0.0) and not made.has_pending_work(ANSWER_SECONDS_MAX), "a step is needed, to tell it"
    line.heard = BlockNews(answered=dict.fromkeys(KEYS, True))
    assert told(made) == ([], CHAIN)
    assert not made.has_pending_work(0.0)


def test_idle_engine_waits_for_the_answer_and_does_not_spin() -> None:
    line = Line()
    made = half_that_sent(line)
    line.news()
    assert told(made) == ([], [])
    assert made.idle_seconds() == IDLE_SECONDS, "its steps have nothing else to do"
    line.heard = BlockNews(answered=dict.fromkeys(KEYS, True))
    assert told(made) == ([], CHAIN)
    assert made.idle_seconds() == 0.0


def test_block_that_was_not_sealed_is_not_told() -> None:
    line = Line()
    made = half_that_sent(line)
    line.heard.answered[KEYS[2]] = False
    assert told(made) == ([], CHAIN[:2])
    assert not made.has_pending_work(0.0)


def test_removed_block_is_told_once_in_the_engines_own_hash() -> None:
    line = Line()
    made = half_that_sent(line)
    told(made)
    line.heard.removed = dict.fromkeys([KEYS[1], *keys_of(hashes(7, 1))])
    assert told(made) == ([CHAIN[1]], []), "the other one was not this engine's"
    line.heard.removed = {KEYS[1]: None}
    assert told(made) == ([], [])


def test_block_removed_and_stored_again_is_told_in_this_order() -> None:
    line = Line()
    made = half_that_sent(line)
    told(made)
    store(made, "again")
    line.heard.removed[KEYS[0]] = None
    del line.heard.answered[KEYS[0]]
    assert told(made) == (CHAIN[:1], []), "it is gone, and its children wait for it"
    line.heard.answered[KEYS[0]] = True
    assert told(made) == ([], CHAIN)


def test_block_waits_for_its_parent_to_be_told() -> None:
    """Seals may be answered in any order, and an indexer drops a block whose parent it does not know."""
    line = Line()
    made = half_that_sent(line)
    line.heard = BlockNews(answered={KEYS[2]: True, KEYS[0]: True})
    assert told(made) == ([], CHAIN[:1])
    line.heard.removed[KEYS[2]] = None
    line.heard.answered[KEYS[1]] = True
    assert told(made) == ([], [CHAIN[1]]), "the one that waited has gone meanwhile"
    assert not made.has_pending_work(0.0)


def test_pool_that_is_gone_takes_every_told_block_with_it() -> None:
    line = Line()
    made = half_that_sent(line)
    told(made)
    line.heard = BlockNews(all_gone=True)
    assert told(made) == (CHAIN, [])
    line.heard = BlockNews(all_gone=True)
    assert told(made) == ([], [])


def test_what_a_new_pool_has_is_told_behind_the_loss() -> None:
    line = Line()
    made = half_that_sent(line)
    told(made)
    store(made, "again")
    line.heard.all_gone = True
    assert told(made) == (CHAIN, CHAIN)


def test_after_a_reset_nothing_told_before_is_there() -> None:
    line = Line()
    made = half_that_sent(line)
    told(made)
    store(made, "again")
    made.reset(b"term")
    assert told(made) == (CHAIN, []), "nor what was being sealed"
