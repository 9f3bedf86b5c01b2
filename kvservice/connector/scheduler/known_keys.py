"""Keys that are known to be in the pool, so that their blocks are not copied into it again. Pure; without I/O.

What is known is a hint: the pool may have evicted a block since. An ask that misses it corrects that, and so does the
next attachment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvservice.connector.cache_groups import Grouping
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.core.messages import AcquireResult
from kvservice.units import AttachmentId, BlockKey

# It takes some 16 MiB. Beyond it the keys that were learnt first are forgotten; their blocks are then copied again.
KNOWN_KEYS_MAX = 1 << 17


class KnownKeys:
    """The known keys of one attachment's pool. Used on the scheduler's thread."""

    def __init__(self) -> None:
        self._learnt: OrderedDict[BlockKey, int] = OrderedDict()  # -> how many asks had been posted by then
        self._attachment: AttachmentId | None = None
        self._asks = 0

    def __contains__(self, key: object) -> bool:
        return key in self._learnt

    def learnt_since(self, key: BlockKey, ask_number: int) -> bool:
        """Whether the key was learnt after the ask with this number was posted: for keys that no ask names."""
        return self._learnt.get(key, -1) >= ask_number

    def next_ask(self) -> int:
        """The number of an ask that is posted now, from 1."""
        self._asks += 1
        return self._asks

    def follow(self, attachment: AttachmentId) -> bool:
        """Keep keys of this attachment's pool from now on. Returns whether they were of another pool and were
        forgotten."""
        if self._attachment == attachment:
            return False
        self._learnt.clear()
        self._attachment = attachment
        return True

    def learn(self, keys: Iterable[BlockKey]) -> None:
        """Note keys that are in the pool, or on their way to it."""
        for key in keys:
            self._learnt[key] = self._asks
            self._learnt.move_to_end(key)
        while len(self._learnt) > KNOWN_KEYS_MAX:
            self._learnt.popitem(last=False)

    def not_found(self, keys: Iterable[BlockKey], ask_number: int) -> None:
        """The ask with this number did not find these keys. What was learnt before it was posted has been evicted
        since; what was learnt later is still in the pool."""
        for key in keys:
            if self._learnt.get(key, ask_number) < ask_number:
                del self._learnt[key]

    def take_answer(self, request: EngineRequest, result: AcquireResult, grouping: Grouping) -> None:
        """Note which of the request's blocks the pool has, and which not."""
        skip, end = request.skip, request.skip + len(result.blocks)
        held = min(result.skipped_held, skip)
        self.learn(request.keys[:held])
        self.not_found(request.keys[held:skip], request.ask_number)
        for group, keys in enumerate(request.chains):
            self.learn(keys[max(grouping.needed_from(group, end), skip) : end])
            self.not_found(keys[end:], request.ask_number)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._learnt.pop(key, None)

    def clear(self) -> None:
        self._learnt.clear()
