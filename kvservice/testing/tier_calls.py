"""Blocks by number, and calls of a tier that wait for their answers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.tier.base import Tier, TierRead, TierWrite, WriteResult
from kvservice.units import BlockKey, KiB, SpanRoute

PATIENT_SECONDS = 60.0  # for an answer on a busy machine; a tier that gives none fails the test


class BlocksOfTier:
    """Block number 5 of each tier has the same key and bytes. Each call blocks until it is answered."""

    def __init__(self, tier: Tier, payload_bytes: int = 64 * KiB) -> None:
        self.tier = tier
        self.payload_bytes = payload_bytes

    def payload(self, number: int) -> bytes:
        return bytes([number % 256]) * self.payload_bytes

    def block(self, number: int, **changes: Any) -> TierBlock:
        key = BlockKey(number.to_bytes(16, "big"))
        digest = digest_payload(self.payload(number), key)
        block = TierBlock(key, self.payload_bytes, digest, position=number, route=SpanRoute(7))
        return replace(block, **changes)

    def write(self, *numbers: int) -> tuple[WriteResult, ...]:
        items = tuple((self.block(number), memoryview(self.payload(number))) for number in numbers)
        answers: list[tuple[WriteResult, ...]] = []
        done = threading.Event()

        def on_done(_: int, results: tuple[WriteResult, ...], stored_bytes: tuple[int, ...] = ()) -> None:
            answers.append(results)
            done.set()

        self.tier.write(TierWrite(1, items), on_done)
        assert done.wait(PATIENT_SECONDS), "the write is not answered"
        return answers[0]

    def read(
        self, *blocks: TierBlock, seconds: float = PATIENT_SECONDS
    ) -> tuple[tuple[PullResult, ...], tuple[int, ...], list[bytearray]]:
        """(results, digests, slots)"""
        slots = [bytearray(block.payload_bytes) for block in blocks]
        answers: list[tuple[BroughtBlock, ...]] = []
        done = threading.Event()

        def on_done(_: int, found: tuple[BroughtBlock, ...]) -> None:
            answers.append(found)
            done.set()

        items = tuple((block, memoryview(slot)) for block, slot in zip(blocks, slots, strict=True))
        self.tier.read(TierRead(2, items, time.monotonic() + seconds), on_done)
        assert done.wait(PATIENT_SECONDS), "the read is not answered"
        return tuple(block.result for block in answers[0]), tuple(block.digest for block in answers[0]), slots

    def begin_read(self, *blocks: TierBlock) -> list[tuple[PullResult, ...]]:
        """Does not wait: the results come into this list."""
        answers: list[tuple[PullResult, ...]] = []
        items = tuple((block, memoryview(bytearray(block.payload_bytes))) for block in blocks)
        job = TierRead(3, items, time.monotonic() + PATIENT_SECONDS)
        self.tier.read(job, lambda _, found: answers.append(tuple(block.result for block in found)))
        return answers

    def probe(self, *numbers: int, seconds: float = PATIENT_SECONDS) -> int:
        answers: list[int] = []
        done = threading.Event()

        def on_done(count: int, is_end: bool = False) -> None:
            answers.append(count)
            done.set()

        self.tier.probe([self.block(number).key for number in numbers], time.monotonic() + seconds, on_done)
        assert done.wait(PATIENT_SECONDS), "the probe is not answered"
        return answers[0]
