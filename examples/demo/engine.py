"""`make demo-engine`: two reference engines on two nodes. One computes prompts; the other hits them over the network,
swaps a request to the host and back, and copies a block on write. Its tokens are those of transformers.

The second engine has too few blocks for what it runs, so it has to preempt; and one request is a beam search, whose
beams share blocks until they differ.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from examples.demo.engine_report import Played, save, shortfalls, show
from examples.demo.network import Crossing, why_not
from examples.demo.stage import (
    Steps,
    Stops,
    cache_service,
    conclude,
    performance,
    prepared_model,
    ray_cluster,
    running_actor,
    screen,
    shipped_document,
    wait_ready,
)

BLOCK_TOKENS = 16
PROMPT_CHARS = 1000  # of the document: some 250 tokens, which a CPU computes in a second
ANSWER_TOKENS = 32  # two blocks more for each sequence
BEAMS = (1, 1, 4)  # of each prompt
SPARE_BLOCKS = 3  # of the second engine, beyond what its prompts need: less than their answers need
ANSWER_SECONDS = 300


class EngineReplica:
    """A reference engine as a Ray actor. With `device_blocks` None it has room for everything."""

    def __init__(self, model: str, socket: str, device_blocks: int | None) -> None:
        from kvservice.engine.loop import ReferenceEngine
        from kvservice.engine.options import EngineOptions, PreemptBy
        from kvservice.session.options import Mode

        options = EngineOptions(
            mode=Mode.SERVICE,
            socket=socket,
            block_tokens=BLOCK_TOKENS,
            device_blocks=device_blocks,
            watermark=0.0,
            preempt_by=PreemptBy.SWAP,
            fetch_timeout_seconds=30,
        )
        # float32: whoever computes a prompt's tail after a hit batches it in another way, and in bfloat16 that alone
        # can change a token.
        self._engine = ReferenceEngine.from_pretrained(model, options, dtype="float32")
        self._folder = model

    def ready(self) -> bool:
        return True

    def blocks_of(self, prompts: list[str]) -> int:
        """The blocks that hold these prompts."""
        return sum(-(-len(self._engine.model.encode(prompt)) // BLOCK_TOKENS) for prompt in prompts)

    def ask(self, prompts: list[str], beams: list[int], tokens: int) -> dict[str, Any]:
        """Run the prompts together. Returns tokens, texts, counters and the blocks in use, step by step."""
        from kvservice.engine.sampling import Sampling

        engine, found, steps = self._engine, {}, []
        started = time.perf_counter()
        ids = [
            engine.add(prompt, Sampling(max_tokens=tokens, beams=width))
            for prompt, width in zip(prompts, beams, strict=True)
        ]
        while engine.has_work:
            for output in engine.step():
                found[output.request_id] = output
            last = engine.last
            steps.append(
                {
                    "seconds": time.perf_counter() - started,
                    "device_blocks": last.device_blocks,
                    "host_blocks": last.host_blocks,
                    **{name: getattr(last, name) for name in ("swapped_in", "swapped_out", "copied", "loaded")},
                }
            )
        outputs = [found[each] for each in ids]
        return {
            "token_ids": [output.token_ids[0] for output in outputs],
            "texts": [output.texts[0] for output in outputs],
            "prompt_tokens": [len(output.prompt) for output in outputs],
            "loaded_tokens": [output.loaded_tokens for output in outputs],
            "device_count": engine.blocks.device.count,
            "counters": dict(engine.all_counters()),
            "steps": steps,
        }

    def generate(self, prompts: list[str], beams: list[int], tokens: int) -> list[list[int]]:
        """What transformers' `generate` says, without any cache of ours."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        said = []
        for prompt, width in zip(prompts, beams, strict=True):
            given = torch.tensor([self._engine.model.encode(prompt)])
            found = model.generate(given, max_new_tokens=tokens, num_beams=width, do_sample=False, pad_token_id=0)
            said.append(found[0, given.shape[1] :].tolist())
        return said

    def close(self) -> None:
        self._engine.close()


def run(model: str | None, out: Path) -> None:
    """Run the demo. Raises KVServiceError if it does not show what it should; everything is cleaned up by then."""
    console = screen()
    started = time.perf_counter()
    with performance(console) as (stack, stops):
        played, crossing = _play(stack.enter_context(Steps(console, total=7)), stops, model)
    show(played, crossing, console)
    conclude(console, started, save(played, crossing, out), shortfalls(played))


def _play(steps: Steps, stops: Stops, model: str | None) -> tuple[Played, Crossing]:
    steps.begin("preparing the model")
    folder = prepared_model(model)
    prompts, beams = _prompts(), list(BEAMS)
    steps.begin("starting a Ray cluster of two nodes")
    with ray_cluster(stops, why_not(folder)) as cluster, cache_service(steps.begin, cluster) as sockets:
        steps.begin("loading the model into an engine on the first node")
        with running_actor(EngineReplica, cluster.ids[0], folder, sockets[0], None) as here:
            wait_ready(here)
            steps.begin("the first engine computes the prompts")
            first = _get(here.ask.remote(prompts, beams, ANSWER_TOKENS))
            room = _get(here.blocks_of.remote(prompts)) + SPARE_BLOCKS
            steps.begin("transformers answers them, without any cache")
            wanted = _get(here.generate.remote(prompts, beams, ANSWER_TOKENS))
            steps.begin("an engine on the second node, with few blocks, gets the same prompts")
            with running_actor(EngineReplica, cluster.ids[1], folder, sockets[1], room) as there:
                wait_ready(there)
                second = _get(there.ask.remote(prompts, beams, ANSWER_TOKENS))
            crossing = cluster.crossing()
    return Played(first, second, wanted), crossing


def _prompts() -> list[str]:
    """The document's beginning with a question. The number in front keeps the prompts from sharing a block, so each of
    them needs all of its own."""
    document, questions = shipped_document(len(BEAMS))
    return [f"Visitor {number} asks: {q}\n\n{document[:PROMPT_CHARS]}\n\n{q}" for number, q in enumerate(questions, 1)]


def _get(answer: Any) -> Any:
    import ray

    return ray.get(answer, timeout=ANSWER_SECONDS)
