"""Two real engines of one node and their copy worker: the decode copies the prompt's KV from the prefill's own blocks.

The tokens are those of one engine alone, whoever comes, stays away or dies; and no block stays lent.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.vllm.replica import Replica

pytestmark = pytest.mark.vllm

TEXT = "The pilot of the supply boat {} knew every rock by its name and told the keeper which ones had moved. "
ENGINE = {"max_model_len": 1024, "max_num_batched_tokens": 256, "dtype": "float32", "block_size": 32}
LEASE_SECONDS = 4.0
LOAN_SECONDS = 1.0
TOKENS = 8


class Pair:
    def __init__(self, cluster: LocalCluster, model: Path, logs: Path) -> None:
        self.cluster = cluster
        extra: dict[str, object] = {
            "mode": "service",
            "socket": cluster.socket("n0"),
            "copier": "worker",
            "handoff_loans": "on",
            "loan_seconds": LOAN_SECONDS,
        }
        self.prefill, self.decode = (
            Replica(model, extra, logs / f"{role}.log", role=role, threads=1, **ENGINE)
            for role in ("kv_producer", "kv_consumer")
        )
        for replica in (self.prefill, self.decode):
            replica.ready()
        for replica in (self.prefill, self.decode):
            eventually(
                lambda replica=replica: replica.ask("Once", 2) and replica.counters()["copy_worker_connected"],
                "the engine's link to the worker",
            )

    def settled(self) -> bool:
        found = self.cluster.accounting("n0")
        assert found.balanced, found
        return found.leases == 0 and found.slots["leased"] == 0


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with LocalCluster(nodes=1, pool_bytes=384 * MiB, lease_seconds=LEASE_SECONDS) as cluster:
        cluster.start_copy_worker("n0")
        made = Pair(cluster, model_path, tmp_path_factory.mktemp("engines"))
        try:
            yield made
        finally:
            made.prefill.close()
            made.decode.close()


def prompt(number: int, sentences: int = 16) -> str:
    """About 25 tokens a sentence; no two share a block."""
    return f"Log number {number}. " + TEXT.format(f"Nr {number}") * sentences + "He said"


def handoff() -> tuple[dict[str, Any], dict[str, Any]]:
    ours = {"version": 1, "handoff": uuid.uuid4().hex}
    return {"kvservice": {**ours, "role": "prefill"}}, {"kvservice": {**ours, "role": "decode", "node": "n0"}}


def test_decode_copies_from_the_blocks_of_the_prefill(pair: Pair) -> None:
    before, lent = pair.decode.counters(), pair.prefill.counters()
    for number in range(2):
        text, (produce, consume) = prompt(number), handoff()
        pair.decode.send_prompt(text, consume, TOKENS)
        pair.prefill.send_prompt(text, produce, 1)
        pair.prefill.first_answer()  # it stands still until its blocks have come back
        answer = pair.decode.first_answer()
        assert answer["token_ids"] == pair.prefill.ask(text, TOKENS)["token_ids"]
        assert answer["cached_tokens"] >= 350
    after, returned = pair.decode.counters(), pair.prefill.counters()
    after.subtract(before)
    assert after["loaded_blocks_engine"] >= 11, f"both hand-offs went through slots: {after}"
    assert after["loaded_blocks_engine"] + after["loaded_blocks_slot"] == after["load_blocks"] >= 22
    assert not after["loads_failed"]
    assert returned["loan_blocks"] - lent["loan_blocks"] >= after["loaded_blocks_engine"]
    assert returned["loan_blocks_returned"] == returned["loan_blocks"]
    for replica in (pair.prefill, pair.decode):
        replica.reset()  # its block pool is whole
    eventually(pair.settled, "no lease", LEASE_SECONDS + 3)


def test_untaken_loan_ends_and_a_dead_prefill_leaves_slots(pair: Pair) -> None:
    text, (produce, consume) = prompt(10), handoff()
    wanted = pair.decode.ask(prompt(11), TOKENS)["token_ids"]
    pair.decode.reset()
    pair.prefill.send_prompt(text, produce, 1)
    first = pair.prefill.first_answer()
    assert time.time() - first["ended_at"] >= LOAN_SECONDS, "nothing was lent"
    counters = pair.prefill.counters()
    assert counters["loan_blocks_returned"] == counters["loan_blocks"]
    pair.prefill.reset()
    before = pair.decode.counters()
    pair.decode.send_prompt(text, consume, TOKENS)
    answer = pair.decode.first_answer()
    assert answer["token_ids"] == pair.prefill.ask(text, TOKENS)["token_ids"] and answer["cached_tokens"] >= 350
    after = pair.decode.counters()
    assert after["loaded_blocks_slot"] > before["loaded_blocks_slot"]
    assert after["loaded_blocks_engine"] == before["loaded_blocks_engine"], "the loan was over"

    produce, consume = handoff()
    pair.prefill.send_prompt(prompt(11), produce, 1)
    time.sleep(0.8)  # about when its blocks are lent
    pair.prefill.kill()
    pair.decode.send_prompt(prompt(11), consume, TOKENS)
    assert pair.decode.first_answer()["token_ids"] == wanted
    pair.decode.reset()
    eventually(pair.settled, "no lease", LEASE_SECONDS + 3)
