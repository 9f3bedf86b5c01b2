"""One simulated node: the real block store (slots, admission, eviction) without bytes, driven as a shard drives it.

The shard adds leases, deadlines, single flight and digests. They change nothing here, where everything takes no time:
`tests/unit/replay` plays one trace through both and compares. Nothing blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvservice.core.acquire.sources import longest_run
from kvservice.core.actions import Action, Announce, Retract
from kvservice.core.block.keys import span_route
from kvservice.core.block.tenants import NOBODY
from kvservice.core.directory.directory import Directory
from kvservice.core.messages import Holder
from kvservice.core.store.admission import Admission
from kvservice.core.store.blocks import NO_KEY, Want
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.replay.tiers import PAYLOAD_BYTES, ChainPlace, ReplayTier, store_of
from kvservice.units import BlockKey, BootEpoch, NodeId

WRITER = b"engine".ljust(16, b".")
STORE_BATCH = 64  # Blocks that are reserved and sealed together. An engine also does it in steps.
FAR = 1e18  # Seconds, later than any trace ends: simulated nodes need no heartbeat.


class Hits(NamedTuple):
    """Blocks of one prompt that were found, by where they were."""

    local: int
    remote: int
    disk: int = 0
    objects: int = 0


class ReplayNode:
    """One node. `directory` is shared with the other nodes; None means that this node is alone. `disk` is its own,
    `objects` is shared."""

    def __init__(
        self,
        name: str,
        capacity: int,
        policy: EvictionPolicy,
        directory: ReplayDirectory | None = None,
        disk: ReplayTier | None = None,
        objects: ReplayTier | None = None,
    ) -> None:
        assert capacity > 0
        self.holder = Holder(NodeId(name), f"{name}:1", BootEpoch(1))
        self.counters: Counter[str] = Counter()
        self._directory = directory
        self._disk = disk
        self._tiers = [tier for tier in (disk, objects) if tier is not None]
        self._objects = objects
        self._now = 0.0
        self._actions: list[Action] = []
        self._places: dict[BlockKey, ChainPlace] = {}  # of what memory holds, as far as a tier may want it
        self._store = store_of(capacity, policy, self._act)
        self._admission = Admission(lambda: capacity, self.counters)
        self._actions.clear()
        if directory is not None:
            directory.join(self)

    def __len__(self) -> int:
        return len(self._store)

    def serve(self, keys: tuple[BlockKey, ...], now: float) -> Hits:
        """Serve one prompt: acquire the part of its prefix that exists, store the rest."""
        self._now = now
        self._store.policy.touch(keys, now)
        self._admission.on_acquire(0, NOBODY, keys)
        for tier in self._tiers:
            tier.touch(keys, now)
        held: dict[int, BlockKey] = {}
        for index, key in enumerate(keys):
            self._pin(index, key, held)
        local = next((index for index in range(len(keys)) if index not in held), len(keys))
        self._write("reused", [key for key in held.values() if key in self._places], now)
        brought: Counter[str] = Counter()
        if local < len(keys):
            self._complete(keys, held, brought, now)
        end = next((index for index in range(local, len(keys)) if index not in held), len(keys))
        self._admission.on_answer(0, end)
        for key in held.values():
            block = self._store.get(key)
            assert block is not None
            self._store.unpin((block.slot,))
        self._keep(keys, end, now)
        self._announce(now)
        found = Hits(end - brought.total(), brought["peer"], brought["disk"], brought["objects"])
        self.counters.update(asked=len(keys), local_hits=found.local, remote_hits=found.remote)
        return found

    def lend(self, keys: Sequence[BlockKey], now: float) -> int:
        """Pin blocks for another node that reads them, from the disk too. Returns how many of them, from the first on,
        are here. They stay until `take_back`."""
        self._now = now
        self._store.policy.touch(tuple(keys), now)
        if self._disk is not None:
            self._disk.touch(tuple(keys), now)
        lent: list[BlockKey] = []
        for key in keys:
            if key not in self._store and not self._bring_back(self._disk, key, now):
                break
            block = self._store.get(key)
            assert block is not None
            self._store.pin((block.slot,))
            lent.append(key)
        self._admission.on_peer_read(len(lent))
        self._write("reused", [key for key in lent if key in self._places], now)
        self._announce(now)
        return len(lent)

    def take_back(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            block = self._store.get(key)
            assert block is not None
            self._store.unpin((block.slot,))

    def _pin(self, index: int, key: BlockKey, held: dict[int, BlockKey]) -> bool:
        block = self._store.get(key)
        if block is not None:
            self._store.pin((block.slot,))
            held[index] = key
        return block is not None

    def _complete(
        self, keys: tuple[BlockKey, ...], held: dict[int, BlockKey], brought: Counter[str], now: float
    ) -> None:
        """Bring every missing block up to the first one that is nowhere: from the own disk, else from another node,
        else from the object store. The shard does so on fast links and disks; see core.acquire.acquisitions."""
        holders = self._directory.holders(keys, self.holder, now) if self._directory is not None else {}
        sources: dict[int, ReplayTier | None] = {}  # None: other nodes
        for index, key in enumerate(keys):
            if index in held:
                continue
            if self._disk is not None and key in self._disk:
                sources[index] = self._disk
            elif index in holders:
                sources[index] = None
            elif self._objects is not None and key in self._objects:
                sources[index] = self._objects
            else:
                break
        wanted, start = list(sources), 0
        while start < len(wanted):
            source = sources[wanted[start]]
            end = next((i for i in range(start, len(wanted)) if sources[wanted[i]] is not source), len(wanted))
            if source is None:
                done = self._fetch(wanted[start:end], keys, holders, held, now)
                brought["peer"] += done
            else:
                done = 0
                while done < end - start and self._bring_back(source, keys[wanted[start + done]], now):
                    self._pin(wanted[start + done], keys[wanted[start + done]], held)
                    done += 1
                brought[source.name] += done
            if done < end - start:
                return
            start = end

    def _bring_back(self, tier: ReplayTier | None, key: BlockKey, now: float) -> bool:
        if tier is None or key not in tier:
            return False
        slots = self._store.reserve(1, NO_KEY, Want(PAYLOAD_BYTES, now)).slots
        if not slots or key not in tier:  # the room was made by writing down, which made room in the tier
            for slot in slots:
                self._store.abort(slot)
            return False
        place = tier.take(key)
        self._places[key] = place
        self._store.seal(slots[0], key, place.parent, place.position, place.route, 0, now, is_secondary=False)
        return True

    def _fetch(
        self,
        wanted: list[int],
        keys: tuple[BlockKey, ...],
        holders: dict[int, tuple[Holder, ...]],
        held: dict[int, BlockKey],
        now: float,
    ) -> int:
        """Fetch these blocks from other nodes, as core.acquire.acquisitions does on a fast link. Returns how many."""
        assert self._directory is not None
        start = fetched = 0
        while start < len(wanted):
            source, end = longest_run(wanted, start, holders, holders[wanted[start]])
            indices = wanted[start:end]
            names = [keys[index] for index in indices]
            lender = self._directory.node(source)
            lent = lender.lend(names, now)
            slots = self._store.reserve(lent, NO_KEY, Want(PAYLOAD_BYTES, now)).slots
            for index, slot in zip(indices, slots, strict=False):
                parent = keys[index - 1] if index else None
                self._store.seal(slot, keys[index], parent, index, span_route(keys, index), 0, now, is_secondary=True)
                self._pin(index, keys[index], held)
                fetched += 1
            lender.take_back(names[:lent])
            if len(slots) < len(indices):
                break
            start = end
        return fetched

    def _keep(self, keys: tuple[BlockKey, ...], start: int, now: float) -> None:
        """Store the blocks that the engine computed."""
        for first in range(start, len(keys), STORE_BATCH):
            indices = range(first, min(first + STORE_BATCH, len(keys)))
            slots = self._store.reserve(len(indices), WRITER, Want(PAYLOAD_BYTES, now)).slots
            self.counters["not_reserved"] += len(indices) - len(slots)
            for index, slot in zip(indices, slots, strict=False):
                if keys[index] in self._store:  # the block lies behind a gap in the prefix
                    self._store.abort(slot)
                else:
                    place = ChainPlace(keys[index], keys[index - 1] if index else None, index, span_route(keys, index))
                    if self._tiers:
                        self._places[place.key] = place
                    self._store.seal(slot, place.key, place.parent, index, place.route, 0, now, is_secondary=False)
                    self._write("stored", [place.key], now)
            if len(slots) < len(indices):
                return

    def _write(self, moment: str, keys: list[BlockKey], now: float) -> None:
        """Write blocks of memory into the tiers that take them at this moment, unless nothing comes back."""
        for tier in self._tiers:
            if tier.write == moment:
                for key in keys:
                    if self._admission.admits(NOBODY):
                        tier.put(self._places[key], now)
                    else:
                        self.counters["not_admitted"] += key not in tier

    def _act(self, action: Action) -> None:
        self._actions.append(action)
        if isinstance(action, Retract) and action.key in self._places:
            self._write("evicted", [action.key], self._now)
            del self._places[action.key]

    def _announce(self, now: float) -> None:
        """Tell the directory what came and what went. What an own disk holds has not gone."""
        if self._directory is not None:
            changed = [action.key for action in self._actions if isinstance(action, Announce | Retract)]
            changed += self._disk.changed if self._disk is not None else []
            words = {key: key in self._store or (self._disk is not None and key in self._disk) for key in changed}
            self._directory.tell(self.holder, words, now)
        for tier in self._tiers:
            tier.changed.clear()
        self._actions.clear()

    def counted(self) -> dict[str, int]:
        return dict(self.counters + self._store.counters)

    def check_invariants(self) -> None:
        self._store.check_invariants()
        for tier in self._tiers:
            tier.check_invariants()


class ReplayDirectory:
    """All lookup partitions as one directory that learns of every change at once."""

    def __init__(self) -> None:
        self.directory = Directory(hide_seconds=FAR, forget_seconds=2 * FAR)
        self._nodes: dict[NodeId, ReplayNode] = {}
        self._sequences: Counter[NodeId] = Counter()

    def join(self, node: ReplayNode) -> None:
        self._nodes[node.holder.node_id] = node
        self._sequences[node.holder.node_id] = 1
        self.directory.apply(node.holder, 1, full_begin=True, full_end=True, now=0.0)

    def node(self, holder: Holder) -> ReplayNode:
        return self._nodes[holder.node_id]

    def tell(self, holder: Holder, words: dict[BlockKey, bool], now: float) -> None:
        """The last change of each key: True if it was added, False if it was removed."""
        if words:
            self._sequences[holder.node_id] += 1
            added = [key for key, here in words.items() if here]
            removed = [key for key, here in words.items() if not here]
            self.directory.apply(holder, self._sequences[holder.node_id], added, removed, now=now)

    def holders(self, keys: Sequence[BlockKey], asker: Holder, now: float) -> dict[int, tuple[Holder, ...]]:
        """The nodes that hold each block, by its index in the chain, without the asker."""
        found: dict[int, tuple[Holder, ...]] = {}
        for run in self.directory.resolve(keys, now):
            others = tuple(holder for holder in run.holders if holder != asker)
            if others:
                found.update(dict.fromkeys(range(run.start, run.start + run.count), others))
        return found
