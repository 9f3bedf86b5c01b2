"""`connect` and what it gives: Pool and Cache that wait, AsyncPool and AsyncCache for programs on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from kvservice.aio import DaemonThreads, in_thread
from kvservice.api.attached import AttachedModel, PutResult, Verify
from kvservice.api.explanation import RequestExplanation
from kvservice.api.hit import Hit
from kvservice.api.layout import Arrays, Layout, Tokens
from kvservice.api.pool_thread import PoolThread
from kvservice.errors import InvalidRequest
from kvservice.observe import logs
from kvservice.session.options import PoolOptions

NAMESPACE = "python"  # apart from engines: a program that attaches first must not keep an engine out
# For blocks of other nodes. Far more than they take on a network that is worth fetching over; then what is here counts.
TIMEOUT_SECONDS = 5.0
HOLD_SECONDS = 30.0  # that warmed blocks are held: as long as a request may wait in a queue


class ConnectOptions(PoolOptions):
    """The arguments of `connect`, checked as every setting is."""

    what = "argument of connect()"


def connect(
    mode: Literal["auto", "service", "embedded"] = "auto",
    *,
    service: str | None = None,
    node: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
    memory: str | int | None = None,
    eviction: str = "default",
    metrics_port: int | None = None,
    disk_path: str | os.PathLike[str] | None = None,
    disk_bytes: str | int | None = None,
    objects_url: str | None = None,
) -> Pool:
    """Open a pool: that of a service which runs on this machine, or one in this process.

    `auto` takes the service when one is registered on this machine now, else a pool of `memory` bytes that nobody else
    sees. `service`, `node` and `socket` choose where several shards are registered. `token_file` holds the token of a
    tenant, instead of KVSERVICE_TOKEN_FILE. `memory`, `eviction` and `metrics_port` are of a pool in this process; at
    the port, if one is given, Prometheus finds its metrics. Such a pool may have tiers below its memory: a directory on
    a disk (`disk_path`, at most `disk_bytes`), where the next program with this path finds the blocks again, and an
    object store (`objects_url`).

    Blocks for a moment; for seconds when a large pool is made. Raises Unavailable when no shard listens, ConfigError
    for arguments that do not fit together or when several shards fit, SegmentError when /dev/shm has too little room.

    >>> import kvservice
    >>> with kvservice.connect(mode="embedded", memory="8MiB") as pool:
    ...     pool.mode
    'embedded'
    """
    thread = PoolThread(_options(locals()))
    try:
        thread.loop.wait(thread.open())
    except BaseException:  # it may have been opened when the KeyboardInterrupt came
        Pool(thread).close()
        raise
    return Pool(thread)


async def connect_async(
    mode: Literal["auto", "service", "embedded"] = "auto",
    *,
    service: str | None = None,
    node: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
    memory: str | int | None = None,
    eviction: str = "default",
    metrics_port: int | None = None,
    disk_path: str | os.PathLike[str] | None = None,
    disk_bytes: str | int | None = None,
    objects_url: str | None = None,
) -> AsyncPool:
    """`connect` for a program on an event loop: see there.

    >>> import asyncio, kvservice
    >>> async def main():
    ...     async with await kvservice.connect_async(mode="embedded", memory="8MiB") as pool:
    ...         return pool.mode
    >>> asyncio.run(main())
    'embedded'
    """
    thread = PoolThread(_options(locals()))
    try:
        await thread.loop.wait_async(thread.open())
    except BaseException:  # it may have been opened when the cancellation came
        await AsyncPool(thread).close()
        raise
    return AsyncPool(thread)


def _options(arguments: dict[str, Any]) -> ConnectOptions:
    """`arguments` of `connect`, by name."""
    logs.speak_up()
    given = {name: value for name, value in arguments.items() if value is not None}
    paths = {name: os.fspath(value) for name, value in given.items() if isinstance(value, os.PathLike)}
    return ConnectOptions(**given | paths)


class PoolFace:
    """What both kinds of pool are."""

    def __init__(self, thread: PoolThread) -> None:
        self._thread = thread

    @property
    def mode(self) -> str:
        """`service` or `embedded`."""
        return self._thread.mode.value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mode}{'' if self._thread.loop.is_usable else ', closed'})"


class CacheFace:
    """What both kinds of cache are."""

    def __init__(self, thread: PoolThread, attached: AttachedModel) -> None:
        self._thread = thread
        self._attached = attached

    @property
    def model(self) -> str:
        return self._attached.model

    @property
    def layout(self) -> Layout:
        return self._attached.layout

    @property
    def is_attached(self) -> bool:
        """Whether the pool is there now, for this process."""
        return self._thread.loop.is_usable and self._attached.is_attached

    def __repr__(self) -> str:
        state = "attached" if self.is_attached else "not attached"
        return f"{type(self).__name__}({self.model!r}, {state})"


class Pool(PoolFace):
    """A pool of blocks, made by `connect`. Use it in a `with`, or call `close`. Any thread may call.

    >>> import kvservice
    >>> with kvservice.connect(mode="embedded", memory="8MiB") as pool:
    ...     cache = pool.attach("my-model", kvservice.Layout(block_tokens=16, shape=(4, 2, 8, 16, 64)))
    ...     cache.is_attached
    True
    """

    def attach(
        self,
        model: str,
        layout: Layout,
        *,
        identity: Mapping[str, object] | None = None,
        namespace: str = NAMESPACE,
        verify: Verify = "sampled",
    ) -> Cache:
        """The blocks of one model in this pool.

        `model` and `identity` must name everything that changes the bytes of a block: the weights, the type of the
        numbers, the order of the axes, the version of the code. Programs share blocks exactly when all of it is equal
        as text. In place of an array or a tensor, which is refused, give its digest or a version.
        `verify` says which blocks of a hit are checked against the digest that they were sealed with: one in sixteen
        (`sampled`), all (`full`) or none (`off`). Blocks from another node are always checked, before they count.

        Raises FingerprintMismatch, which names the fields that differ, when another program has attached this model in
        this namespace with another layout or identity; Unavailable; UnsupportedLayout for a block that does not fit.
        """
        made: list[AttachedModel] = []
        work = self._thread.attach(model, layout, identity or {}, namespace, verify, made)
        try:
            return Cache(self._thread, self._thread.loop.wait(work))
        except BaseException:  # a KeyboardInterrupt may come just after it was made
            self._thread.drop(made)
            raise

    def explain(self, request_id: str) -> RequestExplanation:
        """What became of each block of a request, by the word of all nodes of the service.

        `request_id` is that of a `get` or of an engine's request, or its beginning. Nodes remember requests for some
        minutes. Blocks for seconds when a node does not answer. Raises Unavailable when no part of the service is
        found, and Unauthenticated, a KVServiceError, when the service wants another tenant's token.

        >>> import kvservice, numpy
        >>> with kvservice.connect(mode="embedded", memory="8MiB") as pool:
        ...     cache = pool.attach("m", kvservice.Layout(block_tokens=4, shape=(2, 8)))
        ...     _ = cache.put(range(8), numpy.zeros((2, 2, 8), "float32"))
        ...     cache.get(range(12), request_id="r1").close()
        ...     print(pool.explain("r1"))
        0-1 local
        2-2 missed: no node had stored it, as far as anybody remembers
        """
        return self._thread.loop.wait(self._thread.explain(request_id))

    def close(self) -> None:
        """Leave the pool. Caches are closed with it; a pool in this process is gone, and hits are kept readable.
        Idempotent."""
        self._thread.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Cache(CacheFace):
    """The blocks of one model, made by `Pool.attach`. Any thread may call.

    While the shard is away a `get` misses and a `put` drops, both with the reason `unavailable`. The cache attaches
    again by itself.

    >>> import kvservice, numpy
    >>> with kvservice.connect(mode="embedded", memory="8MiB") as pool:
    ...     cache = pool.attach("my-model", kvservice.Layout(block_tokens=4, shape=(2, 3)))
    ...     blocks = numpy.arange(12, dtype="float32").reshape(2, 2, 3)
    ...     cache.put([5, 6, 7, 8, 9, 10, 11, 12, 13], blocks)  # the ninth token fills no block
    ...     with cache.get([5, 6, 7, 8, 9, 10, 11, 12, 99, 100, 101, 102]) as hit:
    ...         hit.copy().tolist() == blocks.tolist(), hit.tokens, hit.miss
    PutResult(stored=2, present=0, dropped=0, reason='')
    (True, 8, 'never_stored')
    """

    def get(
        self,
        tokens: Tokens,
        *,
        start: int = 0,
        salt: str = "",
        timeout: float = TIMEOUT_SECONDS,
        request_id: str = "",
    ) -> Hit:
        """The longest prefix of the prompt that the pool has, leased. Blocks of other nodes are fetched first.

        `start` leaves out the first blocks, which the caller has. Blocks that were put with another `salt` are not
        found. Blocks for `timeout` seconds at most, plus what the network takes. `request_id` is the name under which
        `kvservice explain` knows the request. Raises InvalidRequest, and SegmentError if the memory of a shard that has
        just come back cannot be mapped.
        """
        return self._thread.loop.wait(self._attached.get(tokens, start, salt, timeout, request_id))

    def put(self, tokens: Tokens, arrays: Arrays, *, start: int = 0, salt: str = "") -> PutResult:
        """Store the blocks of a prompt: one array or tensor of shape `(blocks, *layout.shape)`, or a list of blocks.

        The first of them is block `start` of the prompt. Give at most the whole blocks of `tokens`; fewer is fine.
        Blocks until the bytes are copied and sealed. The arrays are the caller's again as soon as it ends, also by a
        KeyboardInterrupt or a cancellation. Raises InvalidRequest when shapes, types or counts do not fit.
        """
        return self._thread.loop.wait(self._attached.put(tokens, arrays, start, salt))

    def warm(
        self, tokens: Tokens, *, salt: str = "", timeout: float = TIMEOUT_SECONDS, hold: float = HOLD_SECONDS
    ) -> int:
        """Bring the prefix to this node and hold it there for `hold` seconds, so that a later `get` need not fetch it.

        Returns how many tokens are here. What is held is not evicted; together it is at most a quarter of the pool, and
        what was warmed longest ago is let go first. Blocks for at most `timeout` seconds. Raises InvalidRequest.

        >>> import kvservice, numpy
        >>> with kvservice.connect(mode="embedded", memory="8MiB") as pool:
        ...     cache = pool.attach("my-model", kvservice.Layout(block_tokens=4, shape=(3,)))
        ...     _ = cache.put(range(8), numpy.zeros((2, 3), "float32"))
        ...     cache.warm(range(100))
        8
        """
        return self._thread.loop.wait(self._attached.warm(tokens, salt, timeout, hold))

    def close(self) -> None:
        """Detach. Idempotent. The blocks stay in the pool."""
        self._thread.loop.wait_for_end(self._thread.detach(self._attached))

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncPool(PoolFace):
    """Pool for a program on an event loop, made by `connect_async`: the same calls, to be awaited.

    Leases are renewed on a thread of the pool, also while the loop of the program is busy.

    >>> import asyncio, kvservice
    >>> async def main():
    ...     async with await kvservice.connect_async(mode="embedded", memory="8MiB") as pool:
    ...         cache = await pool.attach("my-model", kvservice.Layout(block_tokens=16, shape=(4, 64)))
    ...         return cache.is_attached
    >>> asyncio.run(main())
    True
    """

    async def attach(
        self,
        model: str,
        layout: Layout,
        *,
        identity: Mapping[str, object] | None = None,
        namespace: str = NAMESPACE,
        verify: Verify = "sampled",
    ) -> AsyncCache:
        """See Pool.attach."""
        made: list[AttachedModel] = []
        work = self._thread.attach(model, layout, identity or {}, namespace, verify, made)
        try:
            return AsyncCache(self._thread, await self._thread.loop.wait_async(work))
        except asyncio.CancelledError:
            self._thread.drop(made)
            raise

    async def explain(self, request_id: str) -> RequestExplanation:
        """See Pool.explain."""
        return await self._thread.loop.wait_async(self._thread.explain(request_id))

    async def close(self) -> None:
        """See Pool.close."""
        with contextlib.suppress(InvalidRequest):  # closed meanwhile
            await self._thread.loop.wait_async(self._thread.close())
        # It waits for calls that other threads make for the pool. The threads of the program may all be busy.
        await in_thread(self._thread.loop.stop, DaemonThreads("kvservice-close"))

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncCache(CacheFace):
    """Cache for a program on an event loop: the same calls, to be awaited. A Hit is the same, and never blocks.

    >>> import asyncio, kvservice, numpy
    >>> async def main():
    ...     async with await kvservice.connect_async(mode="embedded", memory="8MiB") as pool:
    ...         cache = await pool.attach("my-model", kvservice.Layout(block_tokens=4, shape=(3,)))
    ...         await cache.put(range(8), numpy.ones((2, 3), "float32"))
    ...         async with await cache.get(range(8)) as hit:
    ...             return float(hit.copy().sum())
    >>> asyncio.run(main())
    6.0
    """

    async def get(
        self,
        tokens: Tokens,
        *,
        start: int = 0,
        salt: str = "",
        timeout: float = TIMEOUT_SECONDS,
        request_id: str = "",
    ) -> Hit:
        """See Cache.get."""
        return await self._thread.loop.wait_async(self._attached.get(tokens, start, salt, timeout, request_id))

    async def put(self, tokens: Tokens, arrays: Arrays, *, start: int = 0, salt: str = "") -> PutResult:
        """See Cache.put."""
        return await self._thread.loop.wait_async(self._attached.put(tokens, arrays, start, salt))

    async def warm(
        self, tokens: Tokens, *, salt: str = "", timeout: float = TIMEOUT_SECONDS, hold: float = HOLD_SECONDS
    ) -> int:
        """See Cache.warm."""
        return await self._thread.loop.wait_async(self._attached.warm(tokens, salt, timeout, hold))

    async def close(self) -> None:
        """See Cache.close."""
        with contextlib.suppress(InvalidRequest):  # closed meanwhile
            await self._thread.loop.wait_async(self._thread.detach(self._attached))

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
