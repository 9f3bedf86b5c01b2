"""Blocks that one engine lends to the others of its device. They are copied from engine to engine, without a slot
between.

The lender keeps a lent block unchanged until the worker says that nobody reads it any more. A copy counts only if the
loan it read from was still good after the copy ended. Thread-safe. Nothing in here copies while it holds the lock.

Frozen: nothing new builds on loans until GPUs of one node have run them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvservice.copying.copies import CopyEngine
from kvservice.copying.device import Device, KVMemory
from kvservice.copying.message import NO_EVENT
from kvservice.core.segment.copy_runs import CopyTemplate, DirectTemplate
from kvservice.errors import TransferError, UnsupportedLayout

log = logging.getLogger("kvservice.copying")


@dataclass(slots=True, eq=False)
class Lender:
    kv: KVMemory
    template: CopyTemplate
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class Lending:
    """Blocks that were lent together and end together."""

    lender: Lender
    event: int  # event of the lender; the blocks are complete when it has passed. NO_EVENT: it has
    on_taken: Callable[[], None]
    keys: tuple[bytes, ...]
    readers: int = 0  # blocks that are being read
    is_good: bool = True
    is_taken: bool = False
    on_returned: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class BorrowedBlock:
    lending: Lending
    block: int


class Loans:
    def __init__(self) -> None:
        self._by_key: dict[bytes, list[BorrowedBlock]] = {}
        self._open: dict[tuple[Lender, int], Lending] = {}  # may be borrowed from
        self._recalled: dict[tuple[Lender, int], Lending] = {}  # still being read
        self._changed = threading.Condition()

    def lend(
        self,
        lender: Lender,
        lending_id: int,
        blocks: Sequence[tuple[bytes, int]],
        event: int = NO_EVENT,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """Lend blocks. The same key may be lent several times, and each lending ends by itself. An id that is open is
        not lent again.

        Args:
            blocks: (key, block) pairs.
            on_taken: called once, when a reader has read what it wanted of them.
        """
        with self._changed:
            if lender.is_gone or (lender, lending_id) in self._open:
                return
            lending = Lending(lender, event, on_taken, tuple(key for key, _ in blocks))
            self._open[lender, lending_id] = lending
            for key, block in blocks:
                self._by_key.setdefault(key, []).append(BorrowedBlock(lending, block))

    def recall(self, lender: Lender, lending_id: int, on_returned: Callable[[], None]) -> None:
        """End a lending: no copy of its blocks starts any more. `on_returned` is called once nobody reads them, maybe
        at once."""
        where = (lender, lending_id)
        with self._changed:
            lending = self._open.pop(where, None)
            if lending is not None:
                self._take_out(lending)
            else:
                lending = self._recalled.get(where)
            waiting = lending is not None and lending.readers > 0
            if lending is not None and waiting:
                self._recalled[where] = lending
                lending.on_returned.append(on_returned)
        if not waiting:
            on_returned()

    def drop(self, lender: Lender) -> None:
        """Forget a lender that is gone. What is being read from it does not count. Blocks until nobody reads."""
        with self._changed:
            lender.is_gone = True
            mine = [one for one in self._open.values() if one.lender is lender]
            for lending in mine:
                self._take_out(lending)
            mine += [one for one in self._recalled.values() if one.lender is lender]
            for lending in mine:
                lending.is_good = False
            self._open = {where: one for where, one in self._open.items() if one.lender is not lender}
            self._changed.wait_for(lambda: not any(lending.readers for lending in mine))

    def lenders_of(self, keys: Iterable[bytes], reader: Lender) -> set[Lender]:
        """Who lends any of these keys, without the reader itself."""
        with self._changed:
            found = {loan.lending.lender for key in keys for loan in self._by_key.get(key, ())}
        return found - {reader}

    def borrow(self, keys: Sequence[bytes], lenders: Iterable[Lender]) -> list[BorrowedBlock | None]:
        """Borrow each key from one of these lenders; None for a key that none lends. Return them with `give_back`."""
        wanted = set(lenders)
        with self._changed:
            found = [
                next((loan for loan in self._by_key.get(key, ()) if loan.lending.lender in wanted), None)
                for key in keys
            ]
            for loan in found:
                if loan is not None:
                    loan.lending.readers += 1
            return found

    def give_back(self, loans: Iterable[BorrowedBlock]) -> None:
        """Return borrowed blocks. A copy of one counts if its lending is still `is_good` after this."""
        ended: list[Callable[[], None]] = []
        with self._changed:
            for loan in loans:
                loan.lending.readers -= 1
                if not loan.lending.readers:
                    ended += loan.lending.on_returned
                    loan.lending.on_returned = []
            self._recalled = {where: one for where, one in self._recalled.items() if one.readers}
            self._changed.notify_all()
        for on_returned in ended:
            on_returned()

    def taken(self, lendings: Iterable[Lending]) -> None:
        """Tell the lenders that a reader has read what it wanted of each."""
        with self._changed:
            fresh = [one for one in lendings if one.is_good and not one.is_taken]
            for lending in fresh:
                lending.is_taken = True
        for lending in fresh:
            lending.on_taken()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lent and nothing is read."""
        with self._changed:
            return not (self._by_key or self._open or self._recalled)

    def _take_out(self, lending: Lending) -> None:
        for key in set(lending.keys):
            rest = [loan for loan in self._by_key.get(key, ()) if loan.lending is not lending]
            if rest:
                self._by_key[key] = rest
            else:
                self._by_key.pop(key, None)


class DirectPath:
    """Direct copies into one engine. Used by the thread of its load lane."""

    def __init__(self, loans: Loans, device: Device, reader: Lender) -> None:
        self._loans = loans
        self._device = device
        self.reader = reader
        # None: the two engines hold different parts of a block
        self._ways: dict[Lender, tuple[DirectTemplate, CopyEngine] | None] = {}
        self._read: dict[Lending, None] = {}  # read by the job under way

    def copy(self, keys: Sequence[bytes], blocks: Sequence[int]) -> tuple[list[bool], int]:
        """Copy blocks from engines that lend them. Returns which blocks were copied, and the bytes. The other blocks
        may have been touched; their contents are worthless. Raises TransferError and InvalidRequest.

        Args:
            keys, blocks: of equal length.
        """
        lenders = self._loans.lenders_of(keys, self.reader)
        self._forget_gone()
        ways = {lender: way for lender in lenders if (way := self._way_from(lender)) is not None}
        if not ways:
            return [False] * len(keys), 0
        borrowed = self._loans.borrow(keys, ways)
        copied = 0
        try:
            for lending in dict.fromkeys(loan.lending for loan in borrowed if loan is not None):
                rows = [
                    (loan.block, block)
                    for loan, block in zip(borrowed, blocks, strict=True)
                    if loan is not None and loan.lending is lending
                ]
                copied += self._copy_from(lending, ways[lending.lender], rows)
        finally:
            self._loans.give_back([loan for loan in borrowed if loan is not None])
        self._read.update(dict.fromkeys(loan.lending for loan in borrowed if loan is not None))
        return [loan is not None and loan.lending.is_good for loan in borrowed], copied

    def job_ended(self) -> None:
        """Tell the lenders that the reader has read what it wanted."""
        read, self._read = self._read, {}
        if read:
            self._loans.taken(read)

    def _copy_from(self, lending: Lending, way: tuple[DirectTemplate, CopyEngine], rows: list[tuple[int, int]]) -> int:
        if lending.event != NO_EVENT:
            try:
                lending.lender.kv.wait_for(lending.event, lambda: lending.is_good)
            except TransferError:
                if lending.is_good:
                    raise
                return 0  # the lender is gone, and nothing was copied
            lending.event = NO_EVENT  # it has passed; recorded again, it would tell of a later step of the lender
        template, engine = way
        runs = template.expand([source for source, _ in rows], [target for _, target in rows])
        engine.load(runs)
        return runs.byte_count

    def _way_from(self, lender: Lender) -> tuple[DirectTemplate, CopyEngine] | None:
        if lender not in self._ways:
            try:
                template = DirectTemplate(lender.template, self.reader.template)
                self._ways[lender] = (template, self._device.direct(self.reader.kv, lender.kv))
            except UnsupportedLayout:  # it has other heads; another rank of the lender has these
                self._ways[lender] = None
        return self._ways[lender]

    def _forget_gone(self) -> None:
        for lender in [one for one in self._ways if one.is_gone]:
            self._close_way(lender)

    def _close_way(self, lender: Lender) -> None:
        way = self._ways.pop(lender)
        if way is not None:
            way[1].close()

    def close(self) -> None:
        for lender in list(self._ways):
            self._close_way(lender)
