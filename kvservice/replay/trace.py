"""Request traces: Mooncake's JSONL, one request a line, from a file that is not trusted.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` is milliseconds since the trace began, and each id stands for 512 tokens and everything before them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.errors import InvalidRequest
from kvservice.units import BlockKey

BLOCK_TOKENS = 512
LINE_BYTES_MAX = 1 << 20
REQUESTS_MAX = 10_000_000
BLOCKS_MAX = 50_000_000  # of all requests together, about 2 GB here
ID_MAX = 1 << 63
TOKENS_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: its chain of blocks, each key naming a block and everything before it."""

    at: float  # seconds since the trace began
    keys: tuple[BlockKey, ...]
    tokens: int  # of the prompt
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by time. `block_count` counts each time a block is asked for, `unique_count` each block once."""

    name: str
    requests: tuple[Request, ...]
    block_count: int
    unique_count: int

    @property
    def hit_rate_max(self) -> float:
        """With room for everything: every block but the first of its kind."""
        return 1 - self.unique_count / self.block_count

    @property
    def seconds(self) -> float:
        return self.requests[-1].at - self.requests[0].at


def trace_of(name: str, requests: list[Request]) -> Trace:
    """Raises InvalidRequest for a trace without requests."""
    if not requests:
        raise InvalidRequest(f"{name} has no request")
    ordered = tuple(sorted(requests, key=lambda request: request.at))
    unique = {key for request in ordered for key in request.keys}
    return Trace(name, ordered, sum(len(request.keys) for request in ordered), len(unique))


def read_trace(path: Path, limit: int | None = None, show: Callable[[int], None] | None = None) -> Trace:
    """The first `limit` requests of a file. `show` is told the bytes read so far. Raises InvalidRequest, with the line
    where it stopped, for what is no trace or is larger than the bounds above. Blocks while it reads."""
    requests: list[Request] = []
    keys: dict[int, BlockKey] = {}
    blocks = done = 0
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, path):
                if limit is not None and len(requests) >= limit:
                    break
                if len(requests) >= REQUESTS_MAX:
                    raise InvalidRequest(f"{path}: more than {REQUESTS_MAX} requests: give --limit")
                request = _request(line, f"{path}, line {number}", keys)
                blocks += len(request.keys)
                if blocks > BLOCKS_MAX:
                    raise InvalidRequest(f"{path}, line {number}: more than {BLOCKS_MAX} blocks: give --limit")
                requests.append(request)
                done += len(line)
                if show is not None and number % 1000 == 0:
                    show(done)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error
    return trace_of(path.name, requests)


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise InvalidRequest(f"{path}, line {number}: longer than {LINE_BYTES_MAX} bytes")
        if line.strip():
            yield number, line


def _request(line: bytes, where: str, keys: dict[int, BlockKey]) -> Request:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidRequest(f"{where}: not an object: one request a line, with timestamp, input_length and hash_ids")
    milliseconds = _number(row, "timestamp", where)
    tokens, answer = _count(row, "input_length", where), _count(row, "output_length", where, 0)
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < ID_MAX for one in ids):
        raise InvalidRequest(f"{where}: hash_ids is no list of whole numbers from 0 on")
    if not 0 < len(ids) <= KEYS_PER_REQUEST_MAX or len(set(ids)) != len(ids):
        raise InvalidRequest(f"{where}: {len(ids)} hash_ids: 1 to {KEYS_PER_REQUEST_MAX}, each once")
    if not (len(ids) - 1) * BLOCK_TOKENS < tokens <= len(ids) * BLOCK_TOKENS:
        raise InvalidRequest(f"{where}: {tokens} tokens are not {len(ids)} blocks of {BLOCK_TOKENS}")
    chain = tuple(keys[one] if one in keys else keys.setdefault(one, key_of(one)) for one in ids)
    return Request(milliseconds / 1000, chain, tokens, answer)


def key_of(identity: int) -> BlockKey:
    """A key that looks like a real one: evenly spread, as routes are taken from it."""
    return BlockKey(hashlib.blake2b(identity.to_bytes(8, "little"), digest_size=16).digest())


def _number(row: dict[str, object], name: str, where: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InvalidRequest(f"{where}: {name} is no number from 0 on")
    return float(value)


def _count(row: dict[str, object], name: str, where: str, default: int | None = None) -> int:
    value = row.get(name, default)
    if type(value) is not int or not 0 <= value <= TOKENS_MAX:
        raise InvalidRequest(f"{where}: {name} is no whole number from 0 to {TOKENS_MAX}")
    return value
