"""How far the K and V of two kinds of engine are apart, and whether an engine says the same from another one's.

    python -m benchmarks.sharing [--dtype float32|bfloat16] [--engine vLLM|SGLang] [--prompts N] [--tokens N]
                                 [--answer N] [--out PATH]

vLLM, SGLang and the reference engine (transformers) compute the same prompts, each under a name of its own for the
weights, so that none finds another one's pages. What each stored is read back from the pool. For each pair: the largest
and the mean difference of all K and V, and the norm of the difference by the norm, in layer 0 and in the worst layer.

Then each engine is started again under the name of another one and hits its pages. `greedy_agreement` is the share of
prompts whose whole greedy answer is the one it gave from its own K and V, `tokens_agreement` that of tokens before the
first other one. KL compares what transformers says behind each prompt from the writer's pages and from its own, in
nats, mean over the prompts; its row for `own, in two chunks` is what another chunking alone changes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import print_table, write_report
from examples.demo.sglang_process import EngineProcess, SGLangProcess
from examples.demo.stage import shipped_document
from examples.demo.vllm_engine import VLLMProcess
from kvservice.connector.options import Share
from kvservice.core.block.pages import KNOWN_PROMPT, PAGE_TOKENS
from kvservice.discovery import shard_socket
from kvservice.engine.loop import ReferenceEngine
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions, EngineRole
from kvservice.engine.sampling import Sampling
from kvservice.session.options import Mode
from kvservice.units import NodeId

ENGINES = ("vLLM", "SGLang", "transformers")
SERVICE = f"bench-sharing-{os.getpid()}"
POOL = "2GiB"
GATE_TOKENS = list(range(300, 364))
WAIT_SECONDS = 300.0  # for pages to reach the pool
Answers = list[list[int]]


@contextlib.contextmanager
def shard() -> Iterator[str]:
    """The socket of a shard that runs meanwhile."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        os.environ.setdefault("KVSERVICE_RUNTIME_DIR", str(Path(folder) / "run"))
        command = [sys.executable, "-m", "kvservice", "shard", "--node", "n0", "--service", SERVICE]
        process = subprocess.Popen([*command, "--pool-bytes", POOL], stdout=subprocess.DEVNULL)
        try:
            path = Path(shard_socket(SERVICE, NodeId("n0")))
            while not path.exists() and process.poll() is None:
                time.sleep(0.1)
            yield str(path)
        finally:
            process.terminate()
            process.wait()


class Bench:
    def __init__(self, model: str, socket: str, dtype: str, prompts: list[list[int]], answer: int) -> None:
        self.model, self.socket, self.dtype = model, socket, dtype
        self.prompts, self.answer = prompts, answer

    def storage(self, version: str) -> dict[str, object]:
        """The options of an engine whose pages have the names of this version of the weights."""
        given = {"mode": "service", "socket": self.socket, "share": "engines", "fetch_timeout_seconds": 60}
        return {**given, "weights_version": version}

    def ask(self, engine: str, version: str) -> tuple[Answers, int]:
        """The answers of a fresh engine, and how many tokens it hit in the pool."""
        if engine == "transformers":
            with self.reference(version, EngineRole.BOTH) as own:
                outputs = own.generate(self.prompts, Sampling(max_tokens=self.answer))
                return [output.token_ids[0] for output in outputs], sum(output.loaded_tokens for output in outputs)
        with self.started(engine, version) as process:
            found = [process.ask(prompt, self.answer) for prompt in self.prompts]
            if engine == "SGLang":
                self.pages(version)  # it stores behind its answers
            return [one["token_ids"] for one in found], sum(one["storage_tokens"] for one in found)

    @contextlib.contextmanager
    def started(self, engine: str, version: str) -> Iterator[EngineProcess]:
        """An engine whose gate is open."""
        storage, process = self.storage(version), None
        if engine == "vLLM":
            process = VLLMProcess({"model": self.model, "dtype": self.dtype, "storage": storage})
        else:
            process = SGLangProcess({"model_path": self.model, "dtype": self.dtype, "storage": storage})
        with process:
            process.ready()
            if engine == "vLLM":
                process.ask(GATE_TOKENS, 1)
                while not (counters := process.counters()).get("share_probe_agrees"):
                    assert not counters.get("share_probe_differs"), "vLLM's pages do not fit"
                    time.sleep(0.5)
                    process.ask(GATE_TOKENS[:4], 1)  # what a worker counted comes with a step
            else:
                process.ask(list(KNOWN_PROMPT), 1)
                self.pages(version, [list(KNOWN_PROMPT)])
            yield process

    @contextlib.contextmanager
    def reference(self, version: str, role: EngineRole) -> Iterator[ReferenceEngine]:
        options = EngineOptions(
            mode=Mode.SERVICE,
            socket=self.socket,
            share=Share.ENGINES,
            weights_version=version,
            role=role,
            device_blocks=512,
            fetch_timeout_seconds=60,
        )
        with ReferenceEngine(PagedModel.open(self.model, dtype=self.dtype, block_tokens=PAGE_TOKENS), options) as made:
            yield made

    def pages(self, version: str, prompts: Sequence[list[int]] | None = None) -> list[torch.Tensor]:
        """What the pool has of each prompt, `(layer, K|V, token, kv head, element)`. Waits until it has all of it."""
        found: list[torch.Tensor] = []
        deadline = time.monotonic() + WAIT_SECONDS
        with self.reference(version, EngineRole.CONSUMER) as reader:
            for prompt in prompts or self.prompts:
                usable = (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
                while True:
                    reader.forget()
                    reader.add(prompt, Sampling(max_tokens=2))
                    table: list[int] = []
                    outputs = []
                    while reader.has_work:
                        outputs += reader.step()
                        groups = reader.scheduler.groups
                        table = list(groups[0].sequences[0].table) if groups else table
                    if outputs[0].loaded_tokens >= usable:
                        break
                    assert time.monotonic() < deadline, f"{version}: {outputs[0].loaded_tokens} of {usable} tokens"
                    time.sleep(0.5)
                # (block, layer, head, token, K‖V) -> (layer, K|V, token, head, element)
                blocks = reader.model.kv.storage[table[: usable // PAGE_TOKENS]]
                rows = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)
                size = reader.model.shape.key_width
                found.append(torch.stack((rows[..., :size], rows[..., size:]), 1).clone())
        return found


def differences(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> dict[str, float]:
    largest, total, count = 0.0, 0.0, 0
    relative: list[torch.Tensor] = []
    for a, b in zip(one, other, strict=True):
        gap = (a.float() - b.float()).abs()
        largest, total, count = max(largest, float(gap.max())), total + float(gap.sum()), count + gap.numel()
        relative.append((a.float() - b.float()).flatten(2).norm(dim=2) / a.float().flatten(2).norm(dim=2))
    worst = torch.stack(relative).amax(0)  # (layer, K|V), of the worst prompt
    return {
        "max_difference": largest,
        "mean_difference": total / count,
        "layer_0_relative": float(worst[0].max()),
        "worst_layer_relative": float(worst.max()),
    }


def says(model: Any, prompt: list[int], kv: torch.Tensor) -> torch.Tensor:
    """Log-probabilities behind a prompt whose first tokens have this K and V."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv.transpose(2, 3)):
        cache.update(keys[None].contiguous(), values[None].contiguous(), layer)
    with torch.inference_mode():
        rest = model(input_ids=torch.tensor([prompt[kv.shape[2] :]]), past_key_values=cache, use_cache=True)
    return torch.log_softmax(rest.logits[0, -1].double(), -1)


def divergences(
    bench: Bench, pages: dict[str, list[torch.Tensor]], chunked: list[torch.Tensor]
) -> dict[str, dict[str, float]]:
    """KL from transformers' own pages, by writer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=bench.dtype).eval()
    found: dict[str, dict[str, float]] = {}
    for name, kvs in {**pages, "own, in two chunks": chunked}.items():
        kls, same = [], 0
        for prompt, own, kv in zip(bench.prompts, pages["transformers"], kvs, strict=True):
            wanted, other = says(model, prompt, own), says(model, prompt, kv)
            kls.append(max(float((wanted.exp() * (wanted - other)).sum()), 0.0))
            same += int(wanted.argmax() == other.argmax())
        found[name] = {"kl_mean": sum(kls) / len(kls), "kl_max": max(kls), "next_token_equal": same / len(kls)}
    return found


def in_two_chunks(bench: Bench) -> list[torch.Tensor]:
    """Transformers' own K and V, where each prompt was computed in two steps."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=bench.dtype).eval()
    found = []
    for prompt in bench.prompts:
        usable = (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
        with torch.inference_mode():
            first = model(input_ids=torch.tensor([prompt[: usable // 2]]), use_cache=True).past_key_values
            cache = model(
                input_ids=torch.tensor([prompt[usable // 2 : usable]]), past_key_values=first, use_cache=True
            ).past_key_values
        layers = [torch.stack((one.keys[0], one.values[0])).transpose(1, 2) for one in cache.layers]
        found.append(torch.stack(layers))
    return found


def agreement(one: Answers, other: Answers) -> dict[str, float]:
    tokens = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(one, other, strict=True)
    ]
    return {
        "greedy_agreement": sum(x == y for x, y in zip(one, other, strict=True)) / len(one),
        "tokens_agreement": sum(tokens) / sum(map(len, one)),
    }


def measure(bench: Bench, engines: Sequence[str]) -> dict[str, object]:
    own: dict[str, Answers] = {}
    for engine in engines:
        own[engine], hit = bench.ask(engine, engine)
        assert not hit, f"{engine} computed nothing itself"
        print(f"{engine} computed {len(bench.prompts)} prompts", flush=True)
    pages = {engine: bench.pages(engine) for engine in engines}
    pairs = [
        {"one": a, "other": b, **differences(pages[a], pages[b])}
        for i, a in enumerate(engines)
        for b in engines[i + 1 :]
    ]
    chunked = in_two_chunks(bench)
    pairs.append({"one": "transformers", "other": "own, in two chunks", **differences(pages["transformers"], chunked)})
    readers: list[dict[str, object]] = []
    for reader in engines:
        for writer in engines:
            if writer != reader:
                answers, hit = bench.ask(reader, writer)
                readers.append(
                    {"reader": reader, "writer": writer, "hit_tokens": hit, **agreement(own[reader], answers)}
                )
                print(readers[-1], flush=True)
    return {"pairs": pairs, "readers": readers, "divergence": divergences(bench, pages, chunked)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--engine", choices=ENGINES[:2], action="append", help="beside transformers; both by default")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=129, help="of each prompt")
    parser.add_argument("--answer", type=int, default=16, help="greedy tokens")
    parser.add_argument("--out", type=Path, help="benchmarks/results/sharing_DTYPE.json by default")
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    from examples.prepare_model import ensure_model

    engines = [*(arguments.engine or ENGINES[:2]), ENGINES[2]]
    folder = str(ensure_model())
    document, questions = shipped_document(5)
    ids = AutoTokenizer.from_pretrained(folder)(document)["input_ids"]
    step = max((len(ids) - arguments.tokens) // arguments.prompts, 1)
    prompts = [ids[step * i : step * i + arguments.tokens] for i in range(arguments.prompts)]
    assert questions and len({tuple(prompt[:PAGE_TOKENS]) for prompt in prompts}) == len(prompts), "prompts differ"
    with shard() as socket:
        found = measure(Bench(folder, socket, arguments.dtype, prompts, arguments.answer), engines)
    for rows in (found["pairs"], found["readers"]):
        assert isinstance(rows, list)
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    asked = {"prompts": len(prompts), "prompt_tokens": arguments.tokens, "answer": arguments.answer}
    name = f"sharing_{arguments.dtype}"
    print(f"wrote {write_report(name, {**asked, **found}, arguments.out)}")


if __name__ == "__main__":
    main()
