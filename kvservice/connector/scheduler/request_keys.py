"""Names the blocks of requests with the keys of the tenant that the engine is attached as. Pure; without I/O.

A request's first blocks may be public: they are named with the key that tenants share, if this tenant may use it.
Blocks that it may read but not publish are looked up under that key and never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvservice.connector.scheduler.request import EngineRequest, Naming
from kvservice.core.block.keys import adapter_key
from kvservice.core.block.window_groups import group_key
from kvservice.core.messages import Attachment
from kvservice.units import BlockHash, BlockKey

# (hashes, the key that the names derive from) -> names
MakeKeys = Callable[[Sequence[BlockHash], bytes], list[BlockKey]]


class Keyring:
    """Names the blocks of every request with the attachment and the term that are current."""

    def __init__(self, make_keys: MakeKeys, block_tokens: int, term: bytes = b"", stride: int = 1) -> None:
        """`block_tokens` and `stride` are the tokens and the engine's hashes of a position. `term` is that of the
        engine's weights; empty while they are those that the fingerprint names."""
        self._make_keys = make_keys
        self._block_tokens = block_tokens
        self._stride = stride
        self._term = term
        self._naming = Naming().under(term)
        self._read: tuple[Attachment | None, Naming] = (None, self._naming)

    def begin_term(self, term: bytes) -> None:
        """The engine's weights changed. From here on every block has another name, also those of requests under way."""
        self._term = term
        attachment = self._read[0]
        self._naming = (Naming() if attachment is None else Naming.of(attachment)).under(term)
        self._read = attachment, self._naming

    def is_current(self, request: EngineRequest, attachment: Attachment | None) -> bool:
        """Whether the request's keys belong to this attachment."""
        if attachment is None:
            return True
        naming = self.naming_of(attachment)
        return request.naming is naming or request.naming == naming

    def extend(self, request: EngineRequest, hashes: Sequence[BlockHash], attachment: Attachment | None) -> int:
        """Give the request a key for each position that has all its hashes; the last of them stands for everything
        before it. Keys of another naming are made again, because under another tenant or secret its blocks have other
        names. Returns how many of the new keys may be stored."""
        if attachment is not None:
            self._naming = self.naming_of(attachment)
        if request.naming is not self._naming:
            if request.naming != self._naming:
                for keys in request.chains:
                    keys.clear()
                request.stored = 0
            request.naming = self._naming
        naming, begin, end = self._naming, len(request.keys), len(hashes) // self._stride
        if end <= begin:
            return 0
        public = request.terms.public_tokens // self._block_tokens if naming.public_key else 0
        middle = min(max(public, begin), end)
        new = self._names(hashes, begin, middle, _of(request, naming.public_key)) if middle > begin else []
        new += self._names(hashes, middle, end, _of(request, naming.tenant_key))
        request.keys.extend(new)
        for group, keys in enumerate(request.window_keys, 1):
            keys.extend(group_key(key, group) for key in new)
        request.read_only = 0 if naming.may_publish else public
        request.stored = max(request.stored, request.kept_out)
        return end - max(begin, min(request.kept_out, end))

    def _names(self, hashes: Sequence[BlockHash], begin: int, end: int, key: bytes) -> list[BlockKey]:
        """The names of positions [begin, end)."""
        last = self._stride - 1
        return self._make_keys(hashes[begin * self._stride + last : end * self._stride : self._stride], key)

    def tails(self, request: EngineRequest, position: int, names: Sequence[BlockHash]) -> list[BlockKey]:
        """The keys of partial tails at this position, of the same tenants as a whole block there would be."""
        naming = request.naming
        is_public = naming.public_key and position < request.terms.public_tokens // self._block_tokens
        return self._make_keys(names, _of(request, naming.public_key if is_public else naming.tenant_key))

    def naming_of(self, attachment: Attachment) -> Naming:
        """What names derive from under this attachment and the current term. Called for every request of every step, so
        it is read once per attachment."""
        if self._read[0] is not attachment:
            self._read = attachment, Naming.of(attachment).under(self._term)
        return self._read[1]


def _of(request: EngineRequest, key: bytes) -> bytes:
    return adapter_key(key, request.adapter) if request.adapter else key
