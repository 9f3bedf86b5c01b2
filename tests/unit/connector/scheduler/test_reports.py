"""What the engine reports of a request that ended: its own hit, what was loaded, what it computed, and why."""

from __future__ import annotations

from kvservice.core.messages import RequestReport
from tests.unit.connector.line import BLOCK, Line, half, hashes, plan_step


def test_own_hit_loads_and_the_rest_add_up_to_the_prompt() -> None:
    line, chain = Line(), hashes(1, 5)
    scheduler = half(line)
    scheduler.on_new_request("r", chain, 0.0)
    assert line.asked[0][2].request_id == "r"
    line.answer(4)
    scheduler.matched("r", BLOCK, 5 * BLOCK + 2, 0.1)
    scheduler.allocated("r", range(10), 3 * BLOCK)
    plan_step(scheduler)
    scheduler.loaded("r", failed=False)
    scheduler.finished("r", [*chain, *hashes(9, 2)], 7 * BLOCK, range(10), store_rest=False)
    assert line.reports["r"] == RequestReport("r", 5, 1, 3, 1)


def test_no_more_blocks_are_loaded_than_the_prompt_has() -> None:
    """It is loaded again, with what was generated for it meanwhile."""
    line, chain = Line(), hashes(1, 6)
    scheduler = half(line)
    scheduler.on_new_request("r", chain[:2], 0.0)
    line.answer(2)
    scheduler.matched("r", 0, 2 * BLOCK + 2, 0.1)
    request = scheduler._requests["r"]
    request.loaded_blocks = 6
    assert (request.report().loaded_blocks, request.report().computed_blocks) == (2, 0)


def test_a_failed_load_is_computed_and_said() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 3), 0.0, salted=True)
    line.answer(3)
    scheduler.matched("r", 0, 50, 0.1)
    scheduler.allocated("r", range(4), 3 * BLOCK)
    plan_step(scheduler)
    scheduler.loaded("r", failed=True)
    scheduler.finished("r", hashes(1, 3), 50, range(4), store_rest=False)
    assert line.reports["r"] == RequestReport("r", 3, 0, 0, 3, load_failed=True, salted=True)


def test_an_answer_that_was_not_waited_for_is_said() -> None:
    line = Line()
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 3), 0.0)
    scheduler.matched("r", 0, 50, 9.0)
    scheduler.finished("r", hashes(1, 3), 50, range(4), store_rest=False)
    assert line.reports["r"] == RequestReport("r", 3, 0, 0, 3, gave_up=True)


def test_without_a_pool_the_report_says_that_nobody_was_asked() -> None:
    line = Line()
    line.attachment = None
    scheduler = half(line)
    scheduler.on_new_request("r", hashes(1, 3), 0.0)
    scheduler.matched("r", 2 * BLOCK, 50, 0.1)
    scheduler.finished("r", hashes(1, 3), 50, range(4), store_rest=False)
    assert line.reports["r"] == RequestReport("r", 3, 2, 0, 1, asked=False)
