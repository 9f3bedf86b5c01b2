"""Which nodes hold which blocks, and what the nodes are like: the router's clients of the lookup service and the
shards.

Everything runs on the router's event loop, except finding the service, which may block and runs in a thread. Nothing
here raises if the service is away. Nodes are asked only while there are requests, and no request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from kvservice.actors import names
from kvservice.aio import end_tasks, to_its_end
from kvservice.auth.tls import TlsFiles, open_tls
from kvservice.auth.token import Token
from kvservice.client.engine_stats import EngineStatsReader, NodeEngineStats
from kvservice.config import ServiceConfig, tls_of_environment
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.messages import EngineKind
from kvservice.discovery import find_shards
from kvservice.errors import KVServiceError
from kvservice.lookup.client import LookupAnswer, LookupClient
from kvservice.lookup.mirror_reader import find_mirror
from kvservice.serve.warmer import Warmer
from kvservice.units import BlockKey, NodeId, bracketed

log = logging.getLogger("kvservice.serve")

# For the engine stats of all nodes. Reading them is no part of a request; without an answer the last ones stay.
ENGINE_STATS_SECONDS = 2.0
# Lookup answers that are remembered, one per prompt. Each is good for less than a second, so more would never be used.
ANSWERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """The nodes as they were last read."""

    nodes: Mapping[NodeId, NodeEngineStats]

    def node_of(self, ray_node: str | None, host: str | None) -> NodeId | None:
        """The node whose shard an engine uses: the one that Ray placed on this Ray node, or the only one of the host.
        None if it is not known."""
        if ray_node and names.node_id(ray_node) in self.nodes:  # the service runs on Ray
            return names.node_id(ray_node)
        if ray_node and NodeId(ray_node) in self.nodes:
            return NodeId(ray_node)
        place = bracketed(host or "")
        here = [node for node, found in self.nodes.items() if found.node.peer_address.rpartition(":")[0] == place]
        return here[0] if len(here) == 1 else None

    def engines_at(self, node: NodeId | None, model: str, namespace: str) -> EngineKind | None:
        """The engines of this model on this node. None if there are none, or several fingerprints. Engines other than
        vLLM name their blocks in other ways, so they are left out."""
        if node is None or node not in self.nodes:
            return None
        kinds = tuple(kind for kind in self.nodes[node].stats.engines if kind.fingerprint.engine in ("", "vllm"))
        if namespace:
            kinds = tuple(kind for kind in kinds if kind.namespace == namespace)
        if model:
            kinds = tuple(kind for kind in kinds if kind.model == PurePosixPath(model).name)
        return kinds[0] if len(kinds) == 1 else None

    def seconds_per_token(self, digest: bytes | None) -> float:
        """The mean prefill time that engines with this fingerprint measured, or all engines if `digest` is None. 0 if
        none did."""
        measured = [
            kind.seconds_per_block / kind.layout.block_tokens
            for found in self.nodes.values()
            for kind in found.stats.engines
            if kind.seconds_per_block > 0 and digest in (None, kind.fingerprint.digest)
        ]
        return sum(measured) / len(measured) if measured else 0.0


class Holdings:
    """Asks the lookup service and the shards.

    Args:
        find: returns the lookup addresses in partition order, () if there is no service. May block.
        find_tls: returns the TLS files of the service; called once. May block.
        token: of the tenant whose prompts these are.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[str]],
        find_tls: Callable[[], TlsFiles | None] = lambda: None,
        token: Token | None = None,
        *,
        refresh_seconds: float,
        answer_seconds: float,
        warm_seconds: float = 0.0,
    ) -> None:
        self._find = find
        self._find_tls = find_tls
        self._token = token
        self._refresh_seconds = refresh_seconds
        self._answer_seconds = answer_seconds
        self._lookup: LookupClient | None = None
        self._engine_stats = EngineStatsReader()
        self._warm_seconds = warm_seconds
        self._warmer: Warmer | None = None
        self._answers: BoundedTable[tuple[int, BlockKey], tuple[float, LookupAnswer]] = BoundedTable(ANSWERS_MAX)
        self._calls: set[asyncio.Task[LookupAnswer]] = set()
        self._refreshed_at: float | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self.known = KnownNodes({})
        self.counters: Counter[str] = Counter()

    def wake(self) -> None:
        """Say that there are requests. Starts a refresh if what is known is too old. Returns at once."""
        late = self._refreshed_at is None or time.monotonic() - self._refreshed_at >= self._refresh_seconds
        if late and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.get_running_loop().create_task(self.refresh())

    async def refresh(self) -> None:
        """Find the service and ask its nodes. Keeps what was known if nobody answers. Never raises."""
        try:
            addresses = tuple(await asyncio.to_thread(self._find))
            if addresses:
                await self._connect(addresses)
                found = await self._engine_stats.read(addresses, ENGINE_STATS_SECONDS, self.known.nodes)
                if found is not None:
                    self.known = KnownNodes(found)
                    self.counters["refreshes"] += 1
            else:
                self.counters["no_service"] += 1
        except (KVServiceError, OSError) as error:
            self.counters["refresh_failed"] += 1
            log.debug("refresh failed: %s", error)
        except Exception:  # task boundary: the next refresh may succeed
            self.counters["refresh_crashed"] += 1
            log.exception("refresh_crashed")
        finally:
            self._refreshed_at = time.monotonic()

    @property
    def connected(self) -> bool:
        return self._lookup is not None

    async def resolve(self, keys: Sequence[BlockKey], timeout: float) -> LookupAnswer:
        """Which nodes hold these blocks. An answer is used again for a moment. Answers within `timeout` seconds."""
        if self._lookup is None or not keys:
            return LookupAnswer((), not keys)
        name = (len(keys), keys[-1])  # the last key of a chain stands for the whole chain
        now = time.monotonic()
        known = self._answers.get(name)
        if known is not None and now - known[0] < self._answer_seconds:
            self.counters["answers_reused"] += 1
            return known[1]
        # A caller that gives up must not cancel the call: only a call that reaches its own deadline opens the breaker.
        return await to_its_end(self._ask(self._lookup, name, keys, timeout), self._calls)

    def warm(self, node: NodeId, fingerprint: bytes, keys: Sequence[BlockKey]) -> None:
        """Let this node fetch these blocks before an engine asks for them. Returns at once."""
        known = self.known.nodes.get(node)
        if known is not None and self._warmer is not None:
            self._warmer.warm(known.node.peer_address, fingerprint, keys)

    async def _ask(
        self, lookup: LookupClient, name: tuple[int, BlockKey], keys: Sequence[BlockKey], timeout: float
    ) -> LookupAnswer:
        answer = await lookup.resolve(keys, 0, timeout)
        if answer.complete:
            self._answers.put(name, (time.monotonic(), answer))
        return answer

    async def close(self) -> None:
        if self._refreshing is not None:
            await end_tasks([self._refreshing])
        await asyncio.gather(*self._calls, return_exceptions=True)  # takes no longer than their deadlines
        await self._engine_stats.close()
        if self._warmer is not None:
            await self._warmer.close()
        if self._lookup is not None:
            await self._lookup.close()

    async def _connect(self, addresses: tuple[str, ...]) -> None:
        if self._lookup is None:
            tls = await asyncio.to_thread(self._find_tls)
            self._lookup, self._engine_stats = LookupClient(addresses, tls=tls), EngineStatsReader(tls, self._token)
            self._warmer = Warmer(self._warm_seconds, tls, self._token)
        else:
            self._lookup.set_addresses(addresses)
        mirrored = self._lookup.mirrored
        if not mirrored.has_mirror:
            found = await asyncio.to_thread(find_mirror, addresses)
            if self._lookup is not None and self._lookup.mirrored is mirrored:
                mirrored.set_mirror(found)
            elif found is not None:  # closed meanwhile
                found.close()


def find_lookups(service: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses of the lookup partitions: those given, those from the service's supervisor on Ray, or those from a
    shard of this machine.

    () if there is no service, if there are several and no name is given, or while not all partitions are known. Blocks.
    Raises KVServiceError or OSError.
    """
    if addresses:
        return tuple(addresses)
    import ray

    if ray.is_initialized():
        from kvservice.actors import deploy

        handle = deploy.find(service or ServiceConfig().service)
        known = () if handle is None else handle.lookup_addresses()
        if known:
            return known
    found = {record.lookup_addresses for record in find_shards(service or None) if record.lookup_addresses}
    return found.pop() if len(found) == 1 else ()


def find_tls(service: str) -> TlsFiles | None:
    """The TLS files of KVSERVICE_TLS_DIR, or those that the service on Ray or a shard of this machine was started with.
    None for plaintext. The directory must exist on this machine. Blocks. Raises KVServiceError or OSError."""
    import ray

    directory, _ = tls_of_environment()
    if not directory and ray.is_initialized():
        from kvservice.actors import deploy

        handle = deploy.find(service or ServiceConfig().service)
        directory = "" if handle is None else handle.config()["tls_dir"]
    if not directory:
        directory = next((record.tls_dir for record in find_shards(service or None) if record.tls_dir), "")
    return open_tls(directory)
