"""Stage engine: the reference engine says what `model.generate` says, in each of its modes, on a GPU.

Small models with random weights: the tokens tell a wrong byte from a right one, and nothing is measured. `--cpu` tries
the stage on host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.findings import Stage

STAGE = Stage("engine")
CPU = "--cpu" in sys.argv
BLOCK_TOKENS = 4
NEW = 12
SETTINGS: dict[str, Any] = {
    "mode": "embedded",
    "memory": "8MiB",
    "weights_version": "random",
    "verify_load": "full",
    "block_tokens": BLOCK_TOKENS,
    "device_blocks": 64,
    "step_tokens": 60,
}
TIGHT = {"device_blocks": 16}  # one request fits, two do not once they have grown
MODELS = ("grouped heads", "latent v2", "window")  # grouped-query, MLA-shaped, sliding window


class Bench:
    """A model, prompts with a common beginning, and what `generate` says to them."""

    def __init__(self, kind: str, dtype: str) -> None:
        import torch

        from tests.unit.engine.tiny_models import generated, make, prompt

        self.model = make(kind, getattr(torch, dtype)).to("cpu" if CPU else "cuda")
        common = prompt(32, seed=5)
        self.common = common
        self.prompts = [[*common, *prompt(extra, seed=extra)] for extra in (3, 9, 6, 12)]
        self.generated = lambda tokens, **how: generated(self.model, tokens, NEW, **how)
        self.wanted = [self.generated(tokens)[0] for tokens in self.prompts]

    @contextmanager
    def engine(self, **options: Any) -> Iterator[Any]:
        from kvservice.engine.loop import ReferenceEngine
        from kvservice.engine.model import PagedModel
        from kvservice.engine.options import EngineOptions

        model = PagedModel(self.model, block_tokens=BLOCK_TOKENS)
        with ReferenceEngine(model, EngineOptions(**{**SETTINGS, **options})) as running:
            yield running

    def says(self, engine: Any, prompts: list[list[int]], **sampling: Any) -> list[list[list[int]]]:
        from kvservice.engine.sampling import Sampling

        return [one.token_ids for one in engine.generate(prompts, Sampling(max_tokens=NEW, **sampling))]

    def check(self, found: list[list[list[int]]], what: str) -> None:
        if [one[0] for one in found] != self.wanted[: len(found)]:
            raise RuntimeError(f"other tokens than generate: {what}")


def warm(bench: Bench, **options: Any) -> dict[str, Any]:
    with bench.engine(**options) as engine:
        for turn in ("cold", "warm"):
            for index, tokens in enumerate(bench.prompts):
                if bench.says(engine, [tokens]) != [[bench.wanted[index]]]:
                    raise RuntimeError(f"other tokens than generate: {turn}")
                engine.forget()
        return counted(engine, "loaded_blocks", "loaded_blocks_layerwise", "copy_batched_blocks")


def partial(bench: Bench) -> dict[str, Any]:
    with bench.engine() as engine:
        bench.says(engine, [bench.common])
        engine.forget()
        bench.check(bench.says(engine, bench.prompts), "partly in the cache")
        return counted(engine, "loaded_blocks")


def beams(bench: Bench) -> dict[str, Any]:
    with bench.engine() as engine:
        [found] = bench.says(engine, bench.prompts[:1], beams=4, n=4)
    if found != bench.generated(bench.prompts[0], num_beams=4, num_return_sequences=4):
        raise RuntimeError("other beams than generate")
    return {"beams": len(found)}


def parallel(bench: Bench) -> dict[str, Any]:
    """Four outputs of one prompt, the same as from the cache."""
    with bench.engine() as engine:
        first = bench.says(engine, bench.prompts[:1], n=4, temperature=1.0, seed=3)
        engine.forget()
        again = bench.says(engine, bench.prompts[:1], n=4, temperature=1.0, seed=3)
    if first != again:
        raise RuntimeError("other outputs from the cache")
    return {"different outputs": len({tuple(one) for one in first[0]})}


def preempted(bench: Bench, way: str) -> dict[str, Any]:
    with bench.engine(**TIGHT, host_blocks=64, preempt_by=way) as engine:
        bench.check(bench.says(engine, bench.prompts), f"preempted by {way}")
        found = counted(engine, "swapped_out", "swapped_in", "recomputed")
    if not found["swapped_out" if way == "swap" else "recomputed"]:
        raise RuntimeError(f"nothing was preempted by {way}: {found}")
    return found


def counted(engine: Any, *names: str) -> dict[str, Any]:
    counters = engine.all_counters()
    return {"same tokens": True, **{name: counters[name] for name in names}}


MODES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "cold and warm": warm,
    "layer by layer": lambda bench: warm(bench, layerwise="both"),
    "partly warm": partial,
    "four outputs": parallel,
    "four beams": beams,
    "preempted by swap": lambda bench: preempted(bench, "swap"),
    "preempted by recompute": lambda bench: preempted(bench, "recompute"),
}


def main() -> None:
    if not CPU:
        STAGE.torch()
    try:
        import kvservice.engine.loop  # noqa: F401
    except ImportError as error:
        STAGE.skip(f"the reference engine cannot be imported: {error}")
    for kind in MODELS[:1] if CPU else MODELS:
        for dtype in ("float32",) if CPU else ("float32", "bfloat16"):
            bench = Bench(kind, dtype)
            for name, mode in MODES.items():
                STAGE.attempt(f"{kind}, {dtype}, {name}", lambda m=mode, b=bench: m(b))


if __name__ == "__main__":
    main()
