"""The inbox of what became of blocks: the last word on each is kept until it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from kvservice.core.messages import Removed, SealItem, SealStatus
from kvservice.core.segment.refs import BlockRef
from kvservice.session.news import REMOVED_MAX, BlockNews, NewsInbox
from kvservice.session.session import Session
from kvservice.testing.eventually import eventually
from kvservice.units import AttachmentId, BlockKey, Generation, SlotIndex, SpanRoute
from tests.settled import has_slots
from tests.unit.session.test_session import SPEC, Bench

ONE, OTHER = BlockKey(bytes(16)), BlockKey(bytes([1]) * 16)
REF = BlockRef(SlotIndex(0), Generation(1))


def heartbeat(inbox: NewsInbox, keys: Iterable[BlockKey], lost: int = 0) -> None:
    async def answer() -> Removed:
        return Removed(tuple(keys), lost)

    asyncio.run(inbox.hear(answer()))


def seal(inbox: NewsInbox, key: BlockKey, status: SealStatus = SealStatus.SEALED) -> None:
    inbox.sealed([item(key)], [status])


def item(key: BlockKey, ref: BlockRef = REF) -> SealItem:
    return SealItem(ref, key, None, 0, SpanRoute(0))


def inbox() -> NewsInbox:
    return NewsInbox(is_read=True)


def test_news_are_taken_once() -> None:
    news = inbox()
    seal(news, ONE)
    heartbeat(news, [OTHER])
    assert news.take() == BlockNews(answered={ONE: True}, removed={OTHER: None})
    assert news.take() == BlockNews()


def test_the_last_word_on_a_block_is_kept() -> None:
    news = inbox()
    seal(news, ONE)
    heartbeat(news, [ONE, OTHER])
    seal(news, OTHER, SealStatus.DUPLICATE)
    assert news.take() == BlockNews(answered={ONE: False, OTHER: True})


def test_what_was_not_sealed_is_not_there() -> None:
    news = inbox()
    seal(news, ONE, SealStatus.STALE)
    news.not_sealed([item(OTHER)])
    assert news.take() == BlockNews(answered={ONE: False, OTHER: False})


def test_after_a_loss_only_what_came_behind_it_is_there() -> None:
    for lose in (NewsInbox.all_gone, lambda news: heartbeat(news, [], lost=1)):
        news = inbox()
        seal(news, ONE)
        lose(news)
        seal(news, OTHER)
        assert news.take() == BlockNews(True, {ONE: False, OTHER: True})


def test_inbox_that_nobody_empties_is_bounded() -> None:
    news = inbox()
    seal(news, ONE)
    heartbeat(news, [BlockKey(number.to_bytes(16, "big")) for number in range(1, REMOVED_MAX + 2)])
    assert news.take() == BlockNews(True, {ONE: True}), "what it was asked about is answered"


def test_news_that_nobody_reads_are_not_kept() -> None:
    news = NewsInbox(is_read=False)
    seal(news, ONE)
    heartbeat(news, [OTHER])
    assert news.take() == BlockNews()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.session = Session(made.open, replace(SPEC, hears_removals=True), lambda: True)
    yield made
    made.close()


def test_answer_that_comes_together_with_the_loss_is_none(bench: Bench) -> None:
    attachment = bench.start()
    unpatched = bench.pool.seal

    async def seal(of: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        statuses = await unpatched(of, items)
        bench.session._forget()  # as when the connection ends in the same turn of the loop
        return statuses

    bench.pool.seal = seal  # type: ignore[method-assign]
    eventually(lambda: has_slots(bench.session), "slots in stock")
    (ref,) = bench.session.take_slots(attachment.attachment_id, 1)
    bench.session.seal(attachment.attachment_id, [item(ONE, ref)])
    eventually(lambda: ONE in bench.session._news._news.answered, "an answer")
    assert bench.session.news() == BlockNews(True, {ONE: False})
