"""A prefix cache for a Hugging Face model, shared by all programs that use the same pool.

    python transformers_cache.py models/SmolLM2-135M-Instruct

Answers questions about one document twice, without the cache and with it: the tokens must be equal. Blocks are stored
in a pool of this process, or in the service that runs on this machine; then the next run of this program hits them too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvservice

BLOCK, ANSWER = 16, 16  # tokens
QUESTIONS = ("What is the page about?", "Who wrote it?", "What may I do with it?")


def layout_of(model: Any) -> kvservice.Layout:
    """A block: of each layer the keys and the values, `[head, token, size]` as the model has them."""
    c = model.config
    return kvservice.Layout(BLOCK, (c.num_hidden_layers, 2, c.num_key_value_heads, BLOCK, c.head_dim), model.dtype)


def load(hit: kvservice.Hit) -> DynamicCache:
    """The model's own cache, filled with a hit. This copies, so the hit may end afterwards."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(hit.tensor().permute(1, 2, 3, 0, 4, 5).flatten(3, 4)):
        cache.update(keys[None].contiguous(), values[None].contiguous(), layer)
    return cache


def blocks_of(cache: DynamicCache, begin: int, end: int) -> torch.Tensor:
    """Blocks `begin` to `end` of what the model computed."""
    kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
    cut = kv[:, :, :, begin * BLOCK : end * BLOCK].unflatten(3, (end - begin, BLOCK))
    return cut.permute(3, 0, 1, 2, 4, 5)


def answer(model: Any, tokens: list[int], store: kvservice.Cache | None) -> tuple[list[int], int]:
    """(the answer's tokens, how many tokens of the prompt were not computed)."""
    past, begin = DynamicCache(), 0
    if store is not None:
        with store.get(tokens[:-1]) as hit:  # the model must compute at least one token
            past, begin = (load(hit), len(hit)) if hit else (past, 0)
    prompt = torch.tensor([tokens])
    # generate() computes what `past` lacks.
    said = model.generate(prompt, past_key_values=past, max_new_tokens=ANSWER, do_sample=False, pad_token_id=0)
    if store is not None and (end := len(tokens) // BLOCK) > begin:
        store.put(tokens, blocks_of(past, begin, end), start=begin)
    return said[0, len(tokens) :].tolist(), begin * BLOCK


def main(folder: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    document = tokenizer(Path(__file__).read_text())["input_ids"][:640]
    prompts = [document + tokenizer(f"\n\n{question}\n")["input_ids"] for question in QUESTIONS]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    with kvservice.connect() as pool, pool.attach(Path(folder).name, layout_of(model), identity=versions) as store:
        for question, tokens in zip(QUESTIONS, prompts, strict=True):
            times, answers = [], []
            for each in (None, store):
                begun = time.perf_counter()
                said, cached = answer(model, tokens, each)
                times.append(time.perf_counter() - begun)
                answers.append(said)
            equal = "equal" if answers[0] == answers[1] else "DIFFERENT"
            print(f"{question:<24} {len(tokens)} tokens, {cached:4} cached: {times[0]:.2f} s without,", end=" ")
            print(f"{times[1]:.2f} s with the cache; answers {equal}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder of a model, for example models/SmolLM2-135M-Instruct, which `make model` makes")
    main(sys.argv[1])
