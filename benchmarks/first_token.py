"""Time to the first token against the length of the prompt: computed, from the engine's own cache, from this node's
pool, and from another node's.

    python -m benchmarks.first_token [--lengths 512 1024 2048 4096 8000] [--rounds 3] [--out PATH]

Two real vLLM engines on two nodes of one machine, one request at a time. Every prompt is new; it is computed by the
first engine, asked again, asked once more after the engine forgot its own cache, and then asked of the second engine.
The same is asked of an engine without the connector, for what computing and its own cache cost there. The hand-off from
a prefill to a decode engine has a benchmark of its own, benchmarks.pd_handoff.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, default_out, print_table, write_report
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import GiB
from tests.vllm.replica import Replica, close_all

ENGINE: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "max_num_batched_tokens": 2048}
WAYS = (
    "computed",
    "computed, without the connector",
    "own cache",
    "own cache, without the connector",
    "this node",
    "other node",
)


def prompt(tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [random.randrange(100, 40_000) for _ in range(tokens)]}


def seconds(engine: Replica, text: dict[str, list[int]], cached_at_least: int) -> float:
    answer = engine.ask(text, 1)
    if answer["cached_tokens"] < cached_at_least:
        raise SystemExit(f"{answer['cached_tokens']} tokens were cached, not {cached_at_least}")
    return float(answer["seconds"])


def one_round(cluster: LocalCluster, engines: dict[str, Replica], tokens: int) -> dict[str, float]:
    text, most = prompt(tokens), (tokens - 1) // 32 * 32
    here, there, off = engines["here"], engines["there"], engines["off"]
    before = here.counters()["stored_blocks"]
    found = {"computed": seconds(here, text, 0), "own cache": seconds(here, text, most)}
    wanted = before + tokens // 32
    eventually(lambda: here.counters()["stored_blocks"] >= wanted, f"{wanted} stored blocks", detail=here.counters)
    cluster.wait_until_announced("n0")
    here.reset()
    found["this node"] = seconds(here, text, most)
    found["other node"] = seconds(there, text, most)
    found["computed, without the connector"] = seconds(off, text, 0)
    found["own cache, without the connector"] = seconds(off, text, most)
    for engine in engines.values():
        engine.reset()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=default_out("first_token"))
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory() as logs,
        LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=2 * GiB) as cluster,
    ):
        engines = {
            name: Replica(
                options.model,
                None if node is None else {"mode": "service", "socket": cluster.socket(node)},
                Path(logs) / f"{name}.log",
                **ENGINE,
            )
            for name, node in (("here", "n0"), ("there", "n1"), ("off", None))
        }
        try:
            for engine in engines.values():
                engine.ready().ask(prompt(256), 1)
            one_round(cluster, engines, min(options.lengths))  # connects the nodes
            for length in options.lengths:
                rounds = [one_round(cluster, engines, length) for _ in range(options.rounds)]
                figures[str(length)] = {way: round(statistics.median(r[way] for r in rounds), 4) for way in WAYS}
                print(length, figures[str(length)], flush=True)
        finally:
            close_all(engines.values())
    print_table(["tokens", *WAYS], [[length, *found.values()] for length, found in figures.items()])
    print(write_report("first_token", {"rounds": options.rounds, "seconds_by_prompt_tokens": figures}, options.out))


if __name__ == "__main__":
    main()
