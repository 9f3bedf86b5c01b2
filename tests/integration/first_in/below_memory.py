"""A tier and a codec of another package: blocks in a dict of this process, and bytes in the other order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvservice.codec.base import Coded
from kvservice.codec.coder import Coder
from kvservice.core.block.numbers import Numbers
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.blockfile import BlockFileHeader, is_file_of, pack_file_header, unpack_file
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import CodecError
from kvservice.tier.base import ProbeCallback, ReadCallback, TierRead, TierWrite, WriteCallback, WriteResult
from kvservice.tier.headers import brought
from kvservice.units import BlockKey

FILES: dict[str, dict[BlockKey, bytes]] = {}  # by URL and namespace; as durable as this process


class InDict:
    """Answers before it returns. A tier for slow places has threads."""

    interface_version = 1
    name = "objects"

    def __init__(self, url: str, namespace: str, coder: Coder) -> None:
        self.files = FILES.setdefault(f"{url}/{namespace}", {})
        self._coder = coder

    def start(self) -> list[TierBlock]:
        return []

    def write(self, job: TierWrite, on_done: WriteCallback) -> None:
        results = []
        for block, payload in job.items:
            encoded = self._coder.encode(block, payload)
            if encoded is not None:
                self.files[block.key] = pack_file_header(encoded.header) + bytes(encoded.data)
            results.append(WriteResult.FAILED if encoded is None else WriteResult.OK)
        on_done(job.job_id, tuple(results))

    def read(self, job: TierRead, on_done: ReadCallback) -> None:
        answers = []
        for block, target in job.items:
            found = unpack_file(self.files.get(block.key, b""))
            answer = BroughtBlock(PullResult.STALE)
            if found is not None and is_file_of(found[0], block):
                answer = brought(self._coder.decode(*found, target), found[0])
            answers.append(answer)
        on_done(job.job_id, tuple(answers))

    def erase(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.files.pop(key, None)

    def probe(self, keys: Sequence[BlockKey], deadline: float, on_done: ProbeCallback) -> None:
        missing = [place for place, key in enumerate(keys) if key not in self.files]
        on_done(missing[0] if missing else len(keys), bool(missing))

    def counters(self) -> Mapping[str, int]:
        return {"blocks": len(self.files), **self._coder.counters()}

    def close(self) -> None:
        pass


class TierOfTomorrow(InDict):
    interface_version = 2


class HalfATier:
    interface_version = 1


class Backwards:
    """Hides nothing and saves nothing."""

    interface_version = 1
    name = "backwards"

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded:
        return Coded(bytes(data)[::-1])

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        if parameters or len(data) != len(target):
            raise CodecError("this is nothing that was turned round")
        target[:] = bytes(data)[::-1]


class CodecOfTomorrow(Backwards):
    interface_version = 2


class Misnamed(Backwards):
    name = "forwards"


class HalfACodec:
    interface_version = 1
    name = "half"

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> None:
        return None
