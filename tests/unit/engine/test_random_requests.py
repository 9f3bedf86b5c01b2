"""Random requests, aborts, losses and damage: whatever blocks go through, the tokens are those of no cache at all."""

from __future__ import annotations

import random
import time
from typing import Any, cast

import pytest

from kvservice.core.segment.geometry import HEADER_BYTES
from kvservice.engine.loop import ReferenceEngine
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions, PreemptBy
from kvservice.engine.sampling import Sampling
from kvservice.errors import InvalidRequest
from tests.unit.engine.hash_chain import VOCABULARY, WORDS_MAX, ChainModel, said

SEEDS = 24
REQUESTS = 12
STEPS_MAX = 20_000  # for what takes some hundreds; one without work takes half a millisecond
DIFFERENT_PROMPTS = 60  # tokens of the text that prompts begin with


def options_of(noise: random.Random, block_tokens: int) -> EngineOptions:
    found: dict[str, Any] = {
        "mode": "embedded",
        "memory": "4MiB",
        "weights_version": "random",
        "verify_load": "full",
        "block_tokens": block_tokens,
        "device_blocks": max(3, noise.choice([20, 40, 60, 90]) // block_tokens),
        "host_blocks": noise.choice([None, None, 3, 40]),
        "step_tokens": noise.choice([2, 9, 20, 100]),
        "sequences": noise.choice([1, 4, 8]),
        "watermark": noise.choice([0.0, 0.1]),
        "preempt_by": noise.choice(list(PreemptBy)),
        "layerwise": noise.choice(["off", "off", "load", "both"]),
        "defer_stores": noise.choice(["on", "off"]),
    }
    if noise.random() < 0.3:
        found["slot_tokens"] = block_tokens * noise.choice([2, 3])
    elif noise.random() < 0.4 and found["layerwise"] == "off":
        found["tails"] = True
    return EngineOptions(**found)


def sampling_of(noise: random.Random) -> Sampling:
    count = noise.choice([1, 2, 5, 20, noise.randrange(1, 25)])
    match noise.randrange(4):
        case 0:
            return Sampling(count, temperature=1.0, n=noise.randrange(1, 4), seed=noise.randrange(99))
        case 1:
            beams = noise.randrange(2, 5)
            return Sampling(count, n=noise.randrange(1, beams + 1), beams=beams, early_stopping=noise.random() < 0.5)
    return Sampling(count)


def lose(engine: ReferenceEngine, noise: random.Random) -> None:
    """Blocks of the engine, the pool itself, or bytes in it."""
    assert engine._cache is not None
    session = engine._cache._session
    pool, attachment = cast(Any, session._pool), session.attachment
    match noise.randrange(3):
        case 0:
            engine.forget()
        case 1 if attachment is not None and session._loop is not None:
            number = attachment.attachment_id
            on_lost = pool._lost.get(number, lambda reason: None)
            session._loop.call_soon_threadsafe(lambda: (pool.attachment_lost(number), on_lost("a test")))
        case _ if pool is not None:
            segment = pool._segment
            for slot, size, header in segment.scan():
                if header.is_stable and noise.random() < 0.2:  # one without a digest yet is not noticed
                    begin = segment.geometry.header_offset(slot)
                    target = segment.payload(slot, size)
                    if noise.random() < 0.2:
                        target = segment.buffer[begin : begin + HEADER_BYTES]
                    target[noise.randrange(len(target))] ^= 1 << noise.randrange(8)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_requests_say_what_they_say_without_a_cache(seed: int) -> None:
    noise = random.Random(seed)
    block_tokens, window = noise.choice([1, 2, 3, 4, 7, 16]), noise.choice([0, 0, 3, 9])
    options = options_of(noise, block_tokens)
    model = ChainModel(block_tokens, noise.choice([4, WORDS_MAX]), window, is_layered=options.layerwise.loads)
    text = [noise.randrange(VOCABULARY) for _ in range(DIFFERENT_PROMPTS)]
    asked: dict[str, tuple[list[int], Sampling]] = {}
    aborted: set[str] = set()
    added = steps = 0
    with ReferenceEngine(cast(PagedModel, model), options) as engine:
        while added < REQUESTS or engine.has_work:
            steps += 1
            assert steps < STEPS_MAX, [(group.request_id, group.state) for group in engine.scheduler.groups]
            if added < REQUESTS and noise.random() < 0.4:
                added += 1
                length = noise.choice([1, block_tokens, 2 * block_tokens, 3 * block_tokens + 1, noise.randrange(1, 50)])
                same = length if noise.random() < 0.6 else length // 2
                tokens = text[:same] + [noise.randrange(VOCABULARY) for _ in range(length - same)]
                sampling = sampling_of(noise)
                try:
                    asked[engine.add(tokens, sampling)] = tokens, sampling
                except InvalidRequest as refused:
                    assert "larger device pool" in refused.message or "sequences" in refused.message
            if asked and noise.random() < 0.04:
                chosen = noise.choice(list(asked))
                aborted.add(chosen)
                engine.abort(chosen)
            if noise.random() < 0.1:
                lose(engine, noise)
            time.sleep(0.002 * (noise.random() < 0.3))  # the pool has its turn
            for output in engine.step():
                tokens, sampling = asked.pop(output.request_id)
                if output.reason:
                    assert output.request_id in aborted or "larger device pool" in output.reason
                else:
                    assert output.token_ids == said(tokens, sampling)
            engine.scheduler.check_invariants()
        assert not asked
        engine.blocks.check_invariants([])
        assert engine._cache is not None and not engine._cache._swaps
        assert not [name for name in engine._cache.counters if name.startswith("failed_")]
