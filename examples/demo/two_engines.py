"""`make demo-two-engines`: one pool for vLLM, SGLang and the reference engine. Each computes a prompt that the other
two hit, and all of them say the same.

vLLM and SGLang are processes of their own; the shard is one too. The reference engine runs here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.sglang_engine import PAGE_TOKENS, SITE
from examples.demo.sglang_process import EngineProcess, SGLangProcess
from examples.demo.stage import Steps, conclude, performance, prepared_model, screen, shipped_document
from examples.demo.two_engines_report import ENGINES, Asked, save, shortfalls, show
from examples.demo.vllm_engine import VLLMProcess
from kvservice.connector.sglang.options import CALL_SECONDS_MAX
from kvservice.core.block.pages import KNOWN_PROMPT
from kvservice.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from kvservice.engine.loop import ReferenceEngine

# float32: an engine that goes on from another one's K and V rounds differently, and in bfloat16 that alone can change a
# token. docs/howto/share-engines.md has figures.
DTYPE = "float32"
PROMPT_CHARS = 1000  # of the document: some 250 tokens, which a CPU computes in a second
ANSWER_TOKENS = 12
POOL = "512MiB"
SERVICE = f"demo-{os.getpid()}"
START_SECONDS = 60.0  # for a shard to listen
STORED_SECONDS = 120.0  # for pages to reach the pool after an answer; a second on a quiet machine
GATE_TOKENS = tuple(range(300, 364))  # vLLM's first prompt: its gate compares the first one of two pages


def run(model: str | None, out: Path) -> None:
    """Run the demo. Raises KVServiceError if it does not show what it should; everything is cleaned up by then."""
    if not (SITE / "sglang").is_dir():
        raise ConfigError("SGLang is not installed here: run make .venv-sglang/.installed")
    # gRPC has one poller for the loops of two reference engines, and reports each event of the one that has ended.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    console = screen()
    started = time.perf_counter()
    with performance(console) as (stack, _):
        played = _play(stack.enter_context(Steps(console, total=6)), prepared_model(model))
    show(played, console)
    conclude(console, started, [save(played, out)], shortfalls(played))


def _play(steps: Steps, folder: str) -> list[Asked]:
    document, questions = shipped_document(len(ENGINES))
    prompts = [f"Visitor {n} asks: {q}\n\n{document[:PROMPT_CHARS]}\n\n{q}" for n, q in enumerate(questions, 1)]
    steps.begin("starting a shard, vLLM and SGLang")
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(_shard())
        storage = {"mode": "service", "socket": socket, "share": "engines", "fetch_timeout_seconds": CALL_SECONDS_MAX}
        sglang = stack.enter_context(SGLangProcess({"model_path": folder, "dtype": DTYPE, "storage": storage}))
        vllm = stack.enter_context(VLLMProcess({"model": folder, "dtype": DTYPE, "storage": storage}))
        vllm.ready()
        sglang.ready()
        reader = stack.enter_context(_reference(folder, socket, role="consumer"))
        tokens = dict(zip(ENGINES, map(reader.model.encode, prompts), strict=True))
        steps.begin("each engine computes a prompt, and its K and V are compared with the model's files")
        vllm.ask(GATE_TOKENS, 1)
        _eventually(lambda: _is_open(vllm), "vLLM's pages agree", STORED_SECONDS)
        sglang.ask(KNOWN_PROMPT, 1)
        _wait_stored(reader, KNOWN_PROMPT)
        return [asked for engine in ENGINES for asked in _crossing(steps, engine, tokens[engine], vllm, sglang, reader)]


def _is_open(vllm: EngineProcess) -> bool:
    vllm.ask(GATE_TOKENS[:4], 1)  # what a worker counted comes with a step
    return vllm.counters().get("share_probe_agrees", 0) > 0


def _crossing(
    steps: Steps,
    writer: str,
    tokens: list[int],
    vllm: EngineProcess,
    sglang: EngineProcess,
    reader: ReferenceEngine,
) -> Iterator[Asked]:
    """The prompt at the engine that computes it, then at the others."""
    steps.begin(f"{writer} computes a prompt, and the others hit it")

    def ask(engine: str) -> Asked:
        if engine == "reference":
            return _ask_reference(reader, writer, tokens)
        found = (vllm if engine == "vLLM" else sglang).ask(tokens, ANSWER_TOKENS)
        return Asked(writer, engine, found["prompt_tokens"], *_numbers(found))

    if writer == "reference":
        with _reference(reader.model.name, reader.options.socket or "", role="producer") as own:
            yield _ask_reference(own, writer, tokens)
    else:
        yield ask(writer)
    _wait_stored(reader, tokens)
    for engine in ENGINES:
        if engine != writer:
            yield ask(engine)


def _numbers(found: dict[str, Any]) -> tuple[int, float, list[int]]:
    return found["storage_tokens"], found["first_token_seconds"], found["token_ids"]


@contextlib.contextmanager
def _reference(folder: str, socket: str, role: str) -> Iterator[ReferenceEngine]:
    from kvservice.connector.options import Share
    from kvservice.engine.loop import ReferenceEngine
    from kvservice.engine.model import PagedModel
    from kvservice.engine.options import EngineOptions, EngineRole
    from kvservice.session.options import Mode

    options = EngineOptions(
        mode=Mode.SERVICE,
        socket=socket,
        share=Share.ENGINES,
        role=EngineRole(role),
        device_blocks=64,
        fetch_timeout_seconds=30,
    )
    with ReferenceEngine(PagedModel.open(folder, dtype=DTYPE, block_tokens=PAGE_TOKENS), options) as made:
        yield made


def _ask_reference(engine: ReferenceEngine, writer: str, tokens: list[int]) -> Asked:
    from kvservice.engine.sampling import Sampling

    engine.forget()
    began, ends = time.perf_counter(), []
    engine.add(tokens, Sampling(max_tokens=ANSWER_TOKENS))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        ends.append(time.perf_counter() - began)
    (output,) = outputs
    # One token a step: the first one came this many steps before the end.
    first = ends[max(len(ends) - len(output.token_ids[0]), 0)]
    return Asked(writer, "reference", len(tokens), output.loaded_tokens, first, output.token_ids[0])


def _wait_stored(reader: ReferenceEngine, tokens: list[int] | tuple[int, ...]) -> None:
    """Until the reference engine, which stores nothing itself, hits all whole pages that it can use."""
    usable = (len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS
    _eventually(
        lambda: _ask_reference(reader, "", list(tokens)).hit_tokens >= usable, "pages in the pool", STORED_SECONDS
    )


@contextlib.contextmanager
def _shard() -> Iterator[str]:
    """The socket of a shard that runs meanwhile, when it listens."""
    from kvservice.discovery import shard_socket
    from kvservice.units import NodeId

    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        os.environ.setdefault("KVSERVICE_RUNTIME_DIR", str(Path(folder) / "run"))
        command = [sys.executable, "-m", "kvservice", "shard", "--node", "n0", "--service", SERVICE]
        process = subprocess.Popen(
            [*command, "--pool-bytes", POOL], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        path = shard_socket(SERVICE, NodeId("n0"))
        try:
            _eventually(lambda: process.poll() is not None or Path(path).exists(), "a shard started", START_SECONDS)
            if process.poll() is not None:
                raise Unavailable(f"the shard ended with {process.returncode}")
            yield path
        finally:
            process.terminate()
            process.wait()


def _eventually(is_so: Callable[[], bool], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise Unavailable(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.2)
