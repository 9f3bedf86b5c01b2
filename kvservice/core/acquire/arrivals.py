"""Blocks on their way to this node: each comes once, however many acquisitions wait for it (single flight). Pure."""

from __future__ import annotations

from collections.abc import KeysView

from kvservice.units import BlockKey

DIGESTING = 0  # stands for a pull's number: an engine of this node wrote the block, and its digest is being computed


class Arrivals:
    """Which pull brings each block, and who waits for it. A waiter is (op, index of the block in its chain)."""

    def __init__(self) -> None:
        self._bringer: dict[BlockKey, int] = {}  # number of a pull, or DIGESTING
        self._waiters: dict[BlockKey, list[tuple[int, int]]] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._bringer

    @property
    def keys(self) -> KeysView[BlockKey]:
        """Those that are on their way."""
        return self._bringer.keys()

    def expect(self, key: BlockKey, bringer: int) -> None:
        """From now on `bringer` brings this block."""
        self._bringer[key] = bringer

    def is_brought_by(self, key: BlockKey, bringer: int) -> bool:
        return self._bringer.get(key) == bringer

    def end(self, key: BlockKey, bringer: int) -> bool:
        """`bringer` brought the block or failed to. False, without effect, when another one brings it."""
        if self._bringer.get(key) != bringer:
            return False
        del self._bringer[key]
        return True

    def wait(self, key: BlockKey, op: int, index: int) -> None:
        self._waiters.setdefault(key, []).append((op, index))

    def forget(self, key: BlockKey, op: int, index: int) -> None:
        """This waiter waits no longer."""
        waiters = [waiter for waiter in self._waiters.get(key, ()) if waiter != (op, index)]
        if waiters:
            self._waiters[key] = waiters
        else:
            self._waiters.pop(key, None)

    def take_waiters(self, key: BlockKey) -> list[tuple[int, int]]:
        return self._waiters.pop(key, [])

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way and nobody waits."""
        return not (self._bringer or self._waiters)

    def waiters(self) -> set[tuple[int, int]]:
        """All waiters, for checks."""
        return {waiter for waiters in self._waiters.values() for waiter in waiters}

    def bringers(self) -> set[int]:
        """All bringers, for checks."""
        return set(self._bringer.values())
