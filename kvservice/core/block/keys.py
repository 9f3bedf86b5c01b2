"""Block keys: how a block gets its name, and how a chain of names is spread over the lookup partitions.

key = keyed BLAKE2b-128(tenant key, fingerprint digest ‖ engine's chained block hash). The engine's hash already covers
tokens, parent, LoRA, multimodal inputs and cache_salt. The fingerprint covers everything else that changes the bytes.
The tenant key keeps tenants apart. Nothing depends on a random seed: keys are equal on all machines. Pure.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable, Sequence
from itertools import chain

from kvservice.errors import InvalidRequest
from kvservice.units import BlockHash, BlockKey, SpanRoute

KEY_BYTES = 16  # 128 bits: among 2^40 blocks, two share a key with a probability of 2^-49. Other lengths are refused.
# Consecutive blocks of a chain that share a lookup partition: long prompts touch few partitions, and one popular system
# prompt does not load a single partition with all its blocks.
SPAN_BLOCKS = 64
# 131,072 tokens in blocks of 16. Engines ask for and store the first 8,192 blocks of a longer prompt and compute the
# rest. A request with more keys is refused. Packed it takes 128 KiB.
KEYS_PER_REQUEST_MAX = 8192
_NO_TENANTS = b"kvservice/default-tenant"  # the tenant key of all blocks of a service without tenants
_KEYS_AT_ONCE = 256  # by one struct; those for all numbers up to this take 1 MiB together


def block_key(fingerprint_digest: bytes, block_hash: BlockHash, tenant_key: bytes = b"") -> BlockKey:
    """The 16-byte key of one block. `tenant_key` is at most 64 secret bytes; empty without tenants, here and below."""
    hasher = _hasher(fingerprint_digest, tenant_key).copy()
    hasher.update(block_hash)
    return BlockKey(hasher.digest())


def block_keys(fingerprint_digest: bytes, hashes: Iterable[BlockHash], tenant_key: bytes = b"") -> list[BlockKey]:
    """The keys of a whole chain, in its order. The fingerprint is hashed once and the state copied for each block."""
    base = _hasher(fingerprint_digest, tenant_key)
    keys: list[BlockKey] = []
    for block_hash in hashes:
        hasher = base.copy()
        hasher.update(block_hash)
        keys.append(BlockKey(hasher.digest()))
    return keys


@functools.lru_cache(maxsize=64)  # of the engine's own and those of its adapters; a decoding request names one block
def _hasher(fingerprint_digest: bytes, tenant_key: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(fingerprint_digest, key=tenant_key or _NO_TENANTS, digest_size=KEY_BYTES)


def tenant_key(secret: bytes, name: str) -> bytes:
    """The key from which all of a tenant's block keys derive. It does not depend on its tokens, which may change."""
    return hashlib.blake2b(b"kvservice/tenant/1" + name.encode(), key=secret, digest_size=32).digest()


def public_key(secret: bytes) -> bytes:
    """The key from which the keys of blocks derive that tenants share on purpose."""
    return hashlib.blake2b(b"kvservice/public/1", key=secret, digest_size=32).digest()


def adapter_key(key: bytes, identity: bytes) -> bytes:
    """The tenant key for prompts that are computed with an adapter. `identity` identifies the adapter's weights."""
    return hashlib.blake2b(b"kvservice/adapter/1" + identity, key=key or _NO_TENANTS, digest_size=32).digest()


def term_key(key: bytes, term: bytes) -> bytes:
    """The tenant key for one term of an engine's weights, so that blocks of earlier weights have other keys. Without a
    term, the weights are as they were loaded, and the key stays."""
    return hashlib.blake2b(b"kvservice/term/1" + term, key=key or _NO_TENANTS, digest_size=32).digest() if term else key


def version_term(version: str) -> bytes:
    """The term of weights that their operator names by a version. Equal for every engine with this version."""
    return hashlib.blake2b(b"kvservice/weights-version/1" + version.encode(), digest_size=16).digest()


def chain_hashes(
    token_ids: Sequence[int], block_tokens: int, root: bytes = b"", after: BlockHash | None = None
) -> list[BlockHash]:
    """`chain_packed` for tokens in Python's numbers."""
    return chain_packed(struct.pack(f"<{len(token_ids)}I", *token_ids), block_tokens, root, len(token_ids), after)


def chain_packed(
    tokens: bytes,
    block_tokens: int,
    root: bytes,
    count_max: int,
    after: BlockHash | None = None,
) -> list[BlockHash]:
    """Chained SHA-256 of the first `count_max` full token blocks, for engines without block hashes.

    `tokens` are little-endian u32. A trailing partial block gets no hash. `root` separates namespaces (a salt, a LoRA
    id). With `after` the chain goes on behind the block of that hash, and `root` is not used.
    """
    parent = after or hashlib.sha256(b"kvservice/chain/1" + root).digest()
    hashes: list[BlockHash] = []
    size = 4 * block_tokens
    for start in range(0, min(len(tokens) // size, count_max) * size, size):
        parent = BlockHash(hashlib.sha256(parent + tokens[start : start + size]).digest())
        hashes.append(parent)
    return hashes


def span_route(keys: Sequence[BlockKey], position: int) -> SpanRoute:
    """The route of the block at this position of a chain: the first four bytes of the key that begins its span."""
    return route_of_head(keys[position - position % SPAN_BLOCKS])


def route_of_head(span_head: BlockKey) -> SpanRoute:
    return SpanRoute(int.from_bytes(span_head[:4], "big"))


def partition_of(route: SpanRoute, partition_count: int) -> int:
    """The index in [0, partition_count) of the lookup partition that owns this route."""
    return route % partition_count


def pack_keys(keys: Iterable[BlockKey]) -> bytes:
    return b"".join(keys)


def check_packed(packed: bytes, count_max: int = KEYS_PER_REQUEST_MAX) -> bytes:
    """Returns `packed`. Raises InvalidRequest for a length that is not a multiple of 16, or for too many keys."""
    if len(packed) % KEY_BYTES:
        raise InvalidRequest(f"packed keys are {len(packed)} bytes, not a multiple of {KEY_BYTES}", length=len(packed))
    count = len(packed) // KEY_BYTES
    if count > count_max:
        raise InvalidRequest(f"{count} keys in one request, at most {count_max}", count=count, count_max=count_max)
    return packed


def check_keys(keys: Iterable[BlockKey]) -> None:
    """Raises InvalidRequest when a key does not have 16 bytes."""
    odd = set(map(len, keys)) - {KEY_BYTES}
    if odd:
        raise InvalidRequest(f"a block key is {KEY_BYTES} bytes, not {min(odd)}", length=min(odd))


def check_chain(keys: Sequence[BlockKey], count_max: int = KEYS_PER_REQUEST_MAX) -> None:
    """Raises InvalidRequest unless these are 1 to `count_max` keys of 16 bytes, each once."""
    if not 0 < len(keys) <= count_max:
        raise InvalidRequest(f"{len(keys)} keys are not 1 to {count_max}")
    if len(set(keys)) < len(keys):
        raise InvalidRequest(f"one of the {len(keys)} keys is there twice")
    check_keys(keys)


def unpack_keys(packed: bytes) -> tuple[BlockKey, ...]:
    """The keys of one packed field. Raises InvalidRequest as `check_packed`."""
    check_packed(packed)
    # Six times as fast as slicing, which would be most of the cost of answering a lookup.
    rest = len(packed) % (_KEYS_AT_ONCE * KEY_BYTES)
    whole = len(packed) - rest
    last = _struct_of(rest // KEY_BYTES).unpack_from(packed, whole)
    if not whole:
        return last
    return (*chain.from_iterable(_struct_of(_KEYS_AT_ONCE).iter_unpack(packed[:whole])), *last)


@functools.lru_cache(maxsize=_KEYS_AT_ONCE + 1)
def _struct_of(count: int) -> struct.Struct:
    """So many keys in a row."""
    return struct.Struct(f"{KEY_BYTES}s" * count)
