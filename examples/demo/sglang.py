"""`make demo-sglang`: two SGLang engines on two nodes. One computes prompts; the other, on another node, hits them.

Whatever happens (Ctrl-C, SIGTERM, a failing step), everything that was started is stopped and removed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo.network import Crossing, why_not
from examples.demo.remote_hit_report import CACHE_OFF, Row, save, shortfalls, show
from examples.demo.sglang_engine import PAGE_TOKENS, SITE
from examples.demo.sglang_process import SGLangProcess
from examples.demo.stage import (
    Steps,
    Stops,
    TwoNodes,
    cache_service,
    conclude,
    performance,
    prepared_model,
    ray_cluster,
    screen,
    shard_numbers,
    shipped_document,
)
from kvservice.connector.sglang.options import CALL_SECONDS_MAX
from kvservice.errors import Unavailable

ANSWER_TOKENS = 24
DOCUMENT_CHARS = 4000  # of the document: some 1,000 tokens, which a CPU computes in seconds
SETTLE_SECONDS = 60.0  # for the pages that SGLang stores behind its answer, on a busy machine
TITLE = "one document, two SGLang engines on two nodes (CPU)"


def run(model: str | None, out: Path, question_count: int) -> None:
    """Run the demo. Raises KVServiceError if a step fails or something was not shown; everything is cleaned up by
    then."""
    console = screen()
    if not (SITE / "sglang").is_dir():
        raise Unavailable("SGLang is not installed: make .venv-sglang/.installed")
    started = time.perf_counter()
    with performance(console) as (stack, stops):
        rows, nodes, crossing = _measure(stack, stops, model, question_count, console)
    show(rows, nodes, crossing, console)
    conclude(console, started, save(rows, nodes, crossing, out, name="sglang", title=TITLE), shortfalls(rows))


@dataclass(frozen=True, slots=True)
class Asked:
    """An engine and the shard of its node."""

    engine: SGLangProcess
    ray_node: str

    def ask(self, prompt: str) -> dict[str, Any]:
        """An answer, with where the prompt's tokens came from: a page is a block."""
        before = self._fetched()
        found = self.engine.ask(prompt, ANSWER_TOKENS)
        stored = found["storage_tokens"]
        remote = min((self._fetched() - before) * PAGE_TOKENS, stored)
        return {
            **found,
            "text": found["text"].strip(),
            "computed_tokens": found["prompt_tokens"] - found["cached_tokens"],
            "engine_tokens": found["cached_tokens"] - stored,
            "pool_tokens": stored - remote,
            "remote_tokens": remote,
        }

    def _fetched(self) -> int:
        (shard,) = shard_numbers([self.ray_node])
        return int(shard["counters"].get("fetched_blocks", 0))


def _measure(
    stack: contextlib.ExitStack, stops: Stops, model: str | None, question_count: int, console: Console
) -> tuple[list[Row], list[tuple[str, dict[str, Any]]], Crossing]:
    steps = stack.enter_context(Steps(console, total=5 + 4 * question_count))
    rows: list[Row] = []

    def ask(label: str, asked: Asked, number: int, *, with_cache: bool = True) -> None:
        steps.begin(f"question {number} to {label}")
        rows.append(Row.of(number, label, asked.ask(prompts[number - 1]), with_cache=with_cache))
        steps.say(rows[-1].sentence)

    steps.begin("preparing the model")
    folder = prepared_model(model)
    prompts = _prompts(folder, question_count)
    numbers = range(1, len(prompts) + 1)
    steps.begin("starting a Ray cluster of two nodes")
    with ray_cluster(stops, why_not(folder)) as cluster, cache_service(steps.begin, cluster) as sockets:
        steps.begin("loading the model into two engines, one on each node")
        with _engine(folder, cluster, 0, sockets[0]) as a, _engine(folder, cluster, 1, sockets[1]) as b:
            a.engine.ready()
            b.engine.ready()
            for number in numbers:
                ask("A", a, number)
            _wait_for_pages(cluster.ids[0], sum(row.computed_tokens - 1 for row in rows) // PAGE_TOKENS - len(rows))
            for number in numbers:
                ask("B", b, number)
            b.engine.forget()
            ask("B, engine emptied", b, 1)
            nodes = list(zip(("A's node", "B's node"), shard_numbers(cluster.ids), strict=True))
            crossing = cluster.crossing()
        steps.begin("loading an engine without the cache on B's node")
        with _engine(folder, cluster, 1, None) as plain:
            plain.engine.ready()
            for number in numbers:
                plain.engine.forget()
                ask(CACHE_OFF, plain, number, with_cache=False)
        steps.begin("stopping")
    return rows, nodes, crossing


@contextlib.contextmanager
def _engine(folder: str, cluster: TwoNodes, node: int, socket: str | None) -> Iterator[Asked]:
    """An engine on a node of the cluster, which begins to load. It is ended with all of its processes."""
    storage = (
        None if socket is None else {"mode": "service", "socket": socket, "fetch_timeout_seconds": CALL_SECONDS_MAX}
    )
    before = cluster.link.over_there if node and cluster.link else []
    with SGLangProcess({"model_path": folder, "storage": storage}, before) as engine:
        yield Asked(engine, cluster.ids[node])


def _prompts(folder: str, count: int) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    document, questions = shipped_document(count)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{document[:DOCUMENT_CHARS]}\n\n{question}"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for question in questions
    ]


def _wait_for_pages(ray_node: str, count: int) -> None:
    """Wait until the shard has so many blocks, or long enough: SGLang stores pages behind its answers."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        (shard,) = shard_numbers([ray_node])
        if shard["counters"].get("blocks_sealed", 0) >= count:
            return
        time.sleep(0.2)
