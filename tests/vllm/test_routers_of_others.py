"""The engine's events of the pool, sent by vLLM's own publisher, as Dynamo's standalone indexer reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory, KVCacheEvent, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvservice.connector.scheduler.ports import StoredBlock
from kvservice.connector.vllm.events import StoredEvents, block_removed
from kvservice.testing.cluster import free_port
from kvservice.testing.eventually import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.processes]

SITE = Path(__file__).parent.parent.parent / ".venv-routers" / "site"
BLOCK, MODEL, START_SECONDS = 16, "m", 60.0
PROMPT = list(range(1000, 1070))


class IndexedEngine:
    """An engine's publisher, and Dynamo's indexer that listens to it."""

    def __init__(self) -> None:
        events, self._port = free_port(), free_port()
        self._publisher = EventPublisherFactory.create(
            KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{events}")
        )
        arguments = ["--block-size", str(BLOCK), "--port", str(self._port), "--model-name", MODEL]
        self._indexer = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", *arguments, "--workers", f"1=tcp://127.0.0.1:{events}"],
            env={**os.environ, "PYTHONPATH": str(SITE)},
        )
        eventually(self._is_listening, "the indexer listens", START_SECONDS)

    def _call(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=5.0) as answer:
            return json.load(answer)

    def _is_listening(self) -> bool:
        try:
            (worker,) = self._call("/workers")
        except (OSError, urllib.error.URLError):
            return False
        return bool(worker["listeners"]["0"]["status"] == "active")

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def found(self, tokens: list[int]) -> dict[str, int]:
        """Medium → leading tokens of the prompt that the indexer believes there."""
        answer = self._call("/query", {"token_ids": tokens, "model_name": MODEL})
        instance = answer["instances"].get("1", {})
        return {medium: int(instance.get(medium, 0)) for medium in ("gpu", "cpu")}

    def close(self) -> None:
        self._indexer.terminate()
        self._indexer.wait()
        self._publisher.shutdown()


@pytest.fixture
def engine() -> Iterator[IndexedEngine]:
    if not (SITE / "dynamo").is_dir():
        pytest.skip("run `make test-all`, which installs what is compared with")
    made = IndexedEngine()
    yield made
    made.close()


def prompt() -> Request:
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK, sha256_cbor)
    return Request("r", PROMPT, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def test_dynamos_indexer_finds_the_pools_blocks(engine: IndexedEngine) -> None:
    """Stored blocks are in CPU memory there, found by the tokens of a prompt; a removed one ends the prefix."""
    one, events = prompt(), StoredEvents(BLOCK, BLOCK)
    events.end(one)
    hashes = one.block_hashes
    stored = [events.stored(StoredBlock(h, hashes[i - 1] if i else None)) for i, h in enumerate(hashes)]

    def is_found() -> bool:
        engine.publish(stored)  # a listener that has just joined may have missed the first message
        return engine.found(PROMPT) == {"gpu": 0, "cpu": 64}

    eventually(is_found, "the whole blocks of the prompt")
    assert engine.found([7, *PROMPT]) == {"gpu": 0, "cpu": 0}
    engine.publish([block_removed(hashes[2])])
    eventually(lambda: engine.found(PROMPT) == {"gpu": 0, "cpu": 32}, "the prefix before the removed block")
