"""One gatherer and many listeners; questions of people."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from kvservice.console import feed as feed_module
from kvservice.console.feed import LISTENERS_MAX, POINTS_MAX, PageFeed
from kvservice.console.questions import AT_ONCE, WAITING_MAX, Questions
from kvservice.errors import Exhausted, InvalidRequest
from kvservice.testing.eventually import eventually_async
from tests.unit.console.pages import Pages


def parsed(event: bytes) -> tuple[str, dict]:  # type: ignore[type-arg]
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_many_listeners_cost_as_many_readings_as_one() -> None:
    source = Pages()
    feed = PageFeed(source, interval_seconds=60.0)
    listeners = [feed.listen() for _ in range(LISTENERS_MAX)]
    await feed.read()
    first = [parsed(await anext(one)) for one in listeners]
    assert {name for name, _ in first} == {"all"}
    await feed.read()
    ticks = [await anext(one) for one in listeners]
    assert len({id(tick) for tick in ticks}) == 1, "one event is made, and all are sent the same"
    assert source.asked["overview"] == 2
    for one in listeners:
        await one.aclose()
    assert feed.listeners == 0


async def test_a_listener_too_many_is_refused() -> None:
    """One that left makes room."""
    feed = PageFeed(Pages(), interval_seconds=60.0)
    listeners = [feed.listen() for _ in range(LISTENERS_MAX)]
    for one in listeners:
        await anext(one)
    with pytest.raises(Exhausted, match=str(LISTENERS_MAX)):
        await anext(feed.listen())
    await listeners[0].aclose()
    async with aclosing(feed.listen()) as another:
        assert parsed(await anext(another))[0] == "all"
    for one in listeners:
        await one.aclose()


async def test_a_slow_listener_is_told_all_again() -> None:
    feed = PageFeed(Pages(), interval_seconds=60.0)
    await feed.read()
    async with aclosing(feed.listen()) as events:
        await anext(events)
        for _ in range(3):
            await feed.read()
        name, told = parsed(await anext(events))
        assert (name, len(told["points"])) == ("all", 4)


async def test_points_are_bounded() -> None:
    feed = PageFeed(Pages(), interval_seconds=60.0)
    for _ in range(POINTS_MAX + 5):
        await feed.read()
    async with aclosing(feed.listen()) as events:
        assert len(parsed(await anext(events))[1]["points"]) == POINTS_MAX


async def test_a_service_that_is_gone_is_told_and_then_shown_again() -> None:
    source = Pages()
    feed = PageFeed(source, interval_seconds=60.0)
    async with aclosing(feed.listen()) as events:
        assert parsed(await anext(events)) == ("all", {"page": None, "points": [], "failure": ""})
        source.gone = True
        await feed.read()
        assert "no service" in parsed(await anext(events))[1]["failure"]
        source.gone = False
        await feed.read()
        assert parsed(await anext(events))[1]["page"]["service"] == "default"


async def test_a_listener_wakes_a_feed_that_nobody_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "IDLE_SECONDS", 3600.0)
    source = Pages()
    feed = PageFeed(source, interval_seconds=0.01)
    running = asyncio.create_task(feed.run())
    await eventually_async(lambda: source.asked["overview"] == 1, "the first reading")
    async with aclosing(feed.listen()) as events:
        for _ in range(4):
            await anext(events)
        assert source.asked["overview"] >= 3
    running.cancel()


async def test_the_same_question_of_many_pages_is_asked_once() -> None:
    source, questions = Pages(), Questions()
    source.may_answer.clear()
    asked = [asyncio.create_task(questions.ask("r", lambda: source.explain("r"))) for _ in range(20)]
    await eventually_async(lambda: source.asked["explain"] == 1, "the question")
    asked[0].cancel()  # a page that leaves does not take the answer from the others
    source.may_answer.set()
    answers = await asyncio.gather(*asked[1:])
    again = await questions.ask("r", lambda: source.explain("r"))
    assert {answer["request_id"] for answer in [*answers, again]} == {"r"}
    assert source.asked["explain"] == 1


async def test_few_questions_are_under_way_and_few_wait() -> None:
    source, questions = Pages(), Questions()
    source.may_answer.clear()

    def ask(number: int) -> asyncio.Task[object]:
        return asyncio.create_task(questions.ask(f"{number}", lambda: source.explain(f"{number}")))

    asked = [ask(number) for number in range(AT_ONCE + WAITING_MAX)]
    await eventually_async(lambda: source.asked["explain"] == AT_ONCE, "the first questions")
    with pytest.raises(Exhausted):
        await ask(999)
    source.may_answer.set()
    assert len(await asyncio.gather(*asked)) == AT_ONCE + WAITING_MAX


async def test_a_question_that_fails_is_asked_again() -> None:
    questions, failures = Questions(), 0

    async def fail() -> dict[str, object]:
        nonlocal failures
        failures += 1
        raise InvalidRequest("no")

    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await questions.ask("r", fail)
    assert failures == 2
