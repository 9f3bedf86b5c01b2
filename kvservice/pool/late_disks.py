"""Disks that did not answer as their pool started: what lies beside one is read before its blocks are used.

Runs on the pool's loop. A pool that starts beside its disk does the same first of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvservice.aio import DaemonThreads, in_thread
from kvservice.core.store.freshness import Freshness
from kvservice.pool.clears import PoolClears
from kvservice.pool.mark_files import MarkFiles
from kvservice.pool.name_files import NameFiles
from kvservice.pool.tier_specs import TierSpec, marks_beside, names_beside


class LateDisks:
    """`mark_files` and `name_files` are those of the pool, which has `specs` as its tiers."""

    def __init__(
        self,
        specs: Sequence[TierSpec],
        freshness: Freshness,
        clears: PoolClears,
        mark_files: MarkFiles,
        name_files: NameFiles,
    ) -> None:
        self._waiting = {spec.name: spec for spec in specs if spec.is_late}
        self._freshness = freshness
        self._clears = clears
        self._mark_files = mark_files
        self._name_files = name_files

    async def join(self, name: str) -> None:
        """Learn what was cleared and what engines called the blocks, and keep both beside the disk from now on. Nothing
        is done for a tier that is no late disk. Raises Unavailable, with `transient`, while the marks cannot be kept:
        until then nothing of the disk may be used."""
        spec = self._waiting.get(name)
        if spec is None:
            return
        there = [replace(spec, unusable="")]
        (marks,), (names,) = marks_beside(there), names_beside(there)
        threads = DaemonThreads(f"kvservice-join-{name}")  # it may hang again
        self._freshness.learn(await in_thread(NameFiles([names]).load, threads))
        found = await in_thread(MarkFiles([marks]).load, threads)
        self._name_files.add(names)
        await self._name_files.keep(self._freshness.names())
        self._mark_files.add(marks, spec.unusable)  # no sooner: a clear writes what is known over what lies there
        await self._clears.learn(found)
        del self._waiting[name]
