"""What a lossy codec does to a model: its next tokens behind a stored prefix and the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvservice.codec.guard import drift
from kvservice.codec.int8 import pack_int8, unpack_int8
from kvservice.core.block.numbers import ITEM_BYTES, Numbers
from kvservice.engine.model import PagedModel
from kvservice.engine.paged import TokenSpan
from kvservice.errors import InvalidRequest

PREFIX_SHARE = 0.75  # of the tokens is stored; the next ones of the same text are asked for behind it


@dataclass(frozen=True, slots=True)
class LossFigures:
    """KL is from the exact distribution of the next token to the one after the codec, in nats."""

    prefix_tokens: int
    asked_tokens: int
    stored_share: float  # of the prefix's bytes
    kl_mean: float
    kl_max: float
    same_first: float  # share of the asked tokens whose likeliest successor stayed the same
    drift_keys: float  # the largest of a block, as the guard measures it
    drift_values: float


def measure_int8(model: PagedModel, tokens: Sequence[int]) -> LossFigures:
    """Compute a text twice behind its first three quarters: as they were computed, and after int8 and back.

    Allocates the model's blocks. Blocks for as long as the model takes for the text and for each asked token twice.
    Raises InvalidRequest for a text that is too short, or for K and V that int8 does not take.
    """
    shape = model.shape
    kind = str(shape.dtype).removeprefix("torch.")
    full = int(len(tokens) * PREFIX_SHARE) // shape.block_tokens
    if not full or full * shape.block_tokens >= len(tokens):
        raise InvalidRequest(f"{len(tokens)} tokens are too few: give a text of some blocks of {shape.block_tokens}")
    if shape.key_width != shape.value_width or kind not in ITEM_BYTES:
        raise InvalidRequest("int8 needs K and V of one width, of 16 or 32 bits a number")
    numbers = Numbers(kind, ITEM_BYTES[kind], shape.key_width, shape.block_tokens, "int8")
    count = -(-len(tokens) // shape.block_tokens)
    kv, table = model.allocate(count), list(range(count))
    prefix = full * shape.block_tokens
    model.forward([TokenSpan(tokens[:prefix], 0, table)])
    exact = _asked(model, tokens, prefix, table)
    stored, drifts = 0, [(0.0, 0.0)]
    for block in table[:full]:
        held = kv.storage[block].cpu().contiguous().view(torch.uint8).flatten()
        payload = held.numpy().tobytes()
        packed = pack_int8(payload, numbers)
        if packed is None:
            raise InvalidRequest("int8 does not take these numbers: some are infinite, none, or too large")
        decoded = bytearray(len(payload))
        unpack_int8(memoryview(packed), kind, numbers.row, memoryview(decoded))
        stored += len(packed)
        drifts.append(drift(numbers, payload, decoded))
        found = torch.frombuffer(decoded, dtype=torch.uint8).view(shape.dtype).view(kv.storage[block].shape)
        kv.storage[block].copy_(found)
    lossy = _asked(model, tokens, prefix, table)
    kl = (exact.exp() * (exact - lossy)).sum(-1).clamp_min(0)
    same = (exact.argmax(-1) == lossy.argmax(-1)).float().mean()
    return LossFigures(
        prefix,
        len(tokens) - prefix,
        stored / (full * shape.block_bytes),
        float(kl.mean()),
        float(kl.max()),
        float(same),
        max(keys for keys, _ in drifts),
        max(values for _, values in drifts),
    )


def _asked(model: PagedModel, tokens: Sequence[int], begin: int, table: list[int]) -> torch.Tensor:
    """`(token, vocabulary)` logarithms of what follows each token from `begin` on, one step each as while decoding."""
    rows = [
        model.forward([TokenSpan(tokens[place : place + 1], place, table)])[0] for place in range(begin, len(tokens))
    ]
    return torch.log_softmax(torch.stack(rows).double(), -1)
