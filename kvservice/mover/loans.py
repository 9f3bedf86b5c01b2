"""Blocks that one engine lends to the others of its device: copied from engine to engine, without a slot between.

The lender keeps a lent block as it is until the worker says that nobody reads it any more. A copy counts only when
every loan it read from was still good after it ended. Thread-safe; nothing in here copies under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvservice.core.descriptors import CopyTemplate, DirectTemplate
from kvservice.errors import UnsupportedLayout
from kvservice.mover.copies import CopyEngine
from kvservice.mover.device import Device, KVMemory
from kvservice.mover.message import NO_EVENT, Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Lender:
    kv: KVMemory
    template: CopyTemplate


@dataclass(slots=True, eq=False)
class Loan:
    lender: Lender
    block: int
    event: int  # of the lender: the block is whole when it has passed
    readers: int = 0
    is_good: bool = True
    recalls: list[_Recall] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Recall:
    left: int  # loans that are still read
    on_returned: Callable[[], None]


class Loans:
    def __init__(self) -> None:
        self._loans: dict[bytes, dict[Lender, Loan]] = {}  # by block key
        self._changed = threading.Condition()

    def lend(self, lender: Lender, blocks: Iterable[tuple[bytes, int]], event: int) -> None:
        """`blocks`: (key, block). Lending a key again, without recalling it first, changes nothing."""
        with self._changed:
            for key, block in blocks:
                self._loans.setdefault(key, {}).setdefault(lender, Loan(lender, block, event))

    def recall(self, lender: Lender, keys: Iterable[bytes], on_returned: Callable[[], None]) -> None:
        """No copy of these starts any more. `on_returned` is called once nobody reads them, maybe at once."""
        with self._changed:
            loans = [loan for key in keys if (loan := self._take_out(key, lender)) is not None]
            waiting = [loan for loan in loans if loan.readers]
            recall = _Recall(len(waiting), on_returned)
            for loan in waiting:
                loan.recalls.append(recall)
        if not waiting:
            on_returned()

    def drop(self, lender: Lender) -> None:
        """The lender is gone: what is being read from it does not count. Blocks until nobody reads."""
        with self._changed:
            mine = [loan for by_lender in self._loans.values() if (loan := by_lender.get(lender)) is not None]
            for loan in mine:
                loan.is_good = False
            self._loans = {
                key: rest
                for key, by_lender in self._loans.items()
                if (rest := {other: loan for other, loan in by_lender.items() if other is not lender})
            }
            self._changed.wait_for(lambda: not any(loan.readers for loan in mine))

    def borrow(self, keys: Sequence[bytes], reader: Lender) -> list[Loan] | None:
        """A loan of each key, not the reader's own; None when one is not lent. Give them back."""
        with self._changed:
            found: list[Loan] = []
            for key in keys:
                others = [loan for lender, loan in self._loans.get(key, {}).items() if lender is not reader]
                if not others:
                    return None
                found.append(others[0])
            for loan in found:
                loan.readers += 1
            return found

    def give_back(self, loans: Iterable[Loan]) -> bool:
        """Whether all of them were good until now."""
        returned: list[_Recall] = []
        good = True
        with self._changed:
            for loan in loans:
                good = good and loan.is_good
                loan.readers -= 1
                if loan.readers:
                    continue
                for recall in loan.recalls:
                    recall.left -= 1
                returned += [recall for recall in loan.recalls if not recall.left]
                loan.recalls = []
            self._changed.notify_all()
        for recall in returned:
            recall.on_returned()
        return good

    def _take_out(self, key: bytes, lender: Lender) -> Loan | None:
        by_lender = self._loans.get(key, {})
        loan = by_lender.pop(lender, None)
        if not by_lender:
            self._loans.pop(key, None)
        return loan


class DirectPath:
    """Direct copies into one engine; used by the thread of its lane."""

    def __init__(self, loans: Loans, device: Device, reader: Lender) -> None:
        self._loans = loans
        self._device = device
        self.reader = reader
        self._ways: dict[Lender, tuple[DirectTemplate, CopyEngine]] = {}

    def copy(self, keys: Sequence[bytes], blocks: Sequence[int]) -> tuple[Outcome, int]:
        """Raises TransferError and InvalidRequest."""
        borrowed = self._loans.borrow(keys, self.reader)
        if borrowed is None:
            return Outcome.STALE, 0
        copied, fits, good = 0, True, False
        try:
            for lender in dict.fromkeys(loan.lender for loan in borrowed):
                rows = [(loan.block, b) for loan, b in zip(borrowed, blocks, strict=True) if loan.lender is lender]
                for event in {loan.event for loan in borrowed if loan.lender is lender} - {NO_EVENT}:
                    lender.kv.wait_for(event, lambda: all(loan.is_good for loan in borrowed))
                template, engine = self._way_from(lender)
                runs = template.expand([source for source, _ in rows], [target for _, target in rows])
                engine.load(runs)
                copied += runs.byte_count
        except UnsupportedLayout:
            fits = False
        finally:
            good = self._loans.give_back(borrowed)
        if not fits:
            return Outcome.REFUSED, copied
        return (Outcome.COPIED if good else Outcome.STALE), copied

    def _way_from(self, lender: Lender) -> tuple[DirectTemplate, CopyEngine]:
        if lender not in self._ways:
            template = DirectTemplate(lender.template, self.reader.template)
            self._ways[lender] = (template, self._device.direct(self.reader.kv, lender.kv))
        return self._ways[lender]

    def close(self) -> None:
        for _, engine in self._ways.values():
            engine.close()
        self._ways.clear()
