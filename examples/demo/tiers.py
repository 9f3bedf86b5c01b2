"""`make demo-tiers`: an engine fills a small pool, its node restarts, and the prompts come back from the node's disk.
Another node hits the same prompts from an S3 API. Each answer has the tokens of the first one.

The shards are real processes, the S3 API is a moto server, and the reference engine runs here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.demo.stage import Steps, conclude, performance, prepared_model, screen, shipped_document
from examples.demo.tiers_report import SOURCES, Answers, save, shortfalls, show
from kvservice.errors import KVServiceError, Unavailable

if TYPE_CHECKING:
    from kvservice.client.overview import Overview
    from kvservice.engine.model import PagedModel

PROMPT_CHARS = 1000  # of the document: some 250 tokens, which a CPU computes in a second
PROMPTS = 5
ANSWER_TOKENS = 4
BLOCK_TOKENS = 16
POOL = "48MiB"  # less than the prompts take together, so the pool has to evict
SERVICE = f"demo-{os.getpid()}"
START_SECONDS = 60.0  # for a shard to listen
WRITTEN_SECONDS = 120.0  # for the tiers to have everything; seconds on a quiet machine


@dataclass(frozen=True, slots=True)
class Places:
    runtime: Path
    disk: Path
    objects_url: str
    environment: dict[str, str]


def run(model: str | None, out: Path) -> None:
    """Run the demo. Raises KVServiceError if it does not show what it should; everything is cleaned up by then."""
    console = screen()
    started = time.perf_counter()
    with performance(console) as (stack, _):
        played = _play(stack.enter_context(Steps(console, total=6)), model)
    show(played, console)
    conclude(console, started, save(played, out), shortfalls(played))


def _play(steps: Steps, model: str | None) -> list[Answers]:
    from kvservice.engine.model import PagedModel

    steps.begin("preparing the model")
    # float32: who computes a prompt's tail after a hit batches it in another way, and in bfloat16 that alone can
    # change a token.
    loaded = PagedModel.open(prepared_model(model), dtype="float32", block_tokens=BLOCK_TOKENS)
    document, questions = shipped_document(PROMPTS)
    prompts = [f"Visitor {n} asks: {q}\n\n{document[:PROMPT_CHARS]}\n\n{q}" for n, q in enumerate(questions, 1)]
    found: list[Answers] = []
    steps.begin("starting an S3 API")
    with _places() as places:
        tiers = ["--disk-path", str(places.disk), "--disk-bytes", "1GiB", "--disk-write", "stored"]
        objects = ["--objects-url", places.objects_url, "--objects-write", "stored"]
        steps.begin("the first node computes the prompts, more than its pool holds")
        with _shard(places, "first", [*tiers, *objects]) as socket:
            found.append(_ask(loaded, socket, prompts, "computed"))
            steps.begin("its disk and the object store write them")
            _wait_written(found[0].blocks)
        steps.begin("the first node has restarted, with an empty pool")
        with _shard(places, "first", tiers) as socket:
            found.append(_ask(loaded, socket, prompts, "disk"))
        steps.begin("another node, without a disk, gets the same prompts")
        with _shard(places, "second", objects) as socket:
            found.append(_ask(loaded, socket, prompts, "objects"))
    assert [each.source for each in found] == list(SOURCES)
    return found


@contextlib.contextmanager
def _places() -> Iterator[Places]:
    from kvservice.testing.s3_server import S3Server

    with tempfile.TemporaryDirectory(prefix="kvd-") as folder, S3Server() as s3:
        root = Path(folder)
        given = {
            "KVSERVICE_RUNTIME_DIR": os.environ.get("KVSERVICE_RUNTIME_DIR", str(root / "run")),
            **s3.environment(),
        }
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield Places(Path(given["KVSERVICE_RUNTIME_DIR"]), root / "blocks", s3.url, given)
        finally:
            for name, text in before.items():
                os.environ.pop(name, None) if text is None else os.environ.update({name: text})


@contextlib.contextmanager
def _shard(places: Places, node: str, tiers: list[str]) -> Iterator[str]:
    """The socket of a shard that runs meanwhile, when it listens and its tiers are open."""
    from kvservice.discovery import shard_socket
    from kvservice.units import NodeId

    command = [sys.executable, "-m", "kvservice", "shard", "--node", node, "--service", SERVICE, "--pool-bytes", POOL]
    process = subprocess.Popen([*command, *tiers], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _eventually(lambda: process.poll() is not None or _tiers_open(), "a shard started", START_SECONDS)
        if process.poll() is not None:
            raise Unavailable(f"the shard of node {node} ended with {process.returncode}")
        yield shard_socket(SERVICE, NodeId(node))
    finally:
        process.terminate()
        process.wait()


def _overview() -> Overview | None:
    from kvservice.cli.status import collect

    try:
        return collect(SERVICE)
    except KVServiceError:
        return None


def _tiers_open() -> bool:
    seen = _overview()
    return seen is not None and bool(seen.tiers) and all(tier.state == "open" for tier in seen.tiers)


def _wait_written(blocks: int) -> None:
    def all_written() -> bool:
        seen = _overview()
        return seen is not None and all(tier.counters.get("written_blocks", 0) >= blocks for tier in seen.tiers)

    _eventually(all_written, f"{blocks} blocks are in each tier", WRITTEN_SECONDS)


def _eventually(is_so: Callable[[], bool], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise Unavailable(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def _ask(model: PagedModel, socket: str, prompts: list[str], source: str) -> Answers:
    """Each prompt alone, to an engine whose own cache is empty."""
    from kvservice.engine.loop import ReferenceEngine
    from kvservice.engine.options import EngineOptions
    from kvservice.engine.sampling import Sampling
    from kvservice.session.options import Mode

    options = EngineOptions(mode=Mode.SERVICE, socket=socket, block_tokens=BLOCK_TOKENS, fetch_timeout_seconds=30)
    answers = Answers(source)
    with ReferenceEngine(model, options) as engine:
        for prompt in prompts:
            began, ends = time.perf_counter(), []
            engine.add(prompt, Sampling(max_tokens=ANSWER_TOKENS))
            outputs = []
            while engine.has_work:
                outputs += engine.step()
                ends.append(time.perf_counter() - began)
            (output,) = outputs
            answers.token_ids.append(output.token_ids[0])
            answers.prompt_tokens.append(len(output.prompt))
            answers.loaded_tokens.append(output.loaded_tokens)
            # One token a step: the first one came this many steps before the end.
            answers.first_token_seconds.append(ends[max(len(ends) - len(output.token_ids[0]), 0)])
    seen = _overview()
    if seen is not None:
        answers.tier_blocks = {tier.name: tier.counters.get("read_blocks", 0) for tier in seen.tiers}
    answers.blocks = sum(count // BLOCK_TOKENS for count in answers.prompt_tokens)
    return answers
