"""What a program gets: the prefix of a prompt that its pool holds, leased to it."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvservice.api.layout import FOREIGN_TYPES, Array, Layout
from kvservice.api.mapped import HeaderWatch
from kvservice.api.reasons import WORDS
from kvservice.errors import InvalidRequest, LeaseLost
from kvservice.memory.window import ReadWindow
from kvservice.units import counted

if TYPE_CHECKING:
    import torch

CLOSED = "this hit is closed: read it inside its `with`, or copy what you need"


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """What a hit reads, and how it gives that back."""

    window: ReadWindow
    watch: HeaderWatch
    headers: list[bytes]  # as they were when the blocks were promised
    release: Callable[[], None]  # returns at once; may be called twice

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a hit reads the memory of its own process: give another one `hit.copy()`")


class Hit:
    """The longest prefix of a prompt that the pool holds on this node, from block `start` on.

    Use it in a `with`, or call `close`. Until then the pool keeps the blocks where they are, and renews that by itself.
    A hit without blocks is a miss; it is false. `len(hit)` is the number of blocks. Any thread may read.

    `start` is the number of its first block in the prompt, as it was asked for; `fetched` says how many of the blocks
    came from another node for this hit. `miss` says why the prefix ends where it does; it is empty when every block
    was found. `request_id` names the request for `kvservice explain`.

    >>> import kvservice, numpy
    >>> pool = kvservice.connect(mode="embedded", memory="8MiB")
    >>> cache = pool.attach("m", kvservice.Layout(block_tokens=4, shape=(2, 8)))
    >>> cache.put(range(8), numpy.ones((2, 2, 8), "float32"))
    PutResult(stored=2, present=0, dropped=0, reason='')
    >>> with cache.get(range(12)) as hit:
    ...     hit, hit.tokens, float(hit.view.sum())
    (Hit(8 tokens in 2 blocks, 0 from other nodes; then never_stored), 8, 32.0)
    >>> pool.close()
    """

    def __init__(
        self,
        layout: Layout,
        held: HeldBlocks | None,
        *,
        start: int,
        fetched: int,
        miss: str,
        request_id: str,
    ) -> None:
        self._layout = layout
        self._held = held
        self._count = 0 if held is None else len(held.headers)
        self._pid = os.getpid()
        self.start = start
        self.fetched = fetched
        self.miss = miss
        self.request_id = request_id
        if held is not None:
            weakref.finalize(self, _end, held, self._pid).atexit = False

    def __len__(self) -> int:
        """The number of blocks."""
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    def __repr__(self) -> str:
        ending = f"; then {self.miss}" if self.miss else ""
        size = f"{counted(self.tokens, 'token')} in {counted(self._count, 'block')}"
        return f"Hit({size}, {self.fetched:,} from other nodes{ending})"

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt need not be computed, those before `start` included."""
        return (self.start + self._count) * self._layout.block_tokens

    def explain(self) -> str:
        """What became of the prompt's blocks, in words. Pool.explain says what became of each block.

        >>> import kvservice
        >>> with kvservice.connect(mode="embedded", memory="8MiB") as pool:
        ...     cache = pool.attach("m", kvservice.Layout(block_tokens=4, shape=(2, 8)))
        ...     print(cache.get(range(8), request_id="r1").explain())
        Found 0 blocks from block 0 on, ... Block 0 is missing: ... pool.explain('r1') says more.
        """
        fetched = f"{self.fetched:,} of them fetched from other nodes."
        here = f"Found {counted(self._count, 'block')} from block {self.start} on, {fetched}"
        if not self.miss:
            return f"{here} None is missing."
        why = f"Block {self.start + self._count} is missing: {WORDS.get(self.miss, self.miss)}."
        return f"{here} {why} pool.explain({self.request_id!r}) says more."

    @property
    def view(self) -> Array:
        """The blocks as one array of shape `(len(hit), *layout.shape)`, without a copy, only for reading.

        Read it inside the `with`, and use what you computed from it only once the `with` has ended without LeaseLost.
        After that the array has all bits set, which is NaN in every floating-point type. Raises InvalidRequest after
        `close`.
        """
        found: Array = self._array(self._layout.numpy_type)
        found.flags.writeable = False
        return found

    def tensor(self) -> torch.Tensor:
        """The same as a tensor of torch. Writing to it changes nothing in the pool."""
        import torch

        kind = self._layout.numpy_type
        if self._layout.dtype in FOREIGN_TYPES:
            # NumPy has more types without a sign than torch, so the bits go by those with one.
            bits = self._array(np.dtype(f"int{8 * kind.itemsize}"))
            return torch.from_numpy(bits).view(getattr(torch, self._layout.dtype))
        return torch.from_numpy(self._array(kind))

    def copy(self) -> Array:
        """A copy of the blocks that is yours, and checked: these are the bytes that were stored. Raises LeaseLost."""
        found: Array = np.array(self.view)
        self.check()
        return found

    def copy_to(self, target: Array | torch.Tensor) -> None:
        """Copy the blocks into an array of the shape and type of `view`, or a tensor of those of `tensor()`. Raises
        LeaseLost, and then `target` holds nothing of use; InvalidRequest when its shape or type differs, or it is
        only for reading."""
        source = self.view if isinstance(target, np.ndarray) else self.tensor()
        shape, dtype = getattr(target, "shape", None), getattr(target, "dtype", None)
        if shape != source.shape or dtype != source.dtype:
            found = type(target).__name__ if shape is None else f"{tuple(shape)} of {dtype}"
            raise InvalidRequest(f"the hit is {tuple(source.shape)} of {source.dtype}, the target {found}")
        if isinstance(target, np.ndarray):
            if not target.flags.writeable:
                raise InvalidRequest("the target is an array only for reading: give a copy of it")
            np.copyto(target, source)
        else:
            target.copy_(source)
        self.check()

    def check(self) -> None:
        """Raise LeaseLost when a block may have changed since the hit was made. Costs microseconds.

        Everything that was read from the hit before a check which passes was right.
        """
        held = self._open()
        if held is None:
            return
        changed = held.watch.first_changed(held.headers)
        if changed is not None:
            raise LeaseLost(
                f"the pool took back block {self.start + changed} while it was read, because this process or its shard "
                "was away for longer than a lease: drop what you read and get it again",
                block=self.start + changed,
            )

    def close(self) -> None:
        """Give the blocks back. Does not check. Idempotent; never blocks."""
        held, self._held = self._held, None
        if held is not None:
            _end(held, self._pid)

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._held is not None:
                self.check()
        finally:
            self.close()

    async def __aenter__(self) -> Hit:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _open(self) -> HeldBlocks | None:
        if self._held is None and self._count:
            raise InvalidRequest(CLOSED)
        return self._held

    def _array(self, kind: np.dtype[Any]) -> Array:
        held, shape = self._open(), (self._count, *self._layout.shape)
        if held is None:
            return np.empty(shape, kind)
        if (buffer := held.window.buffer) is None:  # closed by another thread just now, or it is a copy of a closed one
            raise InvalidRequest(CLOSED)
        inner = [kind.itemsize * math.prod(shape[axis:]) for axis in range(2, len(shape) + 1)]
        found: Array = np.ndarray(shape, kind, memoryview(buffer), strides=(held.window.stride, *inner))
        return found


def _end(held: HeldBlocks, pid: int) -> None:
    held.window.close()
    if os.getpid() == pid:  # a forked child has the parent's hits, and must not give them back
        held.release()
