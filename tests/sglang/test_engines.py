"""Two real SGLang engines on CPUs, each at the shard of its node: pages cross, salts keep apart, a killed shard is a
miss."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.demo.sglang_engine import PAGE_TOKENS, SITE
from examples.demo.sglang_process import SGLangProcess
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # an engine starts in half a minute, and in some on a busy machine
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

TEXT = "The pilot of the supply boat {} knew every rock by its name and told the keeper which ones had moved. "
ANSWER_TOKENS = 8
Engines = dict[str, SGLangProcess]


def prompt(name: str) -> str:
    return TEXT.format(name) * 12 + "He said"


def pages_of(answer: dict[str, int]) -> int:
    """Whole pages of the prompt without its last token, which an engine computes in any case."""
    return (answer["prompt_tokens"] - 1) // PAGE_TOKENS


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, pool_bytes=256 * MiB, transport="shm") as made:
        yield made


@pytest.fixture(scope="module")
def engines(cluster: LocalCluster, shallow_model: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        made = {
            node: stack.enter_context(
                SGLangProcess(
                    {
                        "model_path": str(shallow_model),
                        "storage": {"mode": "service", "socket": cluster.socket(node), "verify_load": "full"},
                        "log_level": "warning",
                    }
                )
            )
            for node in cluster.nodes
        }
        for engine in made.values():
            engine.ready()
        yield made


def test_the_second_engine_hits_what_the_first_stored(cluster: LocalCluster, engines: Engines) -> None:
    here, there = engines["n0"], engines["n1"]
    first = here.ask(prompt("Abe"), ANSWER_TOKENS)
    pages = pages_of(first)
    assert pages > 8 and first["cached_tokens"] == 0
    eventually(lambda: cluster.stats("n0").counters.get("blocks_sealed", 0) >= pages, "the pages in the pool")
    second = there.ask(prompt("Abe"), ANSWER_TOKENS)
    assert second["storage_tokens"] == pages * PAGE_TOKENS, there.said[-2000:]
    assert cluster.stats("n1").counters["fetched_blocks"] == pages
    assert second["token_ids"] == first["token_ids"]


def test_an_emptied_engine_hits_its_own_pages(cluster: LocalCluster, engines: Engines) -> None:
    engine = engines["n0"]
    first = engine.ask(prompt("Bob"), ANSWER_TOKENS)
    eventually(lambda: attempt(engine, prompt("Bob")) == pages_of(first) * PAGE_TOKENS, "all pages from the pool")
    engine.forget()
    assert engine.ask(prompt("Bob"), ANSWER_TOKENS)["token_ids"] == first["token_ids"]


def attempt(engine: SGLangProcess, text: str) -> int:
    engine.forget()
    found: int = engine.ask(text, 1)["storage_tokens"]
    return found


def test_a_longer_prompt_hits_behind_what_the_engine_has(cluster: LocalCluster, engines: Engines) -> None:
    """The engine asks for the pages behind its own prefix, and names them as the other engine did."""
    here, there = engines["n0"], engines["n1"]
    short, long = prompt("Cal"), prompt("Cal") + TEXT.format("Dan") * 8 + "She said"
    before = cluster.stats("n0").counters["blocks_sealed"]
    wanted = here.ask(long, ANSWER_TOKENS)
    eventually(
        lambda: cluster.stats("n0").counters["blocks_sealed"] - before >= pages_of(wanted), "the pages in the pool"
    )
    own = pages_of(there.ask(short, 1))
    found = there.ask(long, ANSWER_TOKENS)
    assert found["token_ids"] == wanted["token_ids"]
    assert found["cached_tokens"] == pages_of(wanted) * PAGE_TOKENS
    assert found["storage_tokens"] >= (pages_of(wanted) - own) * PAGE_TOKENS


def test_prompts_with_a_salt_are_never_shared(cluster: LocalCluster, engines: Engines) -> None:
    here, there = engines["n0"], engines["n1"]
    first = here.ask(prompt("Eli"), ANSWER_TOKENS, salt="hers")
    pages = pages_of(first)
    for salt in ("", "his"):
        other = there.ask(prompt("Eli"), ANSWER_TOKENS, salt=salt)
        assert other["storage_tokens"] == 0 and other["token_ids"] == first["token_ids"]
    there.forget()

    def hers() -> int:
        there.forget()
        return int(there.ask(prompt("Eli"), ANSWER_TOKENS, salt="hers")["storage_tokens"])

    eventually(lambda: hers() == pages * PAGE_TOKENS, "her own pages")


def test_requests_are_answered_while_the_shard_is_dead(cluster: LocalCluster, engines: Engines) -> None:
    here, there = engines["n0"], engines["n1"]
    wanted = {name: here.ask(prompt(name), ANSWER_TOKENS)["token_ids"] for name in ("Fox", "Gus", "Hal")}
    cluster.kill("n1", signal.SIGKILL)
    answer = there.ask(prompt("Fox"), ANSWER_TOKENS)
    assert answer["storage_tokens"] == 0 and answer["token_ids"] == wanted["Fox"]
    answer = there.ask(prompt("Gus"), ANSWER_TOKENS)
    assert answer["storage_tokens"] == 0 and answer["token_ids"] == wanted["Gus"]
    cluster.start_shard("n1")

    def again() -> bool:
        there.forget()
        found = there.ask(prompt("Hal"), ANSWER_TOKENS)
        assert found["token_ids"] == wanted["Hal"]
        return bool(found["storage_tokens"] == pages_of(found) * PAGE_TOKENS)

    eventually(again, "hits through the new shard")
