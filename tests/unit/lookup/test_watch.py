"""Snapshots are taken in turn: who waits for one has no queue that could overflow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kvservice.core.block.keys import KEY_BYTES
from kvservice.core.directory.directory import Directory
from kvservice.errors import Exhausted
from kvservice.lookup import watch
from kvservice.lookup.watch import WatchHub
from kvservice.testing.builders import make_chain, make_holder
from kvservice.wire.v1 import lookup_pb2

CHAIN = make_chain(100)
Stream = AsyncGenerator[lookup_pb2.WatchEvent, None]


@pytest.fixture
def directory() -> Directory:
    directory = Directory()
    directory.apply(make_holder("n0"), 1, CHAIN[:10], full_begin=True, full_end=True, now=0.0)
    return directory


@pytest.fixture
def hub(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> WatchHub:
    monkeypatch.setattr(watch, "SNAPSHOTS_MAX", 1)
    return WatchHub(directory, lambda: 0.0)


async def snapshot_of(stream: Stream) -> set[bytes]:
    keys: set[bytes] = set()
    async for event in stream:
        keys |= {event.added[i : i + KEY_BYTES] for i in range(0, len(event.added), KEY_BYTES)}
        if event.snapshot_end:
            break
    return keys


async def test_changes_are_not_kept_for_who_waits_for_its_turn(
    directory: Directory, hub: WatchHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many that come at once would be cut off before it has read its snapshot, and come again."""
    monkeypatch.setattr(watch, "QUEUE_BYTES_MAX", 10 * watch.EVENT_OVERHEAD_BYTES)
    first, second = hub.subscribe(), hub.subscribe()
    await anext(first)
    waiting = asyncio.create_task(snapshot_of(second))
    for number in range(10, 100):
        await asyncio.sleep(0)
        directory.apply(make_holder("n0"), number - 8, [CHAIN[number]], now=0.0)
        hub.publish()
    with pytest.raises(Exhausted):
        await snapshot_of(first)
    assert await waiting == set(CHAIN)
    await second.aclose()


async def test_who_waits_for_its_turn_hears_heartbeats(hub: WatchHub) -> None:
    first, second = hub.subscribe(), hub.subscribe(0.01)
    await anext(first)
    assert await anext(second) == await anext(second) == lookup_pb2.WatchEvent()
    assert await snapshot_of(first) == await snapshot_of(second) == set(CHAIN[:10])
    for stream in (first, second):
        await stream.aclose()


async def test_who_does_not_read_has_no_longer_turn(hub: WatchHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TURN_SECONDS_MAX", 0.01)
    first, second = hub.subscribe(), hub.subscribe()
    await anext(first)
    assert await asyncio.wait_for(snapshot_of(second), 60) == set(CHAIN[:10])
    assert await snapshot_of(first) == set(CHAIN[:10])
    for stream in (first, second):
        await stream.aclose()


async def test_who_goes_while_it_waits_takes_no_turn(hub: WatchHub) -> None:
    first, second, third = (hub.subscribe(0.01) for _ in range(3))
    await anext(first)
    for stream in (second, third):
        await anext(stream)
    await second.aclose()
    await first.aclose()
    assert await snapshot_of(third) == set(CHAIN[:10])
    await third.aclose()
    assert len(hub) == 0
