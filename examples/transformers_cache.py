"""A prefix cache for a Hugging Face model, shared by all programs that use the same pool.

    python transformers_cache.py models/SmolLM2-135M-Instruct

Answers questions about one document twice, without the cache and with it: the tokens must be equal. Blocks are stored
in a pool of this process, or in the service that runs on this machine; then the next run of this program hits them too.
"""

from __future__ import annotations

import hashlib
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
    """A block: of each layer the keys and the values, `[head, token, size]` as the model leaves them in its cache."""
    layers = model(torch.tensor([[1]])).past_key_values.layers
    shapes = {getattr(getattr(layer, name, None), "shape", None) for layer in layers for name in ("keys", "values")}
    if len(shapes) > 1 or None in shapes or "longrope" in str(getattr(model.config, "rope_parameters", "")):
        sys.exit("this example is for models whose layers keep keys and values of one shape, for texts of any length")
    _, heads, _, size = shapes.pop()
    return kvservice.Layout(BLOCK, (len(layers), 2, heads, BLOCK, size), model.dtype)


def identity_of(model: Any) -> dict[str, str]:
    """All that changes the bytes of a block. An adapter that was merged, or another checkpoint in the same folder, is
    another model, so its numbers name it and not its files."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return {"model": digest.hexdigest(), "transformers": transformers.__version__, "torch": torch.__version__}


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
    layout, identity = layout_of(model), identity_of(model)
    with kvservice.connect() as pool, pool.attach(Path(folder).name, layout, identity=identity) as store:
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
