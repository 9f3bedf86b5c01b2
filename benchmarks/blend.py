"""Cached documents in another order: how far the model's answer is from a full prefill, and what it costs, by ratio.

    python -m benchmarks.blend [--rounds 3] [--questions 5] [--model PATH] [--out PATH]

Sections of the demo's handbook are computed alone and put into an embedded pool. Each question is then asked below
them in an order of its own: once computed whole, and once for each share of the cached tokens that is computed again.
KL is that of the next-token distributions, in nats, the mean over the tokens of the question. It does not depend on
the load of the machine; seconds do, so each is measured between two full prefills and given as a share of them too.
Exits with 1 if a ratio of 1 is not full prefill bit for bit.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvservice
from benchmarks.report import ROOT, default_out, print_table, write_report
from examples.prepare_model import DEFAULT_PATH
from kvservice.engine.blend import Blender, BlendSettings

DOCUMENTS = ROOT / "examples" / "documents"
HEADINGS = ("2.1", "2.2", "2.3", "2.4", "2.5", "4.", "5.")  # what the questions are about
SYSTEM = "<|im_start|>user\nAnswer from these pages of a handbook.\n"
QUESTION = "\nQuestion: {}<|im_end|>\n<|im_start|>assistant\n"
RATIOS = (0.0, 0.05, 0.15, 0.3, 1.0)
UNMOVED = "keys not rotated"
ANSWER_TOKENS = 24  # compared with those after a full prefill
SEED = 15  # of the orders


@dataclass
class Seen:
    """What was seen of one way, a number for each question; seconds for each question and round."""

    computed: list[float] = field(default_factory=list)  # share of the prompt's tokens
    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    equal: list[int] = field(default_factory=list)  # tokens of the answer before the first other one
    seconds: list[float] = field(default_factory=list)
    of_full: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "computed_share": statistics.mean(self.computed),
            "kl_mean": statistics.mean(self.kl),
            "kl_worst_question": max(self.kl),
            "top1_share": statistics.mean(self.top1),
            "equal_answer_tokens": statistics.mean(self.equal),
            "seconds": statistics.median(self.seconds),
            "of_full_prefill": statistics.median(self.of_full),
        }


def sections() -> list[str]:
    text = (DOCUMENTS / "lighthouse-handbook.md").read_text()
    parts = re.split(r"\n(?=##+ )", text)
    return [next(part for part in parts if re.match(rf"##+ {re.escape(one)}", part)) + "\n" for one in HEADINGS]


def answer(model: Any, logits: Any, cache: Any) -> list[int]:
    """Greedy. The cache grows by it."""
    said = [int(logits[0, -1].argmax())]
    while len(said) < ANSWER_TOKENS:
        with torch.no_grad():
            found = model(torch.tensor([said[-1:]]), past_key_values=cache).logits
        said.append(int(found[0, -1].argmax()))
    return said


def full(model: Any, pieces: Sequence[Sequence[int]]) -> tuple[Any, Any, float]:
    """(logits of the last piece, the cache, seconds)."""
    tokens, cache = [token for piece in pieces for token in piece], DynamicCache()
    begun = time.perf_counter()
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=len(pieces[-1])).logits
    return logits, cache, time.perf_counter() - begun


def compare(model: Any, seen: Seen, exact: Any, said: list[int], found: Any) -> None:
    one, other = exact.log_softmax(-1), found.logits.log_softmax(-1)
    seen.computed.append(found.computed / found.tokens)
    seen.kl.append(float((one.exp() * (one - other)).sum(-1).mean()))
    seen.top1.append(float((one.argmax(-1) == other.argmax(-1)).float().mean()))
    again = answer(model, found.logits, found.cache)
    seen.equal.append(
        next((at for at, pair in enumerate(zip(said, again, strict=True)) if len(set(pair)) > 1), len(said))
    )


def measure(model: Any, ways: dict[str, Blender], prompts: list[list[list[int]]], rounds: int) -> dict[str, Seen]:
    seen = {name: Seen() for name in ways}
    seen["full prefill"] = Seen()
    for number, pieces in enumerate(prompts, 1):
        exact, cache, _ = full(model, pieces)
        said = answer(model, exact, cache)
        for turn in range(rounds):
            before = full(model, pieces)[2]
            for name, blender in ways.items():
                begun = time.perf_counter()
                found = blender.prefill(pieces)
                took = time.perf_counter() - begun
                assert not found.misses, found.misses
                after = full(model, pieces)[2]
                seen["full prefill"].seconds.append(after)
                seen[name].seconds.append(took)
                seen[name].of_full.append(2 * took / (before + after))
                before = after
                if turn == 0:
                    compare(model, seen[name], exact, said, found)
        print(f"question {number} of {len(prompts)}, {sum(map(len, pieces))} tokens", file=sys.stderr, flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times each way of each question is measured")
    parser.add_argument("--questions", type=int, default=5, help="how many of the handbook's questions are asked")
    parser.add_argument("--model", type=Path, default=DEFAULT_PATH, help="made by `make model`")
    parser.add_argument("--out", type=Path, default=default_out("blend"))
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()

    def encoded(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    chunks, orders = [encoded(text) for text in sections()], random.Random(SEED)
    questions = json.loads((DOCUMENTS / "questions.json").read_text())["questions"][: given.questions]
    prompts = [
        [encoded(SYSTEM), *orders.sample(chunks, len(chunks)), encoded(QUESTION.format(question))]
        for question in questions
    ]
    with kvservice.connect(mode="embedded", memory="1GiB") as pool:
        ways = {f"{ratio:g}": Blender(model, pool, given.model.name, BlendSettings(ratio=ratio)) for ratio in RATIOS}
        for chunk in (encoded(SYSTEM), *chunks):
            assert ways["0"].store(chunk).is_complete
        ways[UNMOVED] = Blender(model, pool, given.model.name, BlendSettings(ratio=0))
        ways[UNMOVED].move = lambda keys, by: keys  # type: ignore[method-assign]
        seen = measure(model, ways, prompts, given.rounds)
    whole = statistics.median(seen.pop("full prefill").seconds)
    rows = {name: each.figures() for name, each in seen.items()}
    headings = ["ratio", "computed", "KL mean", "KL worst", "top-1", f"equal of {ANSWER_TOKENS}", "seconds", "of full"]
    print_table(headings, [[name, *row.values()] for name, row in rows.items()])
    figures = {
        "model": given.model.name,
        "dtype": "float32",
        "check_layers": list(ways["0"].settings.check_layers),
        "questions": len(prompts),
        "rounds": given.rounds,
        "prompt_tokens": round(statistics.mean(sum(map(len, pieces)) for pieces in prompts)),
        "documents": len(chunks),
        "answer_tokens": ANSWER_TOKENS,
        "full_prefill_seconds": whole,
        "by_ratio": {name: row for name, row in rows.items() if name != UNMOVED},
        "keys_not_rotated": rows[UNMOVED],
    }
    print(write_report("blend", figures, given.out))
    if rows["1"]["kl_mean"] or rows["1"]["kl_worst_question"]:
        sys.exit("a ratio of 1 is not full prefill")


if __name__ == "__main__":
    main()
