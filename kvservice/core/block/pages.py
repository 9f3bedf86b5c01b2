"""Names and order of the blocks that engines of several kinds share, and what must be equal for it. Pure.

An engine's own blocks are exact: their names say which engine computed them, and no other kind finds them. Engines that
choose `share: engines` name and write blocks in a way of their own, beside the exact one. A block is then a page of 16
tokens. Its name is the plain chain of SHA-256 that SGLang names its pages by, because SGLang hands hashes to a storage
and no tokens. Its bytes are `[layer][K|V][token][kv head][element]`, little-endian, in the KV cache's own type, with K
as attention reads it: after rotation, not scaled. Everything else that changes the bytes is in the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.numbers import ITEM_BYTES, number_fields
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import InvalidRequest, UnsupportedLayout
from kvservice.units import BlockHash

PAGE_TOKENS = 16  # SGLang's usual page and vLLM's usual block on a GPU. Larger blocks hold several pages.
PAGE_HASH = "sha256 of pages"  # what the fingerprint calls the names of pages
LAYOUT_VERSION = 1  # of the order of bytes above. Another order gets another number, and then other names.
# Rotations whose angles the engines were seen to compute alike. Others are refused until somebody has compared them.
ROPES = frozenset({"default", "linear", "llama3"})
# Entries of a model's configuration that change no byte of K and V: names, texts, and what only sampling reads.
WORDS_ONLY = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "is_llama_config"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "transformers.js_config"}
)
# A prompt that every engine can compute: ids below 128, so of any vocabulary, all different, in four
# pages. An engine whose storage sees hashes only is asked for it before it shares anything.
KNOWN_PROMPT = tuple(5 + 37 * index % 113 for index in range(4 * PAGE_TOKENS))
_DIGEST_DIGITS = 32  # of SHA-256 in hex: 128 bits


def page_hashes(token_ids: Sequence[int], after: BlockHash | None = None) -> list[BlockHash]:
    """The hashes of the full pages of these tokens: SHA-256 of the hash before and 16 little-endian u32.

    `after` is the hash of what comes before them; None at the beginning of a prompt. Raises InvalidRequest for what is
    no token id.
    """
    try:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise InvalidRequest(f"token ids are whole numbers from 0 to {2**32 - 1}: {error}") from error
    parent, hashes, size = after or b"", list[BlockHash](), 4 * PAGE_TOKENS
    for start in range(0, len(packed) - size + 1, size):
        parent = BlockHash(hashlib.sha256(parent + packed[start : start + size]).digest())
        hashes.append(parent)
    return hashes


def salted(salt: bytes) -> BlockHash:
    """What comes before the first page of prompts with this salt, so that they share pages among themselves only."""
    return BlockHash(hashlib.sha256(b"kvservice/pages/salt/1" + salt).digest())


class PageChain:
    """The page hashes of one request, whose tokens become more."""

    def __init__(self, salt: bytes) -> None:
        self._root = salted(salt) if salt else None
        self.hashes: list[BlockHash] = []

    def follow(self, token_ids: Sequence[int]) -> list[BlockHash]:
        """The hashes of all full pages of the request's tokens so far: the same list each time, grown. The tokens that
        were there at the last call are not looked at again."""
        done = len(self.hashes) * PAGE_TOKENS
        if len(token_ids) - done >= PAGE_TOKENS:
            self.hashes += page_hashes(token_ids[done:], self.hashes[-1] if self.hashes else self._root)
        return self.hashes


@dataclass(frozen=True, slots=True)
class SharedModel:
    """What must be equal between two engines that share pages. `config` is the model's configuration as its files say
    it, without an engine's changes. Raises UnsupportedLayout for a model whose pages cannot be shared."""

    weights: str  # the name of their bytes
    dtype: str  # of the KV cache and of the computation: "bfloat16", "float16" or "float32"
    layer_count: int
    kv_head_count: int  # of the whole model
    head_size: int  # elements of one token's K, and of its V, in one head
    config: Mapping[str, object] = field(repr=False)
    accepts: str = ""  # a lossy codec that tiers may use

    def __post_init__(self) -> None:
        check_shareable(self.config, self.layer_count)
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise UnsupportedLayout(f"a KV cache of {self.dtype} is not shared between engines: use the model's dtype")

    @property
    def layout(self) -> SlotLayout:
        """Of a page in a slot. `cell_bytes` counts its bytes; their order is not that of a cell."""
        cell_bytes = PAGE_TOKENS * 2 * self.head_size * ITEM_BYTES[self.dtype]
        return SlotLayout(self.layer_count, self.kv_head_count, cell_bytes, PAGE_TOKENS)

    @property
    def fingerprint(self) -> Fingerprint:
        fields: dict[str, object] = {
            "engine": "shared between engines",
            "hash": PAGE_HASH,
            "page_layout": f"layer, K or V, token, kv head, element: {LAYOUT_VERSION}",
            "block_tokens": PAGE_TOKENS,
            "slot_tokens": PAGE_TOKENS,
            "weights": self.weights,
            "config": config_digest(self.config),
            "rope": rope_text(self.config),
            "kv_dtype": self.dtype,
            "numerics": f"{self.dtype}, weights as stored",
            "adapter": "none",
            "layers": self.layer_count,
            "kv_heads": self.kv_head_count,
            "head_size": self.head_size,
            **number_fields(self.dtype, self.head_size, 0, self.accepts),
        }
        return Fingerprint.of(fields)


def config_digest(config: Mapping[str, object]) -> str:
    """Of all entries of a configuration that may change K and V, in any order."""
    kept = {name: value for name, value in config.items() if name not in WORDS_ONLY}
    text = json.dumps(kept, sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]}"


def check_shareable(config: Mapping[str, object], layer_count: int) -> None:
    """Raises UnsupportedLayout that names what of this model was not compared between engines."""
    parts = [name for name, value in config.items() if name.endswith("_config") and isinstance(value, Mapping)]
    if set(parts) - {"quantization_config"}:
        raise UnsupportedLayout(f"a model of several parts ({', '.join(sorted(parts))}) is not shared between engines")
    if "quantization_config" in parts:
        raise UnsupportedLayout("quantised weights are not shared between engines: each kernel rounds in its own way")
    if config.get("kv_lora_rank"):
        raise UnsupportedLayout("latent attention (MLA) is not shared between engines: its pages are not K and V")
    kinds = config.get("layer_types") or ()
    others = sorted({str(kind) for kind in kinds if kind != "full_attention"}) if isinstance(kinds, Sequence) else []
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        others.append("sliding_window")
    if others or config.get("attention_chunk_size"):
        raise UnsupportedLayout(f"only full attention is shared between engines, not {', '.join(others) or 'chunks'}")
    if config.get("num_hidden_layers", layer_count) != layer_count:
        raise UnsupportedLayout(
            f"the KV cache has {layer_count} layers and the model {config['num_hidden_layers']}: only models that keep "
            "K and V in every layer are shared between engines"
        )
    rope_text(config)


def rope_text(config: Mapping[str, object]) -> str:
    """The rotation of K: its kind and its numbers, in either form in which configurations say it. Raises
    UnsupportedLayout for a kind that was not compared."""
    found: dict[str, object] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if config.get(name) is not None:
            found[name] = config[name]
    for name in ("rope_scaling", "rope_parameters"):
        part = config.get(name)
        if isinstance(part, Mapping):
            found |= {str(key): value for key, value in part.items() if value is not None}
    if any(isinstance(value, Mapping) for value in found.values()):
        raise UnsupportedLayout("layers that rotate K in different ways are not shared between engines")
    old_kind = found.pop("type", "default")  # configurations of before 2024 call it so
    kind = str(found.pop("rope_type", old_kind))
    if kind not in ROPES:
        raise UnsupportedLayout(
            f"rotation {kind!r} was not compared between engines: {', '.join(sorted(ROPES))} are shared"
        )
    numbers = "".join(f", {name} {_number(found[name])}" for name in sorted(found))
    return kind + numbers


def _number(value: object) -> str:
    """100000 and 100000.0 are one number."""
    return repr(float(value)) if isinstance(value, int | float) else str(value)
