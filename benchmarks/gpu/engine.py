"""Stage engine: the reference engine says what `model.generate` says, in each of its modes, on a GPU.

Small models with random weights: the tokens tell a wrong byte from a right one, and nothing is measured. `--cpu` tries
the stage on host memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from benchmarks.gpu.findings import Stage
from kvservice.copying.device import HOST

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
LOADED = ("loaded_blocks", "loaded_blocks_layerwise", "copy_batched_blocks")
WINDOW = "window"
MODELS = ("grouped heads", "latent v2", WINDOW)  # grouped-query, MLA-shaped, sliding window


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
        given = {name: value for name, value in {**SETTINGS, **options}.items() if value is not None}
        with ReferenceEngine(model, EngineOptions(**given)) as running:
            yield running

    def says(self, engine: Any, prompts: list[list[int]], **sampling: Any) -> list[list[list[int]]]:
        from kvservice.engine.sampling import Sampling

        return [one.token_ids for one in engine.generate(prompts, Sampling(max_tokens=NEW, **sampling))]

    def check(self, found: list[list[list[int]]], what: str) -> None:
        if [one[0] for one in found] != self.wanted[: len(found)]:
            raise RuntimeError(f"other tokens than generate: {what}")


def warm(bench: Bench, names: tuple[str, ...] = LOADED, **options: Any) -> dict[str, Any]:
    with bench.engine(**options) as engine:
        for turn in ("cold", "warm"):
            for index, tokens in enumerate(bench.prompts):
                if bench.says(engine, [tokens]) != [[bench.wanted[index]]]:
                    raise RuntimeError(f"other tokens than generate: {turn}")
                engine.forget()
        return counted(engine, *names)


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


def handed_over(bench: Bench) -> dict[str, Any]:
    """One engine computes prompts and another goes on, over the shard of a node."""
    from kvservice.engine.sampling import Sampling

    with (
        node() as (_, options),
        bench.engine(role="producer", **options) as prefill,
        bench.engine(role="consumer", **options) as decode,
    ):
        for index, tokens in enumerate(bench.prompts):
            prefill.add(tokens, Sampling(max_tokens=1), transfer_params={"do_remote_decode": True})
            [done] = finished(prefill)
            decode.add(tokens, Sampling(max_tokens=NEW), transfer_params=done.transfer_params)
            [found] = finished(decode)
            if found.token_ids != [bench.wanted[index]]:
                raise RuntimeError("other tokens than generate: handed over")
            decode.forget()
        counters = counted(decode, "loaded_blocks")
    if not counters["loaded_blocks"]:
        raise RuntimeError("nothing was handed over")
    return counters


def copy_worker(bench: Bench) -> dict[str, Any]:
    """All copies of an engine in the process of a copy worker."""
    with node() as (cluster, options), worker(cluster):
        found = warm(bench, copier="worker", names=("loaded_blocks", "copy_worker_blocks"), **options)
    if not found["copy_worker_blocks"]:
        raise RuntimeError(f"the copy worker copied nothing: {found}")
    return found


@contextmanager
def node() -> Iterator[tuple[Any, dict[str, Any]]]:
    """A shard of its own, and the options of engines beside it."""
    from kvservice.testing.cluster import LocalCluster

    with LocalCluster(nodes=1, lookup_partitions=1, transport="shm") as cluster:
        yield cluster, {"mode": "service", "socket": cluster.socket("n0"), "memory": None}


@contextmanager
def worker(cluster: Any) -> Iterator[None]:
    command = [sys.executable, "-m", "kvservice", "copy-worker", "--service", cluster.service, "--node", "n0"]
    environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(cluster.root)}
    process = subprocess.Popen(
        [*command, "--device", HOST if CPU else "0"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()  # it listens
        yield
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def finished(engine: Any) -> list[Any]:
    """Steps until nothing is left to do. Returns the outputs."""
    found: list[Any] = []
    while engine.has_work:
        found += engine.step()
    return found


def counted(engine: Any, *names: str) -> dict[str, Any]:
    counters = engine.all_counters()
    return {"same tokens": True, **{name: counters[name] for name in names}}


Modes: TypeAlias = dict[str, Callable[[Bench], dict[str, Any]]]
EVERYWHERE: Modes = {
    "cold and warm": warm,
    "layer by layer": lambda bench: warm(bench, layerwise="both"),
    "partly warm": partial,
    "four outputs": parallel,
}
BEAMS: Modes = {"four beams": beams}
PREEMPTED: Modes = {
    "preempted by swap": lambda bench: preempted(bench, "swap"),
    "preempted by recompute": lambda bench: preempted(bench, "recompute"),
}
OVER_A_SHARD: Modes = {"handed over between two engines": handed_over, "copies in a copy worker": copy_worker}


def modes(kind: str, dtype: str) -> Modes:
    """Those that say something for this model."""
    found = dict(EVERYWHERE)
    if kind != WINDOW:  # a window gives back the blocks that have left it, so all requests fit
        found |= PREEMPTED
    if dtype == "float32":  # sums of rounded scores: beams that lie close change places with the size of a batch
        found |= BEAMS
    if dtype == "bfloat16" or CPU:  # once for each kind of model, because a shard takes seconds to start
        found |= OVER_A_SHARD
    return found


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
            for name, mode in modes(kind, dtype).items():
                STAGE.attempt(f"{kind}, {dtype}, {name}", lambda m=mode, b=bench: m(b))


if __name__ == "__main__":
    main()
