"""What the pages of an engine are called after each clear and each change of its weights. Imports no engine.

SGLang clears its storages rank by rank. Where one rank reads what another one has stored, as with MLA, both must call
pages alike afterwards. So a term is made of the number of clears and changes, and of a name that the ranks of an engine
agree on: a random one, new at each start, which lies in the store of their process group. Other engines and later
starts never have the same terms.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from kvservice.connector.weights import TERM_BYTES

log = logging.getLogger("kvservice.connector")

STORE_KEY = "kvservice/engine"


class ClearTerms:
    """The clears of one rank's process. A storage that is attached again goes on with them: the weights of the engine
    may have been changed in place before."""

    def __init__(self, engine: bytes, changes: Callable[[], int] = lambda: 0) -> None:
        """`engine`: a name of this engine and this start, the same on all ranks. `changes`: how often its weights were
        changed in place, as far as it says so."""
        self._engine = engine
        self._count = 0
        self.changes = changes

    @property
    def term(self) -> bytes:
        """Of the pages now; empty before the first clear or change."""
        return self.term_of(self.changes())

    def term_of(self, changes: int) -> bytes:
        """Of what is computed behind so many changes of the weights."""
        numbers = self._count, changes
        if not any(numbers):
            return b""
        text = b"kvservice/sglang-clear/2" + b"".join(each.to_bytes(8, "big") for each in numbers) + self._engine
        return hashlib.blake2b(text, digest_size=TERM_BYTES).digest()

    def next(self) -> bytes:
        """The term from now on."""
        self._count += 1
        return self.term


def random_name() -> bytes:
    return secrets.token_hex(TERM_BYTES).encode()


def _group_store() -> Any:
    return distributed_c10d._get_default_store()  # noqa: SLF001  torch has no other name for it


def agreed_name(group_store: Callable[[], Any] = _group_store) -> bytes:
    """The name that the ranks of this process group agree on: the one that the first of them has drawn. Without a group
    a name of its own, so that this rank finds after a clear only what it stores itself."""
    own = random_name()
    try:
        return bytes(group_store().compare_set(STORE_KEY, "", own.decode()))
    except (RuntimeError, ValueError) as error:
        log.warning("the ranks of this engine do not share what they store after a clear: %s", error)
        return own
