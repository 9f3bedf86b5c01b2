"""Which stored blocks the engine's events have told of, so that the last event of each block is the truth.

A block is told as stored when the pool has answered that it is there, and as removed when it has gone since. Used on
the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kvservice.connector.scheduler.known_keys import KNOWN_KEYS_MAX
from kvservice.connector.scheduler.ports import StoredBlock
from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.messages import SealItem
from kvservice.session.news import BlockNews
from kvservice.units import BlockHash, BlockKey

# Seconds. An answer of the pool that has not come by then no longer keeps an idle engine stepping.
ANSWER_SECONDS_MAX = 30.0


class ToldBlocks:
    def __init__(self) -> None:
        self._sent: dict[BlockKey, list[StoredBlock]] = {}  # to be sealed and not told, in the order of sending
        self._sent_at = 0.0  # the last of them
        self._here: set[BlockKey] = set()  # those of them that the pool has
        self._told: dict[BlockKey, list[BlockHash]] = {}  # as stored and not as removed, oldest first
        self._dropped: list[BlockHash] = []  # told and no longer followed

    def sent(self, items: Sequence[SealItem], blocks: Sequence[StoredBlock], now: float) -> None:
        """These slots are sent to be sealed. `blocks` are the engine's blocks in those of the first KV cache group, in
        the order of the slots and as many in each."""
        first_group = [item.key for item in items if item.position < WINDOW_BIT]
        of_each = len(blocks) // max(len(first_group), 1)
        for index, key in enumerate(first_group if of_each else ()):
            self._sent[key] = list(blocks[index * of_each : (index + 1) * of_each])
        self._sent_at = now

    def take(self, news: BlockNews) -> tuple[list[BlockHash], list[StoredBlock]]:
        """What is to be told now: first the blocks that are removed, then those that are stored."""
        gone, self._dropped = self._dropped, []
        if news.all_gone:
            gone += self._forget()
        for key in news.removed:
            if key in self._here:  # else one that is sent is on its way again
                self._drop(key)
            gone += self._told.pop(key, ())
        for key, is_here in news.answered.items():
            if not is_here:
                self._drop(key)
                gone += self._told.pop(key, ())
            elif key in self._sent:
                self._here.add(key)
        return gone, self._stored() if self._here else []

    def _stored(self) -> list[StoredBlock]:
        """The blocks to tell. One whose parent is still to be told waits: an indexer may drop a block without one."""
        stored: list[StoredBlock] = []
        waiting: set[BlockHash] = set()
        for key, blocks in list(self._sent.items()):
            if key not in self._here or blocks[0].parent in waiting:
                waiting.update(block.block_hash for block in blocks)
                continue
            self._drop(key)
            stored += blocks
            self._told[key] = [block.block_hash for block in blocks]
        while len(self._told) > KNOWN_KEYS_MAX:
            self._dropped += self._told.pop(next(iter(self._told)))
        return stored

    def reset(self) -> None:
        """The engine's weights changed: what was stored before is not told any more, and was removed."""
        self._sent.clear()
        self._dropped += self._forget()

    def _drop(self, key: BlockKey) -> None:
        self._sent.pop(key, None)
        self._here.discard(key)

    def _forget(self) -> list[BlockHash]:
        for key in list(self._here):
            self._drop(key)
        told, self._told = self._told, {}
        return list(chain.from_iterable(told.values()))

    @property
    def is_empty(self) -> bool:
        """Whether nothing that is sent is still to be told."""
        return not self._sent

    def is_pending(self, now: float) -> bool:
        """Whether a step is needed, to tell of blocks whose answers are under way."""
        return not self.is_empty and now - self._sent_at < ANSWER_SECONDS_MAX
