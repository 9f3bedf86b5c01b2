"""Real vLLM replicas on a real service that is killed under them: every request completes, with the right tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.vllm.replica import Replica, close_all

pytestmark = pytest.mark.vllm

TEXT = "The pilot of the supply boat {} knew every rock by its name and told the keeper which ones had moved. "
ENGINE = {"max_model_len": 2048, "max_num_batched_tokens": 256}
PROMPTS = [TEXT.format(name) * 14 + "He said" for name in ("Abe", "Bob", "Cal", "Dan", "Eli", "Fox")]


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all processes write their spans: everything here runs with traces on."""
    return tmp_path_factory.mktemp("traces") / "spans.jsonl"


@pytest.fixture(scope="module")
def cluster(spans: Path) -> Iterator[LocalCluster]:
    environment = {"KVSERVICE_TRACES": f"file:{spans}"}
    with LocalCluster(nodes=2, pool_bytes=384 * MiB, lease_seconds=4.0, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def replicas(
    cluster: LocalCluster,
    without_cache: Replica,
    shallow_model: Path,
    spans: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Replica]]:
    logs = tmp_path_factory.mktemp("replicas")
    started = {
        node: Replica(
            shallow_model,
            {"mode": "service", "socket": cluster.socket(node), "verify_load": "full", "traces": f"file:{spans}"},
            logs / f"{node}.log",
            **ENGINE,
        )
        for node in cluster.nodes
    }
    try:
        yield {name: replica.ready() for name, replica in {**started, "off": without_cache}.items()}
    finally:
        close_all(started.values())


@pytest.fixture(scope="module")
def wanted(replicas: dict[str, Replica]) -> list[list[int]]:
    """The tokens of a replica without any cache service."""
    return replicas["off"].tokens(PROMPTS, 12)


def during(replica: Replica, action: Callable[[], None], delay: float) -> list[list[int]]:
    """Ask for all prompts, and act while they are being served."""
    thread = threading.Timer(delay, action)
    thread.start()
    tokens = replica.tokens(PROMPTS, 12)
    thread.join()
    return tokens


def wait_attached(replica: Replica, times: int) -> None:
    eventually(lambda: replica.counters()["attached"] >= times, "the engine to come back to the service")


def test_what_one_replica_computed_is_a_remote_hit_at_the_other(
    cluster: LocalCluster, replicas: dict[str, Replica], wanted: list[list[int]]
) -> None:
    assert replicas["n0"].tokens(PROMPTS, 12) == wanted
    eventually(lambda: cluster.directory_size() >= len(PROMPTS) * 9, "the blocks in the directory")
    before = cluster.stats("n1").counters.get("fetched_blocks", 0)
    answer = replicas["n1"].ask_all(PROMPTS, 12)
    assert [output["token_ids"] for output in answer["outputs"]] == wanted
    assert sum(output["cached_tokens"] for output in answer["outputs"]) > 6 * 250
    assert cluster.stats("n1").counters["fetched_blocks"] > before + 6 * 8
    assert cluster.stats("n1").transport == cluster.stats("n0").transport


def test_a_trace_in_the_parameters_leads_from_engine_to_peer(
    cluster: LocalCluster, replicas: dict[str, Replica], spans: Path
) -> None:
    theirs, prompt = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", TEXT.format("Gus") * 14
    known = cluster.directory_size()
    replicas["n0"].tokens([prompt], 1)
    eventually(lambda: cluster.directory_size() >= known + 9, "the blocks in the directory")
    replicas["n1"].send_prompt(prompt, {"traceparent": theirs})
    assert replicas["n1"].first_answer()["cached_tokens"] > 250

    def below(parent: str) -> dict[str, str]:
        """Span ids by name, of the spans right below this one."""
        found = [json.loads(line) for line in spans.read_text().splitlines()]
        of_trace = [span for span in found if span["context"]["trace_id"] == f"0x{theirs[3:35]}"]
        return {span["name"]: span["context"]["span_id"] for span in of_trace if span["parent_id"] == parent}

    def leads_to_peer() -> bool:
        engine = below(f"0x{theirs[36:52]}").get("kvservice.acquire", "-")
        shard = below(below(engine).get("kvservice.Engine/Acquire", "-"))
        return "kvservice.fetch" in shard and "kvservice.PeerService/Locate" in below(shard["kvservice.locate"])

    eventually(leads_to_peer, "the spans, which each process exports every five seconds")


@pytest.mark.parametrize("delay", [0.05, 0.6])
def test_own_shard_killed_while_requests_run(
    cluster: LocalCluster, replicas: dict[str, Replica], wanted: list[list[int]], delay: float
) -> None:
    replica = replicas["n1"]
    attached = replica.counters()["attached"]
    replica.reset()
    assert during(replica, lambda: cluster.kill("n1"), delay) == wanted
    replica.reset()
    assert replica.tokens(PROMPTS, 12) == wanted, "without any service"
    cluster.start_shard("n1")
    wait_attached(replica, attached + 1)
    replica.reset()
    before = replica.counters()["loaded_blocks"]
    assert replica.tokens(PROMPTS, 12) == wanted
    assert replica.counters()["loaded_blocks"] > before, "re-adopted blocks do not hit"


def test_other_nodes_shard_killed_while_its_blocks_are_fetched(
    cluster: LocalCluster, replicas: dict[str, Replica], wanted: list[list[int]]
) -> None:
    replica = replicas["n1"]
    replica.reset()
    assert during(replica, lambda: cluster.kill("n0"), 0.02) == wanted
    attached = replicas["n0"].counters()["attached"]
    cluster.start_shard("n0")
    wait_attached(replicas["n0"], attached + 1)
    assert replicas["n0"].tokens(PROMPTS, 12) == wanted


def test_lookup_service_killed_while_requests_run(
    cluster: LocalCluster, replicas: dict[str, Replica], wanted: list[list[int]]
) -> None:
    replica = replicas["n1"]
    replica.reset()

    def kill() -> None:
        cluster.kill("lookup0")
        cluster.kill("lookup1")

    assert during(replica, kill, 0.05) == wanted
    replica.reset()
    assert replica.tokens(PROMPTS, 12) == wanted, "local hits need no lookup"
    cluster.start_lookup(0)
    cluster.start_lookup(1)


def test_whole_service_killed_while_requests_run(
    cluster: LocalCluster, replicas: dict[str, Replica], wanted: list[list[int]]
) -> None:
    replica = replicas["n1"]
    replica.reset()

    def kill() -> None:
        for name in ("n0", "n1", "lookup0", "lookup1"):
            cluster.kill(name)

    assert during(replica, kill, 0.3) == wanted
    replica.reset()
    assert replica.tokens(PROMPTS, 12) == wanted
    assert replicas["n0"].tokens(PROMPTS, 12) == wanted


def test_no_prompt_is_in_a_log(cluster: LocalCluster, replicas: dict[str, Replica]) -> None:
    """After all of the above, which is what is logged most."""
    logs = [cluster.log(name) for name in ("n0", "n1", "lookup0", "lookup1")]
    logs += [replicas[node].log for node in cluster.nodes]
    for log in logs:
        text = log.read_text(errors="replace")
        assert text, f"{log} says nothing: this shows nothing"
        assert "supply boat" not in text, f"a prompt is in {log}"
