"""Draft layers (EAGLE, MTP) keep their KV in the model's own blocks. This says what names such a block.

At each token a draft layer also reads the token behind it, so the last cell of a block depends on the first token of
the next one. vLLM therefore drops the last block of its own hits. Here a block has the hash of the block behind it,
and counts as whole when that one is: whoever finds it goes on with the same tokens.

vLLM's own cache may give a request a block from before another continuation, so nothing is stored of its hits. What a
draft head of several layers computes behind such a block depends on it a little, and is stored. A wrong cell costs a
draft and never a token, because the model checks each draft.

Written for vLLM 0.32 and 0.33. Pure; used on the scheduler's thread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, overload

# vLLM's methods whose draft layers read one token ahead and are stored.
STORED_DRAFT_LAYERS = frozenset({"eagle", "eagle3", "mtp"})

DRAFT_LAYERS = "draft_layers"  # the field of a fingerprint that has the method; without draft layers it is left out


def has_draft_layers(speculative: Any) -> bool:
    """`speculative` is vLLM's configuration of speculative decoding, or None. vLLM calls all of these EAGLE there."""
    return speculative is not None and bool(speculative.use_eagle())


def keep_kv(speculative: Any) -> bool:
    """Whether drafts have KV in the model's blocks: those of draft layers, and of a draft model."""
    return has_draft_layers(speculative) or (speculative is not None and bool(speculative.uses_draft_model()))


def drafted_tokens(vllm_config: Any) -> int | None:
    """How long the requests of a step may be, in tokens, for vLLM to draft in it; None if all blocks are as named.

    With a longer one vLLM's first model runner drafts for none of them, so their new tokens have no KV of drafts. Its
    second one, which most engines on GPUs have, always drafts.
    """
    speculative = vllm_config.speculative_config
    if not keep_kv(speculative):
        return None
    if getattr(vllm_config, "use_v2_model_runner", False):
        return sys.maxsize if has_draft_layers(speculative) else None
    longest = speculative.draft_model_config.max_model_len or vllm_config.model_config.max_model_len
    return int(longest) - int(speculative.num_speculative_tokens)


class HashesBehind(Sequence[Any]):
    """For each block the hash of the block behind it: one less than the engine's list, which may grow."""

    def __init__(self, hashes: Sequence[Any]) -> None:
        self._hashes = hashes

    def __len__(self) -> int:
        return max(len(self._hashes) - 1, 0)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._hashes[numbers + 1]
        return self._hashes[numbers.start + 1 : numbers.stop + 1 : numbers.step]
