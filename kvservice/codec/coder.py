"""The codecs of one tier in their order: a block that is written goes through all of them, one that is read through
those that its header names."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvservice.codec.base import EXTRA_BYTES_MAX, Codec, Encoded
from kvservice.core.block.numbers import Numbers
from kvservice.core.events import PullResult
from kvservice.core.segment.blockfile import BlockFileHeader, pack_file_header
from kvservice.core.segment.digest import copy_and_digest, digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import CodecError, KeyUnknown

log = logging.getLogger("kvservice.codec")

CODECS_MAX = 8  # that one header may name; more are refused before anything is decoded
NumbersOf = Callable[[bytes], Numbers | None]  # of the engines whose blocks have this TierBlock.fingerprint
# name, parameters, and the length of what the codec was given. Lengths have no more digits than any payload's.
_STEP = re.compile(r"([a-z][a-z0-9_]{0,15})((?::[a-z0-9_.,:-]*)?)=([0-9]{1,12})", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    parameters: str
    given_bytes: int  # length of what was given to `encode`

    def __str__(self) -> str:
        return f"{self.name}{self.parameters and ':'}{self.parameters}={self.given_bytes}"


class Coder:
    """Any thread may call. Nothing raises."""

    def __init__(
        self,
        writing: Sequence[Codec] = (),
        reading: Sequence[Codec] = (),
        numbers_of: NumbersOf | None = None,
        on_read: Callable[[int, float], None] | None = None,
    ) -> None:
        """`writing` are the codecs of new blocks in their order; `reading` are others that a header may name. `on_read`
        hears what `tier_read` is told."""
        self._writing = tuple(writing)
        self._known = {codec.name: codec for codec in (*reading, *writing)}
        self._numbers_of = numbers_of
        self._on_read = on_read
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()  # of the counters

    @property
    def is_plain(self) -> bool:
        """Whether new blocks are stored as they are."""
        return not self._writing

    def counters(self) -> dict[str, int]:
        """Totals since the start, by name."""
        with self._lock:
            return dict(self._counters)

    def tier_read(self, byte_count: int, seconds: float) -> None:
        """The tier has read so many stored bytes of one block in this time, without the decoding. A codec may be used
        only where that is slow."""
        if self._on_read is not None:
            self._on_read(byte_count, seconds)

    def encode(self, block: TierBlock, payload: memoryview) -> Encoded | None:
        """What to store of a block; None when it must not be stored. Without codecs `data` is `payload` itself."""
        done = Encoded(BlockFileHeader(block, len(payload)), payload)
        if not self._writing:
            return done
        try:
            done = self._encode(done)
            # The digest that a lossy codec makes fits whatever lay in memory.
            is_lossy = done.header.block.digest != block.digest
            if is_lossy and digest_payload(payload, block.key) != block.digest:
                raise CodecError("the bytes in memory are not those of the block")
            pack_file_header(done.header)  # raises for what a codec says that no header holds
        except CodecError:
            self._count(codec_refused=1)
            return None
        except BaseException:  # noqa: BLE001  code of other packages, also a panic of Rust: only this block is not stored
            self._count(codec_failed=1)
            return None
        if len(done.data) > len(payload) + EXTRA_BYTES_MAX:
            self._count(codec_failed=1)
            return None
        self._count(codec_bytes_in=len(payload), codec_bytes_out=len(done.data))
        return done

    def _encode(self, done: Encoded) -> Encoded:
        numbers = self._numbers_of(done.header.block.fingerprint) if self._numbers_of else None
        for codec in self._writing:
            header, data = done.header, memoryview(done.data)
            coded = codec.encode(header, data, numbers)
            if coded is None:
                continue
            step = _Step(codec.name, coded.parameters, len(data))
            if _STEP.fullmatch(str(step)) is None:
                raise ValueError(f"the codec {codec.name} gives parameters that no header holds")
            made = memoryview(coded.data).cast("B")
            done = Encoded(
                BlockFileHeader(
                    header.block if coded.digest is None else replace(header.block, digest=coded.digest),
                    len(made),
                    f"{header.codec}+{step}" if header.codec else str(step),
                    coded.key_id or header.key_id,
                    coded.nonce or header.nonce,
                ),
                made,
            )
        return done

    def decode(self, header: BlockFileHeader, data: memoryview, target: memoryview) -> PullResult:
        """Bring the payload of a block into `target`, and hold it against the digest in its header.

        `data` is what follows the header in the file. STALE: it needs a codec or a key that is not here. FAILED: this
        process lacks the memory to decode it. CORRUPT: anything else that is wrong. `target` then holds anything.
        """
        try:
            steps = _steps(header.codec)
            if unknown := [step.name for step in steps if step.name not in self._known]:
                return self._lacks("codec_unknown", f"the codec {unknown[0]} is not here")
            self._decode(header, steps, data, target)
        except KeyUnknown as error:
            return self._lacks("codec_key_unknown", error.message)
        except CodecError:
            self._count(codec_corrupt=1)
            return PullResult.CORRUPT
        except MemoryError:  # it says nothing of the block, which other nodes may share
            self._count(codec_failed=1)
            return PullResult.FAILED
        except BaseException:  # noqa: BLE001  code of other packages, also a panic of Rust: only this block is lost
            self._count(codec_failed=1)
            return PullResult.CORRUPT
        return PullResult.OK

    def _decode(self, header: BlockFileHeader, steps: list[_Step], data: memoryview, target: memoryview) -> None:
        room_max = len(target) + EXTRA_BYTES_MAX
        lengths = [len(target), *(step.given_bytes for step in steps[1:])]
        if header.block.payload_bytes != len(target) or max(len(data), *lengths) > room_max:
            raise CodecError("the lengths of header, file and block differ")
        if not steps:
            if len(data) != len(target):
                raise CodecError("the lengths of header, file and block differ")
            if copy_and_digest(target, memoryview(data), header.block.key) != header.block.digest:
                raise CodecError("the bytes do not have the digest of their header")
            return
        for place in reversed(range(len(steps))):
            step = steps[place]
            if step.given_bytes != lengths[place]:
                raise CodecError("the lengths of header, file and block differ")
            room = target if place == 0 else memoryview(bytearray(step.given_bytes))
            seen = replace(header, stored_bytes=len(data), codec="+".join(map(str, steps[: place + 1])))
            self._known[step.name].decode(seen, step.parameters, data, room)
            data = room
        if digest_payload(target, header.block.key) != header.block.digest:
            raise CodecError("the bytes do not have the digest of their header")

    def _lacks(self, counted: str, reason: str) -> PullResult:
        """The first such block is logged: it says that the process was started with other settings than before."""
        with self._lock:
            is_first = not self._counters[counted]
            self._counters[counted] += 1
        if is_first:
            log.warning("blocks_cannot_be_decoded", extra={"reason": reason})
        return PullResult.STALE

    def _count(self, **by: int) -> None:
        with self._lock:
            self._counters.update(by)


def _steps(codec: str) -> list[_Step]:
    """The steps of a header in the order of encoding. Raises CodecError for a text that no Coder wrote."""
    texts = codec.split("+") if codec else []
    found = [_STEP.fullmatch(text) for text in texts]
    if len(found) > CODECS_MAX or None in found:
        raise CodecError("the header names codecs as no kvservice does")
    steps = [_Step(each[1], each[2][1:], int(each[3])) for each in found if each is not None]
    if len({step.name for step in steps}) < len(steps):
        raise CodecError("the header names a codec twice")
    return steps
