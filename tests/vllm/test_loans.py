"""Two real engines of one node and their move worker: the decode copies the prompt's KV from the prefill's own blocks.

The tokens are those of one engine alone, whoever comes, stays away or dies; and no block stays lent.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.vllm.replica import Replica

pytestmark = pytest.mark.vllm

TEXT = "The pilot of the supply boat {} knew every rock by its name and told the keeper which ones had moved. "
ENGINE = {"max_model_len": 2048, "max_num_batched_tokens": 256, "dtype": "float32", "block_size": 32}
LEASE_SECONDS = 4.0
LOAN_SECONDS = 2.0
TOKENS = 8


class Pair:
    def __init__(self, cluster: LocalCluster, model: Path, logs: Path) -> None:
        self.cluster = cluster
        extra: dict[str, object] = {
            "mode": "service", "socket": cluster.socket("n0"), "mover": "worker", "handoff_loans": "on",
            "loan_seconds": LOAN_SECONDS,
        }  # fmt: skip
        self.prefill, self.decode = (
            Replica(model, extra, logs / f"{role}.log", role=role, threads=1, **ENGINE)
            for role in ("kv_producer", "kv_consumer")
        )
        for replica in (self.prefill, self.decode):
            replica.ready()
        for replica in (self.prefill, self.decode):
            until(lambda replica=replica: replica.ask("Once", 2) and replica.counters()["mover_connected"])  # type: ignore[misc]

    def settled(self) -> bool:
        found = self.cluster.accounting("n0")
        assert found.balanced, found
        return found.leases == 0 and found.slots["leased"] == 0


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with LocalCluster(nodes=1, pool_bytes=384 * MiB, lease_seconds=LEASE_SECONDS) as cluster:
        cluster.start_mover("n0")
        made = Pair(cluster, model_path, tmp_path_factory.mktemp("engines"))
        try:
            yield made
        finally:
            made.prefill.close()
            made.decode.close()


def prompt(number: int, sentences: int = 30) -> str:
    """About 25 tokens a sentence; no two share a block."""
    return f"Log number {number}. " + TEXT.format(f"Nr {number}") * sentences + "He said"


def handoff() -> tuple[dict[str, Any], dict[str, Any]]:
    ours = {"version": 1, "handoff": uuid.uuid4().hex}
    return {"kvservice": {**ours, "role": "prefill"}}, {"kvservice": {**ours, "role": "decode", "node": "n0"}}


def test_decode_copies_from_the_blocks_of_the_prefill(pair: Pair) -> None:
    before, lent = pair.decode.counters(), pair.prefill.counters()
    for number in range(3):
        text, (produce, consume) = prompt(number), handoff()
        pair.decode.send_prompt(text, consume, TOKENS)
        pair.prefill.send_prompt(text, produce, 1)
        pair.prefill.first_answer()  # it stands still until its blocks have come back
        answer = pair.decode.first_answer()
        assert answer["token_ids"] == pair.prefill.ask(text, TOKENS)["token_ids"]
        assert answer["cached_tokens"] >= 700
    after, returned = pair.decode.counters(), pair.prefill.counters()
    copied = after["loaded_blocks_engine"] - before["loaded_blocks_engine"]
    assert copied >= 2 * 22, f"most hand-offs went through slots: {after}"
    assert (
        copied + after["loaded_blocks_slot"] - before["loaded_blocks_slot"]
        == after["load_blocks"] - before["load_blocks"]
    )
    assert returned["loan_blocks"] - lent["loan_blocks"] >= copied
    assert returned["loan_blocks_returned"] == returned["loan_blocks"]
    assert not after["loads_failed"]
    for replica in (pair.prefill, pair.decode):
        replica.reset()  # its block pool is whole
    until(pair.settled, LEASE_SECONDS + 3)


def test_loan_that_nobody_takes_ends_and_a_dead_prefill_or_worker_leaves_the_slots(pair: Pair) -> None:
    text, (produce, consume) = prompt(10), handoff()
    started = time.monotonic()
    pair.prefill.send_prompt(text, produce, 1)
    pair.prefill.first_answer()
    assert time.monotonic() - started >= LOAN_SECONDS, "nothing was lent"
    counters = pair.prefill.counters()
    assert counters["loan_blocks_returned"] == counters["loan_blocks"]
    pair.prefill.reset()
    wanted = {number: pair.prefill.ask(prompt(number), TOKENS)["token_ids"] for number in (10, 11, 12)}
    before = pair.decode.counters()
    pair.decode.send_prompt(text, consume, TOKENS)
    answer = pair.decode.first_answer()
    assert answer["token_ids"] == wanted[10] and answer["cached_tokens"] >= 700
    late = pair.decode.counters()
    assert late["loaded_blocks_slot"] > before["loaded_blocks_slot"]
    assert late["loaded_blocks_engine"] == before["loaded_blocks_engine"], "the loan was over"

    for number, victim in ((11, lambda: pair.cluster.kill("mover-n0")), (12, pair.prefill.kill)):
        produce, consume = handoff()
        pair.prefill.reset()
        pair.prefill.send_prompt(prompt(number), produce, 1)
        time.sleep(0.8)
        death = threading.Timer(0.05, victim)
        death.start()
        pair.decode.send_prompt(prompt(number), consume, TOKENS)
        assert pair.decode.first_answer()["token_ids"] == wanted[number]
        death.join()
        if number == 11:
            pair.prefill.first_answer()
            counters = pair.prefill.counters()
            assert counters["loan_blocks_returned"] == counters["loan_blocks"], "blocks stay lent without a worker"
            pair.cluster.start_mover("n0")
    until(pair.settled, LEASE_SECONDS + 3)
