"""How long after a prefill the decode engine's first token comes, ours against vLLM's own NixlConnector, on real vLLM.

    python -m benchmarks.pd_handoff [--tokens 512,2048,4096] [--rounds 5] [--model PATH] [--out PATH]

Both get the same prompts, on two engines of the same settings each; the two pairs run one after the other, because an
idle NIXL agent of vLLM keeps a core busy. A hand-off is the time from the prefill engine's answer to the decode
engine's first token, less the one step that any engine of this model needs for that token: the fastest seen in the run
with the same prompt in the engine's own prefix cache. (Engines that share their cores with busy agents need several
times as long for that step; subtracting their own would hide what their users wait for. It is in the table.)

`one after the other`: the decode request is sent when the prefill has answered, as a proxy for NixlConnector must. `at
once`: both are sent together, and blocks cross while the prefill computes. Both pairs move bytes by NIXL between two
processes of one machine: theirs from engine to engine, ours from shard to shard. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cold_path import prompt as random_words
from benchmarks.report import ROOT, default_out, print_table, write_report
from kvservice.testing.cluster import LocalCluster, free_port
from kvservice.units import MiB
from tests.vllm.replica import Replica

NIXL_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@contextmanager
def our_pair(model: str, logs: Path, settings: dict[str, Any]) -> Iterator[tuple[Replica, Replica]]:
    with LocalCluster(nodes=2, pool_bytes=1024 * MiB) as cluster:
        pair = [
            Replica(
                Path(model),
                {"mode": "service", "socket": cluster.socket(node)},
                logs / f"ours-{node}.log",
                role=role,
                **settings,
            )
            for node, role in (("n0", "kv_producer"), ("n1", "kv_consumer"))
        ]
        try:
            yield pair[0].ready(), pair[1].ready()
        finally:
            for one in pair:
                one.close()


@contextmanager
def nixl_pair(model: str, logs: Path, settings: dict[str, Any]) -> Iterator[tuple[Replica, Replica]]:
    pair = [
        Replica(
            Path(model),
            None,
            logs / f"nixl-{role}.log",
            connector={"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
            variables={"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            **settings,
        )
        for role in ("kv_producer", "kv_consumer")
    ]
    try:
        yield pair[0].ready(), pair[1].ready()
    finally:
        for one in pair:
            one.close()


def one_after_the_other(pair: tuple[Replica, Replica], prompt: str, params: dict[str, Any]) -> dict[str, Any]:
    prefill, decode = pair
    prefill.send_prompt(prompt, params, 1)
    first = prefill.first_answer()
    decode.send_prompt(prompt, first["params"], 1)
    answer = decode.first_answer()
    return _measured(decode, prompt, first, answer, answer["seconds"])


def at_once(pair: tuple[Replica, Replica], prompt: str) -> dict[str, Any]:
    prefill, decode = pair
    ours = {"version": 1, "handoff": uuid.uuid4().hex}
    decode.send_prompt(prompt, {"kvservice": {**ours, "role": "decode", "node": "n0"}}, 1)
    prefill.send_prompt(prompt, {"kvservice": {**ours, "role": "prefill"}}, 1)
    first = prefill.first_answer()
    answer = decode.first_answer()
    return _measured(decode, prompt, first, answer, answer["ended_at"] - first["ended_at"])


def _measured(
    decode: Replica, prompt: str, first: dict[str, Any], answer: dict[str, Any], until_token: float
) -> dict[str, Any]:
    assert answer["token_ids"] == first["token_ids"], "prefill and decode do not agree on the first token"
    step = median(decode.ask(prompt, 1)["seconds"] for _ in range(3))
    return {"prefill_seconds": first["seconds"], "first_token_seconds": until_token, "step_seconds": step}


def run(options: argparse.Namespace) -> dict[str, Any]:
    settings = {"dtype": "float32", "max_model_len": max(options.tokens) + 512, "max_num_batched_tokens": 512}
    random.seed(options.seed)
    prompts = {tokens: [random_words(int(tokens * 0.72)) for _ in range(options.rounds)] for tokens in options.tokens}
    samples: list[dict[str, Any]] = []

    def keep(system: str, way: str, tokens: int, sample: dict[str, Any]) -> None:
        samples.append({"system": system, "way": way, "tokens": tokens, **sample})
        print(
            f"{system:14} {way:20} {tokens:5}  first token {sample['first_token_seconds']:6.3f} s after the prefill",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        with nixl_pair(options.model, Path(folder), settings) as pair:
            one_after_the_other(pair, random_words(200), NIXL_PREFILL)  # connects
            for tokens, texts in prompts.items():
                for text in texts:
                    keep("NixlConnector", "one after the other", tokens, one_after_the_other(pair, text, NIXL_PREFILL))
        with our_pair(options.model, Path(folder), settings) as pair:
            one_after_the_other(pair, random_words(200), {"do_remote_decode": True})
            for tokens, texts in prompts.items():
                for text in texts:
                    sample = one_after_the_other(pair, text, {"do_remote_decode": True})
                    keep("kvservice", "one after the other", tokens, sample)
                    keep("kvservice", "at once", tokens, at_once(pair, f"again {text}"))
    return {"settings": settings, "rounds": options.rounds, "rows": summarise(samples), "samples": samples}


def summarise(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for system, way, tokens in dict.fromkeys((s["system"], s["way"], s["tokens"]) for s in samples):
        mine = [s for s in samples if (s["system"], s["way"], s["tokens"]) == (system, way, tokens)]
        one_step = min(s["step_seconds"] for s in samples if s["tokens"] == tokens)
        row = {"system": system, "way": way, "tokens": tokens, "one_step_seconds": one_step}
        for name in ("first_token_seconds", "step_seconds", "prefill_seconds"):
            row[name] = median(s[name] for s in mine)
        row["handoff_seconds"] = row["first_token_seconds"] - one_step
        row["handoff_seconds_worst"] = max(s["first_token_seconds"] for s in mine) - one_step
        rows.append(row)
    theirs = {row["tokens"]: row["handoff_seconds"] for row in rows if row["system"] == "NixlConnector"}
    for row in rows:
        row["of_nixl_connector"] = row["handoff_seconds"] / theirs[row["tokens"]]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default="512,2048,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--out", type=Path, default=default_out("pd_handoff"))
    options = parser.parse_args()
    figures = run(options)
    columns = ("system", "way", "tokens", "hand-off s", "worst s", "own step s", "prefill s", "of NixlConnector")
    names = (
        "system",
        "way",
        "tokens",
        "handoff_seconds",
        "handoff_seconds_worst",
        "step_seconds",
        "prefill_seconds",
        "of_nixl_connector",
    )
    print_table(columns, [[row[name] for name in names] for row in figures["rows"]])
    print(f"written to {write_report('pd_handoff', figures, options.out)}")


if __name__ == "__main__":
    main()
