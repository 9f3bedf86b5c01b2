"""What the connector costs an engine that never reuses anything: throughput with it and without it, on real vLLM.

    python -m benchmarks.cold_path [--rounds 8] [--prompts 2] [--tokens 512] [--model PATH] [--out PATH]

Two engines of the same settings stay loaded, one with an embedded pool (every block is copied, digested and sealed,
none is ever hit) and one without the connector. Each round gives both the same new, random prompts, one engine at a
time: without, with, without again. The first and the last of a round differ by noise only, which is reported next to
the ratio: a ratio inside the noise means no measurable cost. On a machine that others use as well, only the
processor time that each engine took is worth reading.

Then an engine with two layers of the model is asked new prompts until the pool notices that nothing comes twice and has
only a sample stored (after two windows, 1,024 blocks each for so small a pool), and then each prompt twice, until it
stores again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, cpu_seconds, default_out, percentile, print_table, write_report
from tests.vllm.replica import Replica
from tests.vllm.tiny_model import make_shallow

GENERATED_TOKENS = 16
ENGINE_BLOCK_TOKENS = 32  # of tests.vllm.replica
ADMISSION_ROUNDS = 24
ADMISSION_POOL = "48MiB"  # less than 1,024 blocks of two layers: the shortest window
WORDS = [
    "lamp",
    "tide",
    "keeper",
    "cliff",
    "boat",
    "storm",
    "rope",
    "letter",
    "glass",
    "north",
    "engine",
    "harbour",
    "salt",
    "window",
    "morning",
    "signal",
]


def prompt(words: int) -> str:
    """Random words, so that no two prompts share a first block; about one token each."""
    return " ".join(random.choice(WORDS) + str(random.randrange(10)) for _ in range(words // 2))


@dataclass(frozen=True, slots=True)
class Sample:
    wall_seconds: float
    cpu_seconds: float  # of all threads of the engine's process


def measure(engine: Replica, prompts: list[str]) -> Sample:
    """Run a prefill and a few tokens for each prompt, in one batch. All engines of a round get the same prompts."""
    before = cpu_seconds(engine.pid)
    answer = engine.ask_all(prompts, GENERATED_TOKENS)
    after = cpu_seconds(engine.pid)
    assert all(output["cached_tokens"] == 0 for output in answer["outputs"]), "something was reused"
    return Sample(float(answer["seconds"]), after - before)


def run(options: argparse.Namespace) -> dict[str, Any]:
    engine_settings = {"dtype": options.dtype, "max_model_len": 2048}
    rounds: list[dict[str, Sample]] = []
    with tempfile.TemporaryDirectory() as logs:
        engines = {
            "without": Replica(options.model, None, Path(logs) / "without.log", **engine_settings),
            "with": Replica(
                options.model, {"mode": "embedded", "memory": options.pool}, Path(logs) / "with.log", **engine_settings
            ),
        }
        try:
            for engine in engines.values():
                measure(engine.ready(), [prompt(options.tokens)])
            for number in range(options.rounds):
                prompts = [prompt(options.tokens) for _ in range(options.prompts)]
                found = {"without": measure(engines["without"], prompts), "with": measure(engines["with"], prompts)}
                engines["without"].reset()
                found["without_again"] = measure(engines["without"], prompts)
                rounds.append(found)
                print(
                    f"round {number + 1}/{options.rounds}: "
                    + ", ".join(f"{k} {v.wall_seconds:.2f} s" for k, v in found.items())
                )
            counters = engines["with"].counters()
        finally:
            for engine in engines.values():
                engine.close()
    assert counters["stored_blocks"] > 0, f"the connector stored nothing: {counters}"
    return figures(rounds, dict(counters))


def admission(options: argparse.Namespace) -> dict[str, list[float]]:
    """The share of each round's blocks that is stored: while no prompt comes twice, and while every prompt does."""
    shares: dict[str, list[float]] = {"nothing_comes_twice": [], "every_prompt_comes_twice": []}
    with tempfile.TemporaryDirectory() as folder:
        model = make_shallow(Path(tempfile.mkdtemp(dir=folder)), options.model, layers=2)
        extra: dict[str, object] = {"mode": "embedded", "memory": ADMISSION_POOL}
        engine = Replica(model, extra, Path(folder) / "engine.log", max_model_len=2048, max_num_batched_tokens=1024)
        try:
            engine.ready()
            for _ in range(ADMISSION_ROUNDS):
                shares["nothing_comes_twice"].append(stored_share(engine, options.tokens, times=1))
            for _ in range(4):
                shares["every_prompt_comes_twice"].append(stored_share(engine, options.tokens, times=2))
        finally:
            engine.close()
    return shares


def stored_share(engine: Replica, tokens: int, times: int) -> float:
    """The stored share of the new blocks of eight new prompts, each asked this many times."""
    prompts = [prompt(tokens) for _ in range(8)]
    before = engine.counters()["stored_blocks"]
    for _ in range(times):
        answers = engine.ask_all(prompts, 1)["outputs"]
        engine.reset()
    time.sleep(0.5)  # what is copied last is sealed after the answer
    blocks = sum(answer["prompt_tokens"] // ENGINE_BLOCK_TOKENS for answer in answers)
    return round((engine.counters()["stored_blocks"] - before) / blocks, 3)


def figures(rounds: list[dict[str, Sample]], counters: dict[str, int]) -> dict[str, Any]:
    return {
        "throughput": ratios(rounds, lambda sample: 1 / sample.wall_seconds),
        "cpu_time": ratios(rounds, lambda sample: sample.cpu_seconds),
        "rounds": [{name: asdict(sample) for name, sample in found.items()} for found in rounds],
        "connector_counters": counters,
    }


def ratios(rounds: list[dict[str, Sample]], figure: Callable[[Sample], float]) -> dict[str, float]:
    """The ratio of runs with the connector to runs without, per round, and the same ratio of two runs without."""
    cost = [2 * figure(r["with"]) / (figure(r["without"]) + figure(r["without_again"])) for r in rounds]
    noise = [figure(r["without_again"]) / figure(r["without"]) for r in rounds]
    return {
        "with_to_without_p50": percentile(cost, 0.5),
        "with_to_without_p25": percentile(cost, 0.25),
        "with_to_without_p75": percentile(cost, 0.75),
        "noise_p25": percentile(noise, 0.25),
        "noise_p75": percentile(noise, 0.75),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=2, help="prompts per round, sent in one batch")
    parser.add_argument("--tokens", type=int, default=512, help="approximate tokens of each prompt")
    parser.add_argument(
        "--pool", default="256MiB", help="size of the pool; small enough that it evicts, as with a cold workload"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=default_out("cold_path"))
    options = parser.parse_args()
    random.seed(options.seed)
    found = run(options)
    found["stored_share_by_round"] = admission(options)
    print(f"stored share of new blocks, round by round: {found['stored_share_by_round']}")
    rows = [(name, found["throughput"][name], found["cpu_time"][name]) for name in found["throughput"]]
    print_table(("ratio", "throughput", "cpu time"), rows)
    print(f"written to {write_report('cold_path', found, options.out)}")


if __name__ == "__main__":
    main()
