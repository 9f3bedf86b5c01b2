"""What the connector costs an engine that never reuses anything: throughput with it and without it, on real vLLM.

    python -m benchmarks.cold_path [--rounds 8] [--prompts 2] [--tokens 512] [--model PATH] [--out PATH]

Two engines of the same settings stay loaded, one with an embedded pool (every block is copied, digested and sealed,
none is ever hit) and one without the connector. Each round gives both the same new, random prompts, one engine at a
time: without, with, without again. The first and the last of a round differ by noise only, which is reported next to
the ratio: a ratio inside the noise means no measurable cost. On a machine that others use as well, only the processor
time that each engine took is worth reading.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


def prompt(words: int) -> str:
    """Random words, so that no two prompts share a first block; about one token each."""
    return " ".join(random.choice(WORDS) + str(random.randrange(10)) for _ in range(words // 2))


@dataclass(frozen=True, slots=True)
class Sample:
    wall_seconds: float
    cpu_seconds: float  # of all threads of the engine's process


def measure(engine: Replica, prompts: list[str]) -> Sample:
    """Prefill and a few tokens each, in one batch; the prompts are the same for all engines of a round."""
    before = cpu_seconds(engine.pid)
    answer = engine.ask_all(prompts, GENERATED_TOKENS)
    after = cpu_seconds(engine.pid)
    assert all(output["cached_tokens"] == 0 for output in answer["outputs"]), "something was reused"
    return Sample(float(answer["seconds"]), after - before)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(options: argparse.Namespace) -> dict[str, Any]:
    engine_settings = {"dtype": options.dtype, "max_model_len": 2048}
    rounds: list[dict[str, Sample]] = []
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


def figures(rounds: list[dict[str, Sample]], counters: dict[str, int]) -> dict[str, Any]:
    return {
        "throughput": ratios(rounds, lambda sample: 1 / sample.wall_seconds),
        "cpu_time": ratios(rounds, lambda sample: sample.cpu_seconds),
        "rounds": [{name: asdict(sample) for name, sample in found.items()} for found in rounds],
        "connector_counters": counters,
    }


def ratios(rounds: list[dict[str, Sample]], figure: Callable[[Sample], float]) -> dict[str, float]:
    """With the connector to without it, per round, and what repeating "without" alone makes of that ratio."""
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
    parser.add_argument("--prompts", type=int, default=2, help="per round, in one batch")
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
    rows = [(name, found["throughput"][name], found["cpu_time"][name]) for name in found["throughput"]]
    print_table(("ratio", "throughput", "cpu time"), rows)
    print(f"written to {write_report('cold_path', found, options.out)}")


if __name__ == "__main__":
    main()
