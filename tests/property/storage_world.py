"""Nodes with real memory, disks and one store of objects, all in this process, beside a dictionary that knows what each
may give. Killing a node is to go on from a copy of its files at some moment."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import block_keys, chain_hashes, span_route, tenant_key
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.block.tenants import TenantLimits
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, EngineSpec, SealItem, WarmRequest
from kvservice.core.segment.geometry import PAGE_BYTES, Geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import Exhausted
from kvservice.memory.liveness import LivenessLock, hold
from kvservice.memory.segment import Segment
from kvservice.pool.coders import Coders
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.pool.tier_specs import DISK, OBJECTS, TierSpec
from kvservice.pool.tiers import TierPhase
from kvservice.testing.eventually import eventually_async
from kvservice.tier.file_io import VectoredIO
from kvservice.units import BlockKey, MiB, NodeId, align_up

MODELS = {"small": 20_000, "mid": 65_536, "big": 300_001}  # bytes of a block: of whole pages, and not
NAMESPACES = {"small": "a", "mid": "a/b", "big": ""}  # of the engines of each model
CLEARED = {"a": ("small", "mid"), "a/b": ("mid",), "": ("big",)}  # the models that a clear of a namespace reaches
TENANTS = ("acme", "bolt")
GEOMETRIES = (Geometry(MiB, 6), Geometry(MiB, 4), Geometry(2 * MiB, 3))
PROMPTS, LENGTH, TOKENS = 2, 6, 16  # prompts of each model and tenant, their blocks, tokens of a block
CALL_SECONDS = 30.0  # for any call on a busy machine; what takes longer hangs
QUOTA = 2 * MiB
PAST_SECONDS = 2000.0  # the nodes' clocks are late by this: files are never older than what is in them
SKEW_SECONDS = 6.0  # more than clocks may differ by: what is stored so long after a clear counts everywhere

Moment = Literal["evicted", "stored", "reused"]
Prompt = tuple[str, str, int]  # model, tenant, number


def spec_of(model: str) -> EngineSpec:
    fingerprint = Fingerprint.of({"model": model, "dtype": "uint8"})
    return EngineSpec(os.urandom(16), model, fingerprint, SlotLayout(1, 1, MODELS[model], TOKENS), NAMESPACES[model])


def keys_of(model: str, tenant: str, number: int) -> tuple[BlockKey, ...]:
    hashes = chain_hashes(range(TOKENS * LENGTH), TOKENS, str(number).encode())
    return tuple(block_keys(spec_of(model).fingerprint.digest, hashes, tenant_key(b"a secret", tenant)))


KEYS: dict[Prompt, tuple[BlockKey, ...]] = {
    (model, tenant, number): keys_of(model, tenant, number)
    for model in MODELS
    for tenant in TENANTS
    for number in range(PROMPTS)
}


def content(key: BlockKey, version: int, size: int) -> bytes:
    """The bytes of a block as it was computed after so many clears. They say whose they are."""
    name = key + version.to_bytes(8, "big")
    seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "big")
    return name + np.random.default_rng(seed).bytes(size - len(name))


@dataclass
class Engine:
    attachment: Attachment
    spec: EngineSpec
    memory: Segment
    lock: LivenessLock


class StorageNode:
    def __init__(self, world: StorageWorld, name: str) -> None:
        self.name = name
        self._world = world
        self._lives = 0
        self.folder = world.root / f"{name}.0"
        self.folder.mkdir()
        self.draw_settings()
        self.pool: PoolRuntime
        self.engines: dict[tuple[str, str], Engine] = {}
        self.pins: dict[tuple[str, str], tuple[Prompt, int]] = {}  # by tenant and name: how many blocks of what

    def draw_settings(self) -> None:
        """Those that an operator may change between two starts."""
        drawn = self._world.random
        self.codec = drawn.choice(["none", "none", "aesgcm"])
        self.disk_bytes = drawn.choice([400_000, 64 * MiB])
        self.moments: list[Moment] = drawn.choices(["stored", "evicted", "reused"], [3, 2, 1], k=2)
        self.geometry = drawn.choice(GEOMETRIES)

    async def open(self) -> None:
        world, moments = self._world, self.moments
        coders = Coders()
        coders.keys.set_tenants({tenant: tenant.encode() * 8 for tenant in TENANTS})
        disk = TierSpec(DISK, str(self.folder / "disk"), self.disk_bytes, moments[0], self.codec, io="buffered")
        objects = TierSpec(OBJECTS, f"file://{world.store}", 0, moments[1], self.codec, "shared")
        config = PoolConfig(
            NodeId(self.name),
            self.folder / "segment",
            self.geometry,
            directory=self.folder,
            tenants={tenant: TenantLimits(QUOTA) for tenant in TENANTS},
            tiers=(disk, objects),
            coders=coders,
            mark_files=(self.folder / "marks", self.folder / "disk.marks"),
            name_files=(self.folder / "disk.names",),
            wall_clock=world.wall,
        )
        self.pool = await asyncio.wait_for(PoolRuntime.open(config), CALL_SECONDS)
        self.pins = {}
        await eventually_async(self.has_tiers, f"the tiers of {self.name}", CALL_SECONDS)

    def has_tiers(self) -> bool:
        return all(tier.phase is TierPhase.OPEN for tier in self.pool.tier_states())

    async def engine(self, model: str, tenant: str) -> Engine:
        if (model, tenant) not in self.engines:
            spec = spec_of(model)
            made = await self.pool.attach(spec, lambda reason: None, tenant)
            memory = Segment.attach(Path(made.segment_path), made.geometry)
            self.engines[model, tenant] = Engine(made, spec, memory, hold(memory, spec.engine_id, made.epoch))
        return self.engines[model, tenant]

    async def close(self) -> None:
        await asyncio.wait_for(self.pool.close(), CALL_SECONDS)
        for engine in self.engines.values():
            engine.lock.release()
            engine.memory.close()
        self.engines = {}

    async def end(self, *, is_killed: bool, keeps_memory: bool) -> None:
        """Close, or go on from a copy of what lies in the files at this moment."""
        if is_killed:
            old, self._lives = self.folder, self._lives + 1
            copied = self._world.root / f"{self.name}.{self._lives}"
            with contextlib.suppress(shutil.Error):  # a file that was renamed meanwhile
                shutil.copytree(old, copied)
            await self.close()
            self.folder = copied
            shutil.rmtree(old, ignore_errors=True)  # its threads may still write
        else:
            await self.close()
        if not keeps_memory:
            (self.folder / "segment").unlink()

    def found(self) -> int:
        """How many blocks this start took from the disk; others may have replaced them since."""
        return self.pool.stats().counters.get("tier_disk_found", 0)

    def fresh_on_disk(self) -> list[TierBlock]:
        """What the next start may take from the disk."""
        state, now = self.pool.state, self.pool.now()
        fresh = state.freshness

        def is_fresh(block: TierBlock) -> bool:
            account = state._store.accounts.account_of(block.account_tag)
            return fresh.accepts(fresh.scopes(block.key, account, block.fingerprint), block.stored_at, now)

        return [block for block in state._tiers.blocks() if is_fresh(block)]

    def files(self) -> list[Path]:
        return sorted((self.folder / "disk").rglob("*.safetensors"))

    async def quiet(self) -> None:
        """Wait until nothing is on its way, and hold what the node says against what there is."""
        pool = self.pool
        assert pool.fenced is None

        def is_idle() -> bool:
            tiers = pool.state.tier_usage()
            rest = [tier.writing_bytes + tier.reading_bytes for tier in tiers]
            rest += [0 if self._world.is_full else tier.waiting for tier in tiers]
            return not any(rest) and not pool.state.slot_counts().get("writing")

        await eventually_async(is_idle, f"{self.name} to be quiet", CALL_SECONDS)
        pool.state.check_invariants()
        stats = pool.stats()
        assert stats.counters["pins"] == len(self.pins)
        assert stats.counters["pinned_bytes"] == sum(count * MODELS[what[0]] for what, count in self.pins.values())
        assert all(tenant.used_bytes <= QUOTA for tenant in stats.tenants)
        (disk,) = [tier for tier in stats.tiers if tier.name == DISK]
        assert disk.used_bytes <= disk.budget_bytes == self.disk_bytes

        def is_told() -> bool:  # what was evicted or cleared is erased soon after
            known = {block.key.hex() for block in pool.state._tiers.blocks()}
            files = {path.stem for path in self.files()}
            drafts = list((self.folder / "disk" / "new").iterdir())
            takes = sum(align_up(path.stat().st_size, PAGE_BYTES) for path in self.files())
            is_right = files == known and takes == pool.state.tier_usage()[0].used_bytes
            return not drafts and (is_right or self._world.harms)

        await eventually_async(is_told, f"the books of {self.name} to be right", CALL_SECONDS)


class StorageWorld:
    """Everything is drawn from the seed."""

    def __init__(self, seed: int, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.random = root, random.Random(seed)
        self.store = root / "store"
        self.store.mkdir()
        self.nodes = [StorageNode(self, f"n{number}") for number in range(2)]
        self.least: Counter[BlockKey] = Counter()  # the version that is computed now; no other may be given
        self.seen: dict[str, bytes] = {}  # what lay in files, by their names
        self.counts: Counter[str] = Counter()
        self.harms = self.random.random() < 0.6  # whether somebody else changes files
        self.is_full = False
        self._later = -PAST_SECONDS
        self._write = VectoredIO.write
        patch.setattr(VectoredIO, "write", lambda io, descriptor, parts: self._fill(io, descriptor, parts))

    def wall(self) -> float:
        return time.time() + self._later

    def _fill(self, io: VectoredIO, descriptor: int, parts: Sequence[memoryview]) -> None:
        if self.is_full:
            os.pwrite(descriptor, b"x" * 100, 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._write(io, descriptor, parts)

    def any_prompt(self) -> tuple[Prompt, int]:
        return self.random.choice(list(KEYS)), self.random.randint(1, LENGTH)

    # -- steps ----

    async def load(self, node: StorageNode) -> tuple[Engine, Prompt, int, int]:
        """Returns what was asked for, and how many blocks came."""
        what, count = self.any_prompt()
        engine = await node.engine(*what[:2])
        ask = node.pool.acquire(engine.attachment.attachment_id, AcquireRequest(KEYS[what][:count], 0, 5.0))
        got = await asyncio.wait_for(ask, CALL_SECONDS)
        self._check(engine, what, got)
        pinned = max([held for prompt, held in node.pins.values() if prompt == what], default=0)
        assert len(got.blocks) >= min(pinned, count), "what is pinned is not there"
        if got.lease_id:
            await node.pool.release(engine.attachment.attachment_id, [got.lease_id])
        self.counts["tier"] += got.tier_count
        return engine, what, count, len(got.blocks)

    def _check(self, engine: Engine, what: Prompt, got: AcquireResult) -> None:
        size = MODELS[what[0]]
        for ref, key in zip(got.blocks, KEYS[what], strict=False):
            header, data = engine.memory.read_header(ref.slot), bytes(engine.memory.payload(ref.slot, size))
            assert header is not None and (header.generation, header.key) == (ref.generation, key)
            assert data[:16] == key, "the bytes of another block"
            assert int.from_bytes(data[16:24], "big") == self.least[key], "what was cleared came back"
            assert data == content(key, self.least[key], size), "wrong bytes"

    async def save(self, node: StorageNode) -> None:
        """Compute and store what is missing."""
        engine, what, count, start = await self.load(node)
        me, keys, size = engine.attachment.attachment_id, KEYS[what], MODELS[what[0]]
        refs = await node.pool.reserve(me, count - start) if count > start else []
        items = []
        for position, ref in enumerate(refs, start):
            key = keys[position]
            engine.memory.payload(ref.slot, size)[:] = content(key, self.least[key], size)
            parent = keys[position - 1] if position else None
            items.append(SealItem(ref, key, parent, position, span_route(keys, position)))
        if items:
            await asyncio.wait_for(node.pool.seal(me, items), CALL_SECONDS)

    async def together(self, node: StorageNode) -> None:
        await asyncio.gather(self.load(node), self.save(node), self.load(self.random.choice(self.nodes)))

    async def pin(self, node: StorageNode) -> None:
        what, count = self.any_prompt()
        name = what[1], f"pin{self.random.randrange(2)}"
        digest = (await node.engine(*what[:2])).spec.fingerprint.digest
        node.pins.pop(name, None)
        with contextlib.suppress(Exhausted):
            result = await node.pool.warm(WarmRequest(digest, KEYS[what][:count], 5.0, 0.0, name[1]), what[1])
            if result.held:
                node.pins[name] = what, result.held

    async def unpin(self, node: StorageNode) -> None:
        for (tenant, name), (what, count) in list(node.pins.items())[:1]:
            ended = await node.pool.unpin(name, tenant)
            assert ended is not None and (ended.blocks, ended.bytes) == (count, count * MODELS[what[0]])
            del node.pins[tenant, name]

    async def clear(self, node: StorageNode) -> None:
        what, count = self.any_prompt()
        wall, space = self.wall(), self.random.choice([*CLEARED])

        def of(is_gone: Callable[[Prompt], bool]) -> set[BlockKey]:
            return {key for prompt in KEYS if is_gone(prompt) for key in KEYS[prompt]}

        mark, goes = self.random.choice(
            [
                (Mark(MarkKind.EVERYTHING, wall), of(lambda prompt: True)),
                (Mark(MarkKind.TENANT, wall, what[1]), of(lambda prompt: prompt[1] == what[1])),
                (Mark(MarkKind.MODEL, wall, what[0]), of(lambda prompt: prompt[0] == what[0])),
                (Mark(MarkKind.NAMESPACE, wall, space), of(lambda prompt: prompt[0] in CLEARED[space])),
                (Mark(MarkKind.PROMPT, wall, "", KEYS[what][:count]), set(KEYS[what][:count])),
            ]
        )
        for each in self.nodes:
            await asyncio.wait_for(each.pool.clears.clear([mark]), CALL_SECONDS)
            pins = each.pins.items()
            each.pins = {name: (of, held) for name, (of, held) in pins if goes.isdisjoint(KEYS[of][:held])}
        self.least.update(goes)
        self._later += SKEW_SECONDS if self.random.random() < 0.8 else 0.0

    async def restart(self, node: StorageNode) -> None:
        is_killed, is_changed = self.random.random() < 0.5, self.random.random() < 0.3
        if not is_killed and not is_changed and not self.harms:
            await node.quiet()
            kept = node.fresh_on_disk()
        else:
            kept = []
        await node.end(is_killed=is_killed, keeps_memory=self.random.random() < 0.5)
        self.is_full = False
        if self.harms and self.random.random() < 0.3:
            (node.folder / "disk" / "index").unlink(missing_ok=True)
        if is_changed:
            node.draw_settings()
        await node.open()
        if kept:
            self.counts["kept"] += len(kept)
            await eventually_async(lambda: node.found() == len(kept), "what lay on the disk is found", CALL_SECONDS)

    async def fill_up(self, node: StorageNode) -> None:
        self.is_full = not self.is_full

    async def harm(self, node: StorageNode) -> None:
        """Files and objects are cut, changed, removed, mixed up, or again what they were."""
        files = [*node.files(), *sorted(self.store.rglob("*.safetensors"))] if self.harms else []
        for path in self.random.sample(files, min(len(files), 3)):
            with contextlib.suppress(FileNotFoundError):
                data = bytearray(path.read_bytes())
                place = self.random.randrange(min(len(data), 2 * 4096) or 1)
                flipped = bytes([*data[:place], data[place] ^ 1]) + data[place + 1 :] if data else b""
                old, others = self.seen.get(path.name, b""), list(self.seen.values())
                change = self.random.choice([data[:place], flipped, None, old, self.random.choice([old, *others])])
                self.seen[path.name] = bytes(data)
                if change is None:
                    path.unlink()
                else:
                    path.write_bytes(change)

    async def quiet(self, node: StorageNode) -> None:
        await node.quiet()
