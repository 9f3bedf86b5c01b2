"""Request traces in Mooncake's format: JSONL, one request a line. The file is not trusted.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` is in milliseconds since the trace began. Each id stands for 512 tokens and everything before them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.errors import InvalidRequest
from kvservice.units import BlockKey

# Tokens that one id stands for: fixed by the format.
BLOCK_TOKENS = 512
# Room for about 100,000 ids, far more than the longest prompt has. A longer line is refused, so reading stays bounded.
LINE_BYTES_MAX = 1 << 20
# Mooncake's public traces have some 10,000. More are refused: give a limit, and the first ones are read.
REQUESTS_MAX = 10_000_000
BLOCKS_MAX = 50_000_000  # Of all requests together; they take about 2 GB here. More are refused.
ID_MAX = 1 << 63  # Ids are below it, so that they fit 64 bits; a larger one is refused.
LINE = "each line is one request: a JSON object with timestamp, input_length and hash_ids"
TOKENS_MAX = 1 << 40  # Tokens of one prompt or answer; a larger number is a broken file, and is refused.


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as a chain of blocks. Each key names a block and everything before it."""

    at: float  # seconds since the trace began
    keys: tuple[BlockKey, ...]
    tokens: int  # tokens of the prompt
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. `block_count` counts every time that a block is asked for, `unique_count` each block
    once."""

    name: str
    requests: tuple[Request, ...]
    block_count: int
    unique_count: int

    @property
    def hit_rate_max(self) -> float:
        """The hit rate with room for everything: every block is a hit but the first of its kind."""
        return 1 - self.unique_count / self.block_count

    @property
    def seconds(self) -> float:
        return self.requests[-1].at - self.requests[0].at


def trace_of(name: str, requests: list[Request]) -> Trace:
    """Build a trace. Raises InvalidRequest if there are no requests."""
    if not requests:
        raise InvalidRequest(f"{name} has no requests; {LINE}")
    ordered = tuple(sorted(requests, key=lambda request: request.at))
    unique = {key for request in ordered for key in request.keys}
    return Trace(name, ordered, sum(len(request.keys) for request in ordered), len(unique))


def read_trace(path: Path, limit: int | None = None, show: Callable[[int], None] | None = None) -> Trace:
    """Read the first `limit` requests of a file; blocks meanwhile. `show` gets the bytes read so far. Raises
    InvalidRequest, with the line, if the file is not a trace or exceeds the limits above."""
    requests: list[Request] = []
    keys: dict[int, BlockKey] = {}
    blocks = done = 0
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, path):
                if limit is not None and len(requests) >= limit:
                    break
                if len(requests) >= REQUESTS_MAX:
                    raise InvalidRequest(f"{path}: more than {REQUESTS_MAX} requests; read fewer with --limit")
                request = _request(line, f"{path}, line {number}", keys)
                blocks += len(request.keys)
                if blocks > BLOCKS_MAX:
                    raise InvalidRequest(
                        f"{path}, line {number}: more than {BLOCKS_MAX} blocks; read fewer requests with --limit"
                    )
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
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where}: not UTF-8 text; unpack a compressed file first; {LINE}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not JSON: {error}; {LINE}") from error
    if not isinstance(row, dict):
        raise InvalidRequest(f"{where}: not a JSON object; {LINE}")
    milliseconds = _number(row, "timestamp", where)
    tokens, answer = _count(row, "input_length", where), _count(row, "output_length", where, 0)
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < ID_MAX for one in ids):
        raise InvalidRequest(f"{where}: hash_ids must be a list of whole numbers from 0 on")
    if not 0 < len(ids) <= KEYS_PER_REQUEST_MAX or len(set(ids)) != len(ids):
        raise InvalidRequest(f"{where}: it has {len(ids)} hash_ids; give 1 to {KEYS_PER_REQUEST_MAX} different ones")
    if not (len(ids) - 1) * BLOCK_TOKENS < tokens <= len(ids) * BLOCK_TOKENS:
        raise InvalidRequest(f"{where}: {tokens} tokens do not fill {len(ids)} blocks of {BLOCK_TOKENS} tokens")
    chain = tuple(keys[one] if one in keys else keys.setdefault(one, key_of(one)) for one in ids)
    return Request(milliseconds / 1000, chain, tokens, answer)


def key_of(identity: int) -> BlockKey:
    """A key that is spread as evenly as a real one, because routes are computed from keys."""
    return BlockKey(hashlib.blake2b(identity.to_bytes(8, "little"), digest_size=16).digest())


def _number(row: dict[str, object], name: str, where: str) -> float:
    value = row.get(name)
    # Python's whole numbers go further than its floats.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise InvalidRequest(f"{where}: {name} must be a number from 0 on")
    return float(value)


def _count(row: dict[str, object], name: str, where: str, default: int | None = None) -> int:
    value = row.get(name, default)
    if type(value) is not int or not 0 <= value <= TOKENS_MAX:
        raise InvalidRequest(f"{where}: {name} must be a whole number from 0 to {TOKENS_MAX}")
    return value
