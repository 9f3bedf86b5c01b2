"""Two hosts with addresses of their own, a real engine on each: what one computed is a remote hit on the other, and
whatever is killed, damaged or cut meanwhile, the tokens are those of an engine without a cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvservice.transfer.nixl import nixl_available
from tests.netns.cuts import both_ways, no_way
from tests.netns.hosts import Host, Hosts, why_not
from tests.netns.service import Service, socket_on
from tests.vllm.replica import Replica, close_all

REASON = why_not() or (None if nixl_available() else "NIXL is not installed")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

LAYERS = 6
TOKEN_BYTES = LAYERS * 3 * 2 * 64 * 4  # kv heads, K and V, head size, float32
TEXT = "The lighthouse keeper of {} writes in the log every evening what the sea was like. "
PLACES = ("Ar-Men", "Bell Rock", "Cordouan", "Dungeness", "Eddystone", "Fastnet", "Genoa", "Heceta Head")
PROMPTS = [TEXT.format(place) * 40 + "Tonight the sea was" for place in PLACES]
ENGINE = {"max_model_len": 2048, "max_num_batched_tokens": 256}


@dataclass
class Field:
    """Everything that a fault may hit."""

    hosts: tuple[Host, Host]
    service: Service
    replicas: tuple[Replica, Replica]


@pytest.fixture(scope="module")
def field(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    logs = tmp_path_factory.mktemp("hosts")
    replicas: list[Replica] = []
    with Hosts() as hosts, Service(hosts, logs, "--pool-bytes", "96MiB", "--lease-seconds", "4") as service:
        try:
            for index, host in enumerate(hosts):
                extra: dict[str, object] = {"mode": "service", "socket": socket_on(index), "verify_load": "full"}
                log = logs / f"replica{index}.log"
                replicas.append(Replica(shallow_model, extra, log, host.pid, **ENGINE))
            a, b = (replica.ready() for replica in replicas)
            yield Field(hosts, service, (a, b))
        finally:
            close_all(replicas)


@pytest.fixture(scope="module")
def wanted(without_cache: Replica) -> list[list[int]]:
    return without_cache.ready().tokens(PROMPTS)


def received_bytes(host: Host) -> int:
    return int(host.output(["cat", f"/sys/class/net/{host.device}/statistics/rx_bytes"]))


def test_prefix_of_one_host_is_a_remote_hit_on_the_other(field: Field, wanted: list[list[int]]) -> None:
    a, b = field.replicas
    assert a.ask(PROMPTS[0])["token_ids"] == wanted[0]
    before = received_bytes(field.hosts[1])
    warm = b.ask(PROMPTS[0])
    crossed = received_bytes(field.hosts[1]) - before
    assert warm["token_ids"] == wanted[0]
    assert warm["cached_tokens"] >= 600, f"no remote hit: {warm}"
    assert crossed >= warm["cached_tokens"] * TOKEN_BYTES, "the blocks did not cross the wire"


def killed(field: Field, index: int, ended: threading.Event) -> None:
    field.service.kill_shard(index)
    ended.wait()
    field.service.start_shard(index)


def cut(field: Field, ended: threading.Event) -> None:
    with both_ways(*field.hosts):
        ended.wait(1.5)


def cut_one_way(field: Field, ended: threading.Event) -> None:
    with no_way(*field.hosts):
        ended.wait(1.5)


def damaged(field: Field, index: int, seed: int, ended: threading.Event) -> None:
    while not ended.wait(0.1):
        seed += 1
        field.service.damage(index, seed)


def test_tokens_are_as_without_a_cache_whatever_fails(field: Field, wanted: list[list[int]]) -> None:
    draw = random.Random(20)
    faults: list[Callable[[threading.Event], None]] = [
        lambda ended: cut(field, ended),
        lambda ended: cut_one_way(field, ended),
        lambda ended: damaged(field, 0, 1000, ended),
        lambda ended: damaged(field, 1, 2000, ended),
        lambda ended: killed(field, 0, ended),
        lambda ended: killed(field, 1, ended),
    ]
    hits = 0
    for prompt_index, fault in enumerate([*faults, *draw.sample(faults, 2)]):
        indices = [prompt_index, *draw.sample(range(len(PROMPTS)), 2)]
        prompts, right = [PROMPTS[i] for i in indices], [wanted[i] for i in indices]
        for replica in field.replicas:
            replica.reset()
        assert field.replicas[0].tokens(prompts) == right
        ended = threading.Event()
        thread = threading.Thread(target=fault, args=(ended,))
        thread.start()
        try:
            for replica in field.replicas:
                replica.send(prompts=prompts, max_tokens=8)
            answers = [replica.answer()["outputs"] for replica in field.replicas]
        finally:
            ended.set()
            thread.join()
        for outputs in answers:
            assert [output["token_ids"] for output in outputs] == right, f"round {prompt_index}"
            hits += sum(output["cached_tokens"] for output in outputs)
    counted = [replica.counters() for replica in field.replicas]
    print(*(dict(counters) for counters in counted), sep="\n")
    assert hits > 0, "nothing was ever read from the cache: this shows nothing"
    for fault in ("load_corrupt", "lost", "attached", "loaded_blocks"):
        assert sum(counters[fault] for counters in counted) > 0, f"no engine met {fault}: this shows nothing"
