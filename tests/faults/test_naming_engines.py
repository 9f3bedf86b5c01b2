"""Real engines whose blocks once had one name: another maximum length of a LongRoPE model, and weights changed in
place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.vllm.replica import Replica, close_all
from tests.vllm.tiny_model import make_phi3

pytestmark = [pytest.mark.faults, pytest.mark.vllm]

PROMPT = "The keeper of the lighthouse counted the ships that passed, and wrote each name into a book. " * 18 + "Then"
NUMBERS = {"prompt_token_ids": [(i * 7919) % 40000 + 10 for i in range(400)]}
ENGINE = {"max_model_len": 1024, "max_num_batched_tokens": 512}
FACTOR = 0.3


@pytest.fixture(scope="module")
def changed(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, Replica]]:
    """One with a cache and one without, whose weights will be changed."""
    logs = tmp_path_factory.mktemp("changed")
    extra: dict[str, object] = {"mode": "embedded", "memory": "256MiB", "verify_load": "full"}
    pair = (
        Replica(shallow_model, extra, logs / "cache.log", **ENGINE),
        Replica(shallow_model, None, logs / "plain.log", **ENGINE),
    )
    try:
        for replica in pair:
            replica.ready()
        yield pair
    finally:
        close_all(pair)


def test_after_new_weights_answers_are_as_without_a_cache(
    changed: tuple[Replica, Replica],
) -> None:
    """The weights were changed in place."""
    cache, plain = changed
    old = cache.ask(PROMPT, 12)
    cache.reset()
    assert (
        cache.ask_warm(PROMPT, 12, cached_tokens=256)["token_ids"]
        == old["token_ids"]
        == plain.ask(PROMPT, 12)["token_ids"]
    )
    cache.send(reset_all=True)
    assert cache.answer() == {"reset": True}
    plain.reset()
    for replica in changed:
        replica.send(scale_norms=FACTOR)
        assert replica.answer()["scaled"] > 0
    new = cache.ask(PROMPT, 12)
    assert new["cached_tokens"] == 0
    wanted = plain.ask(PROMPT, 12)["token_ids"]
    assert wanted != old["token_ids"], "the change of the weights changes nothing"
    assert new["token_ids"] == wanted
    cache.reset()
    assert cache.ask_warm(PROMPT, 12, cached_tokens=256)["token_ids"] == wanted, "stored anew, under a name of its own"


def test_a_request_across_new_weights_gets_nothing_of_before(
    changed: tuple[Replica, Replica],
) -> None:
    cache, plain = changed
    for replica in changed:
        replica.send(midway=PROMPT, max_tokens=20, after=8, scale_norms=1 / FACTOR)
    found, wanted = (replica.answer()["outputs"][0]["token_ids"] for replica in changed)
    assert found == wanted
    assert cache.counters()["resets"] == 2
    cache.reset()
    assert cache.ask(PROMPT, 12)["token_ids"] == plain.ask(PROMPT, 12)["token_ids"]


def test_engines_whose_length_chooses_other_angles_share_nothing(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    logs = tmp_path_factory.mktemp("longrope")
    model = make_phi3(tmp_path_factory.mktemp("phi3"), model_path, original_context=512)
    with LocalCluster(nodes=1, pool_bytes=64 * MiB) as cluster:
        extra = {"mode": "service", "socket": cluster.socket(cluster.nodes[0])}
        long, short = (
            Replica(model, {**extra, "namespace": name}, logs / f"{name}.log", max_model_len=length)
            for name, length in (("long", 1024), ("short", 512))
        )
        replicas = [long, short]
        try:
            stored = long.ready().ask(NUMBERS)
            # Whoever attaches first has the namespace: this one must come second.
            other = Replica(model, {**extra, "namespace": "long"}, logs / "other.log", max_model_len=512)
            replicas.append(other)
            long.reset()
            assert long.ask_warm(NUMBERS, 8, cached_tokens=384)["token_ids"] == stored["token_ids"]
            answer = short.ready().ask(NUMBERS)
            assert answer["cached_tokens"] == 0
            assert answer["token_ids"] != stored["token_ids"], "the length changes nothing"
            assert other.ready().ask(NUMBERS)["token_ids"] == answer["token_ids"]
            assert other.counters()["attach_fingerprint"], "two lengths in one namespace were not refused"
        finally:
            close_all(replicas)
