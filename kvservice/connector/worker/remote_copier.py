"""Copies in a copy worker's process, or in the engine's own process while there is no worker."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvservice.connector.options import CopierChoice
from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.connector.worker.block_copier import BlockCopier, BlockCopiers
from kvservice.connector.worker.copier import Copier, Done, Ticket, in_process_copier
from kvservice.connector.worker.peer_copy_workers import PeerCopyWorkers, SpreadLoan, lend
from kvservice.connector.worker.shared_kv import SharedKV, region_layout
from kvservice.copying.device import HOST
from kvservice.copying.engine.link import KVOffer, WorkerLink
from kvservice.copying.message import NO_EVENT, CopyRow, Direction, MemoryKind, PoolSource
from kvservice.errors import KVServiceError, UnsupportedDevice, UnsupportedLayout
from kvservice.units import BlockKey, Generation, SlotIndex

log = logging.getLogger("kvservice.connector")


def _no_event() -> int:
    return NO_EVENT


class RemoteCopier:
    """Hands copies to the worker of this engine's device on this node. Runs them itself while there is no worker; loads
    also while the worker has too much to do. `mark` returns the device event that copies must wait for."""

    is_inline = False

    def __init__(
        self,
        link: WorkerLink,
        fallback: Copier,
        mark: Callable[[], int] = _no_event,
        peers: PeerCopyWorkers | None = None,
    ) -> None:
        """`peers` are the workers of other devices, to which blocks are lent too."""
        self._link = link
        self._peers = peers
        self._fallback = fallback
        self._mark = mark
        self._pools = 0
        self._handed = False  # something waits for flush
        self._counters: Counter[str] = Counter()

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        self._fallback.adopt(memory, pool)
        if not pool.node_directory:
            self._counters["copy_worker_absent"] += 1
            log.warning("copies run in the engine's process, because an embedded pool has no copy worker")
            return
        self._pools += 1
        source = PoolSource(self._pools, pool.segment_path, pool.geometry, pool.epoch, pool.layout, pool.engine_id)
        directory = Path(pool.node_directory)
        self._link.follow(directory, source)
        if self._peers is not None:
            self._peers.follow(directory, source)

    def release(self) -> None:
        self._link.leave()
        if self._peers is not None:
            self._peers.leave()
        self._fallback.release()

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        if self._link.is_ready:
            rows = [
                CopyRow(entry.block_id, entry.ref.slot, entry.ref.generation, entry.key, entry.part)
                for entry in entries
            ]
            ticket = self._link.submit(direction, rows, may_borrow=may_borrow)
            if ticket is not None:
                self._handed = True
                self._counters["copy_worker_blocks"] += len(rows)
                return ticket
            if direction is Direction.STORE and self._link.is_ready:
                self._counters["copy_dropped_blocks"] += len(rows)
                return Done(copied=False)  # the worker is behind; a dropped store is only a later miss
        self._counters["copy_in_process_blocks"] += len(entries)
        return self._fallback.run(direction, entries)

    def flush(self) -> None:
        self._fallback.flush()
        if self._handed:
            self._handed = False
            self._link.flush(self._mark())

    def lend(self, blocks: Sequence[tuple[int, BlockKey]]) -> SpreadLoan | None:
        rows = [CopyRow(block_id, SlotIndex(0), Generation(0), key) for block_id, key in blocks]
        others = [] if self._peers is None else self._peers.links()
        links = [link for link in (self._link, *others) if link.is_ready]
        return lend(links, rows, self._mark()) if links else None

    def take_counters(self) -> dict[str, int]:
        counters, self._counters = self._counters, Counter()
        counters.update(self._link.take_counters())
        counters.update(self._fallback.take_counters())
        if self._peers is not None:
            counters.update(self._peers.take_counters())
        return dict(counters)

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        self._link.close()
        self._fallback.close()


def copier_for(
    choice: CopierChoice,
    block_copier: BlockCopier,
    layers: Sequence[torch.Tensor],
    heads: range,
    shared: SharedKV | None,
    *,
    lends: bool = False,
) -> Copier:
    """The copier of this engine. If a worker cannot be used, the reason is logged once and counted. With `lends` it
    lends blocks, which engines of the node's other devices can use as well."""
    fallback = in_process_copier(block_copier, is_fallback=choice is CopierChoice.WORKER)
    if choice is not CopierChoice.WORKER:
        return fallback
    try:
        if block_copier.device.type == "cuda":
            if torch.version.hip is not None:
                raise UnsupportedDevice("a copy worker needs CUDA, and this engine runs on ROCm", device="rocm")
            from kvservice.copying.cuda.offer import CudaOffer  # loads the driver

            offer = CudaOffer(layers[0], lambda address, size: region_layout(layers, heads, address, size))
            made, mark = offer.offer, offer.mark
        else:
            made, mark = _host_offer(layers, heads, shared), _no_event
        return RemoteCopier(WorkerLink(made), fallback, mark, PeerCopyWorkers(made) if lends else None)
    except KVServiceError as error:
        log.warning("copies run in the engine's process: %s", error.message)
        fallback.counters["copy_worker_not_shared"] += 1
        return fallback


def copier_for_groups(choice: CopierChoice, block_copiers: BlockCopiers) -> Copier:
    """The copier for a model of several KV cache groups. A worker knows only one layout, so copies run in the engine's
    process."""
    copier = in_process_copier(block_copiers)
    if choice is CopierChoice.WORKER:
        log.warning("copies run in the engine's process, because a copy worker cannot copy several KV cache groups")
        copier.counters["copy_worker_not_shared"] += 1
    return copier


def _host_offer(layers: Sequence[torch.Tensor], heads: range, shared: SharedKV | None) -> KVOffer:
    """How the KV cache is offered to a worker. Raises UnsupportedLayout if it is not in shared memory."""
    memory = None if shared is None else shared.memory
    if memory is None:
        raise UnsupportedLayout("the engine did not allocate its KV cache in memory that can be shared")
    layout = region_layout(layers, heads, memory.address, memory.byte_count)
    fields = {"kind": MemoryKind.MEMFD.value, "bytes": memory.byte_count}
    return KVOffer(HOST, fields, layout.fields(), memory.descriptor)
