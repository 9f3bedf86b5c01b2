"""`make demo-pd`: one vLLM engine prefills and another on the other node decodes, while blocks cross.

Both engines get a prompt at the same moment, with a fresh hand-off id; the shards' own counters, sampled meanwhile, say
what was sealed on one node and pulled to the other at each moment.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.network import Crossing, why_not
from examples.demo.pd_report import HandedOff, Sample, save, show
from examples.demo.stage import (
    Steps,
    Stops,
    cache_service,
    conclude,
    performance,
    prepared_model,
    ray_cluster,
    running_replica,
    screen,
    shard_numbers,
    shipped_document,
    wait_ready,
)
from kvservice.errors import KVServiceError

ANSWER_TOKENS = 24
ANSWER_SECONDS = 300
STEP_TOKENS = 512  # a prompt is computed in several steps, as on a busy prefill engine
SAMPLE_SECONDS = 0.15


def run(model: str | None, out: Path, prompt_count: int) -> None:
    """Run the demo. Raises KVServiceError if a step fails; everything is cleaned up by then."""
    console = screen()
    started = time.perf_counter()
    with performance(console) as (stack, stops):
        steps = stack.enter_context(Steps(console, total=5 + 2 * prompt_count))
        found, crossing = _measure(steps, stops, model, prompt_count)
    show(found, crossing, console)
    conclude(console, started, save(found, out, crossing))
    wrong = [one.number for one in found if one.token_ids != one.alone_token_ids]
    if wrong:
        raise KVServiceError(f"prompt {wrong[0]} was answered differently by one engine alone")
    if not all(one.pulled_blocks and one.pulled_before_prefill_end for one in found):
        raise KVServiceError("no block crossed while the prefill ran: see the table")


def _measure(steps: Steps, stops: Stops, model: str | None, count: int) -> tuple[list[HandedOff], Crossing]:
    prompts = _prompts(count)
    steps.begin("preparing the model")
    folder = prepared_model(model)
    steps.begin("starting a Ray cluster of two nodes")
    found: list[HandedOff] = []
    with ray_cluster(stops, why_not(folder)) as cluster, cache_service(steps.begin, cluster) as sockets:
        steps.begin("loading the model into a prefill engine and a decode engine, one on each node")
        with (
            running_replica(folder, cluster.ids[0], sockets[0], "kv_producer", STEP_TOKENS) as prefill,
            running_replica(folder, cluster.ids[1], sockets[1], "kv_consumer", STEP_TOKENS) as decode,
        ):
            wait_ready(prefill, decode)
            for number, prompt in enumerate(prompts, 1):
                steps.begin(f"prompt {number}: prefill here, decode there")
                found.append(_hand_off(number, prompt, prefill, decode, cluster.ids))
                steps.say(found[-1].sentence())
            crossing = cluster.crossing()
        steps.begin("loading one engine without the cache, to compare with")
        with running_replica(folder, cluster.ids[1], None, batch_tokens=STEP_TOKENS) as alone:
            wait_ready(alone)
            for number, prompt in enumerate(prompts, 1):
                steps.begin(f"prompt {number}: one engine alone")
                answer = _get(alone.ask.remote(prompt, ANSWER_TOKENS))
                found[number - 1].alone_token_ids = tuple(answer["token_ids"])
                found[number - 1].alone_first_token_seconds = answer["first_token_seconds"]
    return found, crossing


def _prompts(count: int) -> list[str]:
    """The document with a question; the number in front keeps the prompts from sharing a block."""
    document, questions = shipped_document(count)
    return [f"Visitor {number} asks: {q}\n\n{document}\n\n{q}" for number, q in enumerate(questions, 1)]


def _hand_off(number: int, prompt: str, prefill: Any, decode: Any, ray_nodes: list[str]) -> HandedOff:
    from kvservice.actors import names

    ours = {"version": 1, "handoff": uuid.uuid4().hex}
    with _Sampler(ray_nodes) as sampler:
        continued = decode.ask.remote(
            prompt, ANSWER_TOKENS, {"kvservice": {**ours, "role": "decode", "node": names.node_id(ray_nodes[0])}}
        )
        first = _get(prefill.ask.remote(prompt, 1, {"kvservice": {**ours, "role": "prefill"}}))
        answer = _get(continued)
    start = min(first["asked_at"], answer["asked_at"])
    prefill_end = first["asked_at"] + first["first_token_seconds"] - start
    samples = [Sample(at - start, sealed, pulled) for at, sealed, pulled in sampler.samples]
    return HandedOff(
        number=number,
        prompt_tokens=answer["prompt_tokens"],
        recomputed_tokens=answer["computed_tokens"],
        prefill_seconds=prefill_end,
        first_token_seconds=answer["asked_at"] + answer["first_token_seconds"] - start,
        pulled_blocks=samples[-1].pulled,
        pulled_before_prefill_end=max((s.pulled for s in samples if s.seconds < prefill_end), default=0),
        samples=samples,
        token_ids=tuple(answer["token_ids"]),
    )


def _get(answer: Any) -> dict[str, Any]:
    import ray

    found: dict[str, Any] = ray.get(answer, timeout=ANSWER_SECONDS)
    return found


@dataclass
class _Sampler:
    """(time, blocks sealed on the first node, blocks pulled to the second) since it was entered, until it is left."""

    ray_nodes: list[str]

    def __enter__(self) -> _Sampler:
        self.samples: list[tuple[float, int, int]] = []
        self._before = (0, 0)
        self._before = self._take()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._keep()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                self._keep()
            except KVServiceError:  # one sample less; a shard that is really gone fails the demo elsewhere
                continue

    def _keep(self) -> None:
        sealed, pulled = self._take()
        self.samples.append((time.time(), sealed - self._before[0], pulled - self._before[1]))

    def _take(self) -> tuple[int, int]:
        writer, reader = (shard["counters"] for shard in shard_numbers(self.ray_nodes))
        return writer.get("blocks_sealed", 0), reader.get("fetched_blocks", 0)
