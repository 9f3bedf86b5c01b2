"""When loading layer by layer pays: time to the first token, whole blocks first against layer by layer, on real vLLM.

    python -m benchmarks.layerwise [--hits 512,2048] [--rest 64,512] [--links 0,0.5,0.1] [--rounds 3] [--model PATH]

Two engines of the same settings, each with an embedded pool, are asked one after the other for the same prompts: N
tokens that are in the pool and not in the engine, and M new ones. Link 0 is this machine's own copy. A processor copies
fast against what it computes, so the ratio of other machines is set by a paced copy: every load lasts as long as a link
of so many GB/s would need for its bytes. That emulates a ratio of copy to computation, not any machine. The last figure
is a batch of eight such requests at once, at the machine's own speed: seconds until all are answered.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cold_path import prompt as random_words
from benchmarks.report import ROOT, default_out, print_table, write_report
from tests.vllm.replica import Replica

WORDS_PER_TOKEN = 0.72
BATCH, BATCH_HIT, BATCH_REST, BATCH_TOKENS = 8, 512, 64, 16


def engine(model: str, logs: Path, link: Path, layerwise: str) -> Replica:
    connector = {
        "kv_connector": "KVServiceConnector",
        "kv_connector_module_path": "benchmarks.layerwise_link",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": "embedded", "memory": "512MiB", "layerwise": layerwise},
    }
    settings: dict[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "async_scheduling": False}
    return Replica(
        Path(model),
        None,
        logs / f"{layerwise}.log",
        connector=connector,
        variables={"KVSERVICE_BENCH_LINK": str(link)},
        **settings,
    )


def words(tokens: int) -> str:
    return random_words(int(tokens * WORDS_PER_TOKEN))


def first_token(replica: Replica, prompt: str) -> float:
    replica.reset()
    return float(replica.ask(prompt, 1)["seconds"])


def measure(ways: dict[str, Replica], link: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    bases = {hit: words(hit) for hit in options.hits}
    for replica in ways.values():
        for base in bases.values():
            replica.ask(base, 2)
        for base in bases.values():  # warm
            first_token(replica, f"{base} {words(64)}")
    rows: list[dict[str, Any]] = []
    for speed in options.links:
        link.write_text(str(speed) if speed else "")
        for hit, base in bases.items():
            for rest in options.rest:
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(options.rounds):
                    prompt = f"{base} {words(rest)}"
                    for way, replica in ways.items():
                        seconds[way].append(first_token(replica, prompt))
                rows.append(
                    row := {
                        "link_gb_per_second": speed,
                        "hit_tokens": hit,
                        "rest_tokens": rest,
                        **{f"{way}_seconds": median(found) for way, found in seconds.items()},
                        "samples": seconds,
                    }
                )
                row["saved"] = 1 - row["load_seconds"] / row["off_seconds"]
                shown = f"whole {row['off_seconds']:.3f}  layers {row['load_seconds']:.3f}"
                print(f"{speed:5} GB/s {hit:5} {rest:5}  {shown}", flush=True)
    return rows


def batches(ways: dict[str, Replica], link: Path, rounds: int) -> dict[str, Any]:
    link.write_text("")
    bases = [words(BATCH_HIT) for _ in range(BATCH)]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for replica in ways.values():
        replica.ask_all(bases, 2)
    for _ in range(rounds):
        prompts = [f"{base} {words(BATCH_REST)}" for base in bases]
        for way, replica in ways.items():
            replica.reset()
            seconds[way].append(float(replica.ask_all(prompts, BATCH_TOKENS)["seconds"]))
    return {
        "requests": BATCH,
        "hit_tokens": BATCH_HIT,
        "rest_tokens": BATCH_REST,
        "generated": BATCH_TOKENS,
        **{f"{way}_seconds": median(found) for way, found in seconds.items()},
        "samples": seconds,
    }


def numbers(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hits", type=numbers(int), default="512,2048")
    parser.add_argument("--rest", type=numbers(int), default="64,512")
    parser.add_argument("--links", type=numbers(float), default="0,0.5,0.1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--out", type=Path, default=default_out("layerwise"))
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "link"
        link.write_text("")
        ways = {way: engine(options.model, Path(folder), link, way) for way in ("off", "load")}
        try:
            for replica in ways.values():
                replica.ready()
            rows = measure(ways, link, options)
            together = batches(ways, link, options.rounds)
            counters = {way: replica.counters() for way, replica in ways.items()}
        finally:
            for replica in ways.values():
                replica.close()
    for way, found in counters.items():
        assert found["load_blocks"] and not found["loads_failed"], f"{way} computed what it was to load: {found}"
        assert bool(found["loaded_blocks_layerwise"]) == (way == "load"), f"{way} did not load its way: {found}"
    names = ("link_gb_per_second", "hit_tokens", "rest_tokens", "off_seconds", "load_seconds", "saved")
    print_table(
        ("GB/s", "hit", "rest", "whole s", "layers s", "saved"), [[row[name] for name in names] for row in rows]
    )
    print(f"{BATCH} at once: whole {together['off_seconds']:.3f} s, layers {together['load_seconds']:.3f} s")
    print(f"written to {write_report('layerwise', {'rows': rows, 'batch': together}, options.out)}")


if __name__ == "__main__":
    main()
