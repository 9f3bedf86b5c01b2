"""The tables of docs/howto/share-engines.md from the result of `benchmarks.sharing`. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPES = ("float32", "bfloat16")


def sharing_tables(figures: Mapping[str, Any]) -> str:
    answer = figures["answer"]
    lines = [
        f"{figures['prompts']} prompts of {figures['prompt_tokens']} tokens, SmolLM2-135M, 2 cores without a GPU; "
        "transformers is the reference engine:",
        "",
        "| K and V of | and of | type | largest difference | mean | layer 0 | worst layer |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {pair['one']} | {pair['other']} | {dtype} | {pair['max_difference']:.2g} | {pair['mean_difference']:.1e} | "
        f"{pair['layer_0_relative']:.1e} | {pair['worst_layer_relative']:.1e} |"
        for dtype in DTYPES
        for pair in figures[dtype]["pairs"]
    ]
    lines += ["", "What transformers says behind each prompt from pages of", ""]
    lines += ["| pages of | type | KL, mean | KL, largest | same next token |", "|---|---|---|---|---|"]
    lines += [
        f"| {writer} | {dtype} | {found['kl_mean']:.1e} | {found['kl_max']:.1e} | {_share(found['next_token_equal'])} |"
        for dtype in DTYPES
        for writer, found in figures[dtype]["divergence"].items()
        if writer != "transformers"
    ]
    lines += ["", f"Greedy answers of {answer} tokens, beside those from the reader's own K and V:", ""]
    lines += ["| reader | pages of | type | tokens hit | whole answers equal | tokens before the first other one |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {row['reader']} | {row['writer']} | {dtype} | {row['hit_tokens']:,} | {_share(row['greedy_agreement'])} | "
        f"{_share(row['tokens_agreement'])} |"
        for dtype in DTYPES
        for row in figures[dtype]["readers"]
    ]
    return "\n".join(lines)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
