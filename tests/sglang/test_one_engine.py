"""One real SGLang engine at a shard: damaged pages are computed again, and its metrics go on over another attach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.sglang_engine import PAGE_TOKENS, SITE
from examples.demo.sglang_process import SGLangProcess
from kvservice.core.segment.geometry import plan_geometry
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB, NodeId
from tests.sglang.test_engines import ANSWER_TOKENS, pages_of, prompt

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # as in test_engines
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

POOL_BYTES = 256 * MiB
NODE = NodeId("n0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, pool_bytes=POOL_BYTES, transport="shm") as made:
        yield made


@pytest.fixture(scope="module")
def engine(cluster: LocalCluster, shallow_model: Path) -> Iterator[SGLangProcess]:
    settings = {
        "model_path": str(shallow_model),
        "storage": {"mode": "service", "socket": cluster.socket(NODE), "verify_load": "full"},
        "enable_metrics": True,
        "log_level": "warning",
    }
    with SGLangProcess(settings) as made:
        made.ready()
        yield made


class Slots:
    """The slots of the shard that hold a page."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._segment = Segment.attach(segment_path(cluster.service, NODE), plan_geometry(POOL_BYTES))

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        self._segment.close()

    def sizes(self) -> dict[int, int]:
        return {slot: payload_bytes for slot, payload_bytes, _ in self._segment.scan()}

    def flip_a_bit(self, slot: int, payload_bytes: int) -> None:
        self._segment.payload(slot, payload_bytes)[payload_bytes // 2] ^= 1

    def flip_all_bits(self, slot: int, payload_bytes: int) -> None:
        payload = self._segment.payload(slot, payload_bytes)
        payload[:] = bytes(byte ^ 0xFF for byte in payload)


def grown(engine: SGLangProcess, before: dict[str, int], event: str) -> int:
    return engine.counters().get(event, 0) - before.get(event, 0)


def test_a_damaged_page_costs_time_and_no_token(cluster: LocalCluster, engine: SGLangProcess) -> None:
    """What lies before it is loaded. What follows it, and itself, is computed again. The shard gives it up, so that it
    is stored again."""
    with Slots(cluster) as slots:
        others = slots.sizes()
        first = engine.ask(prompt("Ida"), ANSWER_TOKENS)
        pages = pages_of(first)
        eventually(lambda: len(slots.sizes()) - len(others) >= pages, "the pages in the pool")
        engine.forget()
        before = engine.counters()
        assert engine.ask(prompt("Ida"), ANSWER_TOKENS)["storage_tokens"] == pages * PAGE_TOKENS, engine.said[-2000:]
        eventually(lambda: grown(engine, before, "loaded_pages") == pages, "the loaded pages in the metrics")
        mine = [(slot, size) for slot, size in slots.sizes().items() if slot not in others]

        slots.flip_a_bit(*mine[len(mine) // 2])
        before = asked_again(engine, first, pages)
        loaded, failed = grown(engine, before, "loaded_pages"), grown(engine, before, "load_failed")
        assert failed > 0 and loaded + failed == pages
        mine = healed(cluster, engine, slots, others, pages)

        for slot, size in mine:
            slots.flip_all_bits(slot, size)
        before = asked_again(engine, first, pages)
        assert (grown(engine, before, "loaded_pages"), grown(engine, before, "load_failed")) == (0, pages)
        healed(cluster, engine, slots, others, pages)
    answer = engine.ask(prompt("Ida"), ANSWER_TOKENS)
    assert answer["token_ids"] == first["token_ids"], "from its own cache, which holds nothing of a failed load"


def healed(
    cluster: LocalCluster, engine: SGLangProcess, slots: Slots, others: dict[int, int], pages: int
) -> list[tuple[int, int]]:
    """Ask until all pages come from the pool again. Returns their (slot, payload bytes)."""

    def are_loaded() -> bool:
        engine.forget()
        return engine.ask(prompt("Ida"), ANSWER_TOKENS)["storage_tokens"] == pages * PAGE_TOKENS

    eventually(are_loaded, "the pages stored again", detail=lambda: str(cluster.stats(NODE).counters))
    assert cluster.stats(NODE).counters["suspects_damaged"] > 0
    return [(slot, size) for slot, size in slots.sizes().items() if slot not in others]


def asked_again(engine: SGLangProcess, first: dict[str, object], pages: int) -> dict[str, int]:
    """Ask the emptied engine for the prompt whose pages are damaged. Returns its counters of before."""
    engine.forget()
    before = engine.counters()
    answer = engine.ask(prompt("Ida"), ANSWER_TOKENS)
    assert answer["token_ids"] == first["token_ids"]
    eventually(lambda: grown(engine, before, "load_failed") > 0, "the failed pages in the metrics")
    assert answer["storage_tokens"] == grown(engine, before, "loaded_pages") * PAGE_TOKENS
    assert grown(engine, before, "found_pages") == pages
    return before


@pytest.mark.parametrize("name", ["Jon", "Kim"])
def test_metrics_go_on_over_another_attach(cluster: LocalCluster, engine: SGLangProcess, name: str) -> None:
    """The counters are those of SGLang's process, whatever storage it has, and each page is counted once."""
    before, sealed = engine.counters(), cluster.stats(NODE).counters.get("blocks_sealed", 0)
    first = engine.ask(prompt(name), ANSWER_TOKENS)
    pages = pages_of(first)
    eventually(lambda: grown(engine, before, "stored_pages") >= pages, "the stored pages in the metrics")
    engine.attach(attached=False)
    engine.forget()
    assert engine.ask(prompt(name), 1)["storage_tokens"] == 0, "nothing is attached"
    engine.attach(attached=True)
    engine.forget()
    answer = engine.ask(prompt(name), ANSWER_TOKENS)
    assert answer["storage_tokens"] == pages * PAGE_TOKENS, engine.said[-2000:]
    assert answer["token_ids"] == first["token_ids"]
    eventually(lambda: grown(engine, before, "loaded_pages") == pages, "the loaded pages in the metrics")

    def counted() -> bool:
        """The last page of the answer is stored some moments later. A page is a block."""
        in_pool = cluster.stats(NODE).counters["blocks_sealed"] - sealed
        return grown(engine, before, "stored_pages") == in_pool

    eventually(counted, "as many stored pages in the metrics as in the pool", detail=lambda: str(engine.counters()))
