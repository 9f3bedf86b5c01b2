"""What a warm turn of a conversation costs beside the engine's own hit, and where the time goes.

    python -m benchmarks.warm_turn [--before CHECKOUT] [--rounds 5] [--out PATH]

The engine of `make demo-serve` (SmolLM2-135M in float32, blocks of 32 tokens, so 1.4 MiB a block), by itself: no router
and no HTTP, one request at a time. Turns of about 1,000 tokens, of which some 830 are there: in the engine's own cache,
in the pool of its node, or in that of another node. Each has a question of its own, so that all compute the same. A
turn is cut into the time until the pool has answered (a fetch is in it), until the copy has ended, until the engine
computes, and until the first token. With `--before`, another checkout of the project is measured in alternating rounds,
each in a process of its own. Milliseconds, medians of all turns; `best` is the best one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PREFIX_CHARS, QUESTION_CHARS = 3300, 600
TALKS = 5
WAYS = ("own cache", "this node", "other node")
PHASES = ("pool_ms", "copy_ms", "wait_ms", "compute_ms")
SETTLE_SECONDS = 3.0  # for announcements, and for what a fresh shard does in the background


class Timeline:
    """When what happened to the request that was asked last, from the entries of the connector."""

    def __init__(self) -> None:
        from kvservice.connector.vllm.connector import KVServiceConnector

        self.at: dict[str, float] = {}
        self._patch(KVServiceConnector, "on_new_request", lambda given, answer: "asked")
        self._patch(KVServiceConnector, "get_num_new_matched_tokens", _answered)
        self._patch(KVServiceConnector, "update_connector_output", _copied)
        self._patch(KVServiceConnector, "build_connector_meta", _computes)

    def _patch(self, owner: Any, name: str, what: Any) -> None:
        entry = getattr(owner, name)

        def timed(connector: Any, *given: Any, **named: Any) -> Any:
            answer = entry(connector, *given, **named)
            found = what(given, answer)
            if found:
                self.at.setdefault(found, time.perf_counter())
            return answer

        setattr(owner, name, timed)

    def phases(self, began: float, first: float) -> dict[str, float]:
        """Milliseconds of each phase of a request that was sent at `began`, with its first token after `first`."""
        at = self.at
        answered = at.get("answered", at["asked"])
        copied, computes = at.get("copied", answered), at["computes"]
        ends = (answered, copied, computes, began + first)
        begins = (began, *ends[:-1])
        found = {name: 1e3 * (end - begin) for name, begin, end in zip(PHASES, begins, ends, strict=True)}
        return {"first_token_ms": 1e3 * first, **found}


def _answered(given: Any, answer: Any) -> str:
    return "answered" if answer[0] is not None else ""


def _copied(given: Any, answer: Any) -> str:
    return "copied" if given[0].finished_recving else ""


def _computes(given: Any, answer: Any) -> str:
    return "computes" if given[0].total_num_scheduled_tokens else ""


def one_round(model: str, document: str) -> dict[str, list[dict[str, float]]]:
    """Every way for each conversation. Two engines after each other: the first one's node is the other node."""
    from examples.demo.replica import DemoReplica
    from kvservice.testing.cluster import LocalCluster
    from kvservice.units import MiB

    timeline, questions = Timeline(), iter(range(10_000))
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}

    def turn(engine: Any, talk: int) -> dict[str, Any]:
        place = (next(questions) * 211) % (len(document) - QUESTION_CHARS)
        start = talk * PREFIX_CHARS
        text = (
            f"{document[start : start + PREFIX_CHARS]}\n\nQuestion {place}: {document[place : place + QUESTION_CHARS]}"
        )
        timeline.at.clear()
        began = time.perf_counter()
        answer: dict[str, Any] = engine.ask(text, 2)
        return {**answer, **timeline.phases(began, answer["first_token_seconds"])}

    with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=768 * MiB, slab_bytes=16 * MiB) as cluster:
        other = DemoReplica(model, cluster.socket("n1"))
        for talk in range(TALKS):
            turn(other, talk)
        cluster.wait_until_announced("n1", 60)
        other.close()
        engine = DemoReplica(model, cluster.socket("n0"))
        time.sleep(SETTLE_SECONDS)
        for talk in range(TALKS):
            rows = {"other node": turn(engine, talk), "own cache": turn(engine, talk)}
            engine.forget()
            rows["this node"] = turn(engine, talk)
            for way, source in (("own cache", "engine"), ("this node", "pool"), ("other node", "remote")):
                row = rows[way]
                cached = row["prompt_tokens"] - row["computed_tokens"]
                assert row[f"{source}_tokens"] == cached > 500, f"{way}: {row}"
                found[way].append({name: row[name] for name in ("first_token_ms", *PHASES, "computed_tokens")})
        engine.close()
    return found


def child(tree: Path, model: str, document: str) -> dict[str, list[dict[str, float]]]:
    command = [sys.executable, str(Path(__file__).resolve()), "--one", model]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        command, cwd=tree, env=environment, input=document, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, list[dict[str, float]]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in rows[0]} | {
        "best_ms": min(row["first_token_ms"] for row in rows)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, to measure in the same run")
    parser.add_argument("--model", help="a model's folder; default: the demo's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_round(options.one, sys.stdin.read())))
        return
    from benchmarks.report import ROOT, print_table, write_report
    from examples.demo.stage import prepared_model, shipped_document

    model = prepared_model(options.model)
    document, _ = shipped_document(1)
    trees = {"now": ROOT} | ({} if options.before is None else {"before": options.before.resolve()})
    rows: dict[str, dict[str, list[dict[str, float]]]] = {name: {way: [] for way in WAYS} for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            for way, found in child(tree, model, document).items():
                rows[name][way] += found
    figures: dict[str, Any] = {}
    for name in trees:
        ways = {way: summary(rows[name][way]) for way in WAYS}
        own = ways["own cache"]["first_token_ms"]
        over = {f"{way} over own_ms": ways[way]["first_token_ms"] - own for way in WAYS[1:]}
        figures[name] = {"ways": ways, **over, "turns": rows[name]}
    names = ("first_token_ms", *PHASES, "best_ms")
    print_table(
        ["turn", *names],
        [[f"{way}, {name}", *(figures[name]["ways"][way][each] for each in names)] for name in trees for way in WAYS],
    )
    print("written", write_report("warm_turn", figures, options.out))


if __name__ == "__main__":
    main()
