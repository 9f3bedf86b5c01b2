"""Apps of kvservice.serve on a real Ray Serve with real engines: remote hits, prefill/decode, losses under requests.

One cluster of two nodes for the file, with both apps: "plain" has a replica on each node, "pd" a prefill replica on the
one and a decode replica on the other. All four engines share one service, so what one stored the others hit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import serve

pytest.importorskip("ray.serve.llm")

from openai import APIError, OpenAI

from examples.demo.serve import MODEL, wait_running
from kvservice.actors import deploy
from kvservice.serve.section import parse_section
from kvservice.serve.service import ensure_service
from kvservice.testing.eventually import eventually
from tests.serve.serving import (
    SERVICE,
    Serving,
    arguments,
    counters,
    deploy_file,
    engine,
    kill_engine,
    known_keys,
    node,
    replica_processes,
    serving,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1000)]

START_SECONDS = 700.0  # four engines, each of two processes that import vLLM: three minutes of a quiet machine
PREEMPTION = 2  # autoscaler.proto: DrainNodeReason
TEXT = "The pilot of the supply boat {} knew every rock by its name and told the keeper which ones had moved. "
TOKENS = 8


@pytest.fixture(scope="module")
def apps(shallow_model: Path) -> Iterator[Serving]:
    with serving() as found:
        plain = arguments(llm_configs=[engine(shallow_model, "replica", replicas=2)])
        pd = arguments(prefill_config=engine(shallow_model, "prefill"), decode_config=engine(shallow_model, "decode"))
        deploy_file(
            app("plain", "build_openai_app", plain),
            app("pd", "build_pd_openai_app", pd),
        )
        for name in ("plain", "pd"):
            wait_running(name, START_SECONDS)
        yield found


def app(name: str, builder: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "route_prefix": f"/{name}", "import_path": f"kvservice.serve:{builder}", "args": given}


def prompt(number: int, sentences: int = 12) -> str:
    """About 25 tokens a sentence; no two share a block."""
    return f"Log number {number}. " + TEXT.format(f"Nr {number}") * sentences + "He said"


def client(apps: Serving, name: str) -> OpenAI:
    return OpenAI(base_url=f"{apps.base_url}/{name}/v1", api_key="none", timeout=90, max_retries=0)


def ask(api: OpenAI, text: str) -> Any:
    return api.completions.create(
        model=MODEL, prompt=text, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )


def cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def handed_over(pd: OpenAI) -> bool:
    """One request; did its blocks cross?"""
    before = counters().get("fetched_blocks", 0)
    ask(pd, prompt(time.time_ns(), 6))
    return counters().get("fetched_blocks", 0) > before


def test_what_one_replica_computed_another_one_hits(apps: Serving) -> None:
    with client(apps, "plain") as api:
        known, before = known_keys(), counters().get("fetched_blocks", 0)
        answers = [ask(api, prompt(1))]
        blocks = answers[0].usage.prompt_tokens // 32
        assert blocks >= 8
        eventually(lambda: known_keys() >= known + blocks, "the prompt's blocks in the directory")
        answers.append(ask(api, prompt(1)))  # round-robin: by the other replica
        assert cached(answers[0]) == 0
        assert cached(answers[1]) == blocks * 32
        assert counters()["fetched_blocks"] - before == blocks
        assert answers[0].choices[0].text == answers[1].choices[0].text


def test_prefill_and_decode_replicas_answer_as_one_replica_does(apps: Serving) -> None:
    with client(apps, "pd") as pd, client(apps, "plain") as plain:
        eventually(lambda: handed_over(pd), "a prefill replica known to the decode replica")
        before = counters()
        answer = ask(pd, prompt(2))
        after = counters()
        blocks = answer.usage.prompt_tokens // 32
        assert after["fetched_blocks"] - before.get("fetched_blocks", 0) == blocks  # by the decode's node
        assert cached(answer) == blocks * 32
        talk = [{"role": "user", "content": prompt(3)}]
        words: list[str] = []
        stream = pd.chat.completions.create(
            model=MODEL,
            messages=talk,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,  # type: ignore[arg-type]
        )
        for chunk in stream:
            words += [choice.delta.content or "" for choice in chunk.choices]
        whole = plain.chat.completions.create(model=MODEL, messages=talk, max_tokens=TOKENS, temperature=0)  # type: ignore[arg-type]
        assert "".join(words) == whole.choices[0].message.content
        assert answer.choices[0].text == ask(plain, prompt(2)).choices[0].text


class Asking:
    """Both apps are asked all the time, until the end of the context; no request may have failed by then."""

    def __init__(self, apps: Serving, seed: int) -> None:
        self._apps = apps
        self._failed: list[BaseException] = []
        self._answered: list[str] = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(name, seed + 1000 * n))
            for n, name in enumerate(("plain", "plain", "pd"))
        ]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *why: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)
        assert not self._failed

    def more_answers(self, count: int) -> None:
        wanted = len(self._answered) + count
        eventually(lambda: self._failed or len(self._answered) >= wanted, f"{count} more answers", 90)
        assert not self._failed

    def _send(self, name: str, number: int) -> None:
        with client(self._apps, name) as api:
            while not self._ended.is_set():
                try:
                    self._answered.append(ask(api, prompt(number, 6)).choices[0].text)
                except Exception as error:  # noqa: BLE001  whatever a client sees is a failed request
                    self._failed.append(error)
                number += 1


def shards_that_left() -> list[str]:
    supervisor = deploy.find(SERVICE)
    return [] if supervisor is None else list(supervisor.describe()["left"])


@pytest.mark.timeout(1200)
def test_no_request_fails_while_ray_takes_a_node_away(apps: Serving) -> None:
    """Serve starts the node's replicas on another one first, and its shard hands its blocks over."""
    cluster = apps.cluster
    (leaving,) = cluster.worker_nodes
    cluster.add_node(**node(replica=1, decode=1))
    with Asking(apps, 10_000) as asking:
        asking.more_answers(4)
        accepted, why = ray._raylet.GcsClient(address=cluster.address).drain_node(
            leaving.node_id, PREEMPTION, "scale-down in a test", int((time.time() + 900) * 1000)
        )
        assert accepted, why
        eventually(lambda: shards_that_left(), "the shard of the draining node to leave")
        eventually(lambda: not replica_processes("LLMServer", leaving), "the replica that leaves to be replaced", 600)
        eventually(lambda: not replica_processes("Decode", leaving), "the decode replica to be replaced", 300)
        cluster.remove_node(leaving)
        asking.more_answers(6)


def test_no_request_fails_while_replica_and_service_die(apps: Serving) -> None:
    """The replica is killed, the service restarted."""
    with Asking(apps, 20_000) as asking:
        asking.more_answers(4)
        replica_processes("LLMServer")[0].kill()
        asking.more_answers(6)
        replica_processes("Prefill")[0].kill()
        asking.more_answers(6)
        section = parse_section(arguments()["kvservice"])
        assert deploy.down(section.service)
        asking.more_answers(4)
        assert ensure_service(section).started
        asking.more_answers(6)
        eventually(lambda: counters().get("blocks_sealed", 0) > 0, "engines that store again", 60)


def test_an_engines_death_ends_its_replica_and_fails_no_request(apps: Serving) -> None:
    """Serve would use the replica for another minute, and it would refuse at once whatever it got."""
    both_run()
    for deployment in ("LLMServer", "Prefill"):
        replica = replica_processes(deployment)[0]
        with Asking(apps, 30_000) as asking:
            asking.more_answers(4)
            kill_engine(replica)
            asking.more_answers(8)
        eventually(lambda replica=replica: ended(replica), "the replica whose engine died to end", 15)


def both_run() -> None:
    """Serve has replaced the replica of "plain" that an earlier test killed."""
    deployments = serve.status().applications["plain"].deployments
    (name,) = [name for name in deployments if "LLMServer" in name]
    eventually(
        lambda: serve.status().applications["plain"].deployments[name].replica_states.get("RUNNING", 0) == 2,
        "two replicas of plain",
        300,
    )


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_stream_whose_replica_is_killed_ends_with_an_error(apps: Serving) -> None:
    both_run()
    with client(apps, "plain") as api:
        assert end_of(answer_of(api, 8)) == "length"
        streams = [answer_of(api, 400) for _ in range(2)]
        for stream in streams:
            next(stream)
        for process in replica_processes("LLMServer"):  # a router may not have heard of one yet, and send both to one
            process.kill()
        assert [end_of(stream) for stream in streams] == ["error", "error"]


def answer_of(api: OpenAI, tokens: int) -> Iterator[Any]:
    return iter(
        api.completions.create(
            model=MODEL, prompt=prompt(0), max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
        )
    )


def end_of(stream: Iterator[Any]) -> str:
    """Why it ended, by its last chunk; `error` if it says that it failed."""
    reason = ""
    try:
        for chunk in stream:
            reason = chunk.choices[0].finish_reason or reason
    except APIError:
        return "error"
    return reason
