"""What the connector costs an engine that never reuses anything: throughput with it and without it, on real vLLM.

    python -m benchmarks.cold_path [--rounds 8] [--prompts 4] [--tokens 512] [--model PATH] [--out PATH]

Two engines of the same settings stay loaded, one with an embedded pool (every block is copied, digested and sealed,
none is ever hit) and one without the connector. Each round gives both the same new, random prompts, one engine at a
time: without, with, without again. The first and the last of a round differ by noise only, which is reported next to
the ratio: a ratio inside the noise means no measurable cost.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from benchmarks.report import default_out, percentile, print_table, write_report
from tests.vllm.replica import Replica

ROOT = Path(__file__).resolve().parent.parent
GENERATED_TOKENS = 16
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
BLOCK_TOKENS = 32


def prompt(words: int) -> str:
    """Random words, so that no two prompts share a first block; about one token each."""
    return " ".join(random.choice(WORDS) + str(random.randrange(10)) for _ in range(words // 2))


def measure(engine: Replica, prompts: list[str]) -> float:
    """Tokens generated a second, prefill included; the prompts are the same for all engines of a round."""
    answer = engine.ask_all(prompts, GENERATED_TOKENS)
    assert all(output["cached_tokens"] == 0 for output in answer["outputs"]), "something was reused"
    return len(prompts) * GENERATED_TOKENS / float(answer["seconds"])


def run(options: argparse.Namespace) -> dict[str, object]:
    engine_settings = {"dtype": options.dtype, "max_model_len": 2048}
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as logs:
        engines = {
            "without": Replica(options.model, None, Path(logs) / "without.log", **engine_settings),
            "with": Replica(options.model, {"mode": "embedded", "memory": options.pool}, Path(logs) / "with.log",
                            **engine_settings),
        }  # fmt: skip
        try:
            for engine in engines.values():
                measure(engine.ready(), [prompt(options.tokens)])
            for number in range(options.rounds):
                prompts = [prompt(options.tokens) for _ in range(options.prompts)]
                found = {"without": measure(engines["without"], prompts), "with": measure(engines["with"], prompts)}
                engines["without"].reset()
                found["without_again"] = measure(engines["without"], prompts)
                rounds.append(found)
                print(f"round {number + 1}/{options.rounds}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()))
            counters = engines["with"].counters()
        finally:
            for engine in engines.values():
                engine.close()
    assert counters["stored_blocks"] > 0, f"the connector stored nothing: {counters}"
    return figures(rounds, dict(counters))


def figures(rounds: list[dict[str, float]], counters: dict[str, int]) -> dict[str, object]:
    baseline = [(found["without"] + found["without_again"]) / 2 for found in rounds]
    ratios = [found["with"] / base for found, base in zip(rounds, baseline, strict=True)]
    noise = [found["without_again"] / found["without"] for found in rounds]
    return {
        "generated_tokens_per_second_without": percentile(baseline, 0.5),
        "generated_tokens_per_second_with": percentile([found["with"] for found in rounds], 0.5),
        "ratio_with_to_without_p50": percentile(ratios, 0.5),
        "ratio_with_to_without_p25": percentile(ratios, 0.25),
        "ratio_with_to_without_p75": percentile(ratios, 0.75),
        "noise_without_to_without_p25": percentile(noise, 0.25),
        "noise_without_to_without_p75": percentile(noise, 0.75),
        "rounds": rounds,
        "connector_counters": counters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help="per round, in one batch")
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt, about")
    parser.add_argument(
        "--pool", default="256MiB", help="small enough that it evicts, as a cold workload would make it"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=default_out("cold_path"))
    options = parser.parse_args()
    random.seed(options.seed)
    found = run(options)
    print_table(("figure", "value"), [(name, value) for name, value in found.items() if isinstance(value, float)])
    print(f"written to {write_report('cold_path', found, options.out)}")


if __name__ == "__main__":
    main()
