"""The tables of docs/howto/share-engines.md from the results of `benchmarks.sharing`. Measures nothing."""

from __future__ import annotations

from benchmarks.committed import AGAIN, Figures, Results, Unclean

DTYPES = ("float32", "bfloat16")


def sharing_tables(results: Results) -> str:
    """Of each type that was measured, and which command measures the other one."""
    figures: dict[str, Figures] = {}
    missing = []
    for dtype in DTYPES:
        try:
            figures[dtype] = results.figures(f"sharing_{dtype}")
        except Unclean:
            missing.append(f"{dtype.capitalize()} is {AGAIN}: `python -m benchmarks.sharing --dtype {dtype}`.")
    return "\n\n".join([*([_tables(figures)] if figures else []), *missing])


def _tables(figures: dict[str, Figures]) -> str:
    asked = ", ".join(f"{found['prompts']} in {dtype}" for dtype, found in figures.items())
    tokens = " and ".join(sorted({str(found["prompt_tokens"]) for found in figures.values()}))
    answer = " or ".join(sorted({str(found["answer"]) for found in figures.values()}))
    lines = [
        f"Prompts of {tokens} tokens ({asked}), SmolLM2-135M, 2 cores without a GPU; transformers is the reference "
        "engine:",
        "",
        "| K and V of | and of | type | largest difference | mean | layer 0 | worst layer |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {pair['one']} | {pair['other']} | {dtype} | {pair['max_difference']:.2g} | {pair['mean_difference']:.1e} | "
        f"{pair['layer_0_relative']:.1e} | {pair['worst_layer_relative']:.1e} |"
        for dtype, found in figures.items()
        for pair in found["pairs"]
    ]
    lines += ["", "What transformers says behind each prompt from pages of", ""]
    lines += ["| pages of | type | KL, mean | KL, largest | same next token |", "|---|---|---|---|---|"]
    lines += [
        f"| {writer} | {dtype} | {found['kl_mean']:.1e} | {found['kl_max']:.1e} | {_share(found['next_token_equal'])} |"
        for dtype, measured in figures.items()
        for writer, found in measured["divergence"].items()
        if writer != "transformers"
    ]
    lines += ["", f"Greedy answers of {answer} tokens, beside those from the reader's own K and V:", ""]
    lines += ["| reader | pages of | type | tokens hit | whole answers equal | tokens before the first other one |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {row['reader']} | {row['writer']} | {dtype} | {row['hit_tokens']:,} | {_share(row['greedy_agreement'])} | "
        f"{_share(row['tokens_agreement'])} |"
        for dtype, found in figures.items()
        for row in found["readers"]
    ]
    return "\n".join(lines)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
