"""Keys that blocks are encrypted with: one for each tenant, derived from its secret, and one for blocks of nobody.

Keys are in the memory of this process only. Nothing of a key or a secret is ever in an error, a log or a header.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvservice.core.block.tenants import tag_of
from kvservice.errors import CodecError, ConfigError, KeyUnknown

KEY_BYTES = 32  # AES-256
ID_BYTES = 8  # names a key in headers: derived beside it, so that it says nothing about it
KEY_FILE_BYTES_MIN = 32  # 256 bits cannot be guessed
KEY_FILE_BYTES_MAX = 4096  # more is no key
_INFO = b"kvservice/codec/aesgcm/1"  # keeps these keys apart from all others that derive from a secret


@dataclass(frozen=True, slots=True)
class BlockKeyMaterial:
    """One key and its name in headers."""

    key_id: str
    key: bytes = field(repr=False)


class KeyRing:
    """Any thread may call. Keys are derived when they are first asked for."""

    def __init__(self, nobody: bytes = b"") -> None:
        """`nobody`: the secret for blocks that belong to no tenant; empty = there is none, and such blocks are not
        stored."""
        self._nobody = nobody
        self._secrets: dict[int, tuple[str, bytes]] = {}  # by tag: name and secret
        self._by_tag: dict[int, BlockKeyMaterial] = {}
        self._by_id: dict[str, BlockKeyMaterial] | None = None
        self._lock = threading.Lock()

    def set_tenants(self, secrets: Mapping[str, bytes]) -> None:
        """Replace the tenants. Blocks of those that are gone cannot be read any more.

        Of tenants with the same tag the first by name lends its key to the others' blocks too.
        """
        found: dict[int, tuple[str, bytes]] = {}
        for name in sorted(secrets, reverse=True):
            found[tag_of(name)] = (name, secrets[name])
        with self._lock:
            self._secrets, self._by_tag, self._by_id = found, {}, None

    def for_tag(self, tag: int) -> BlockKeyMaterial:
        """The key for blocks that this tenant is charged for. Raises CodecError when there is none."""
        with self._lock:
            return self._derived(tag if tag in self._secrets else 0)

    def by_id(self, key_id: str) -> BlockKeyMaterial:
        """The key that a header names. Raises KeyUnknown. Takes seconds once with 100,000 tenants."""
        with self._lock:
            if self._by_id is None:
                tags = [*self._secrets, *([0] if self._nobody else [])]
                self._by_id = {made.key_id: made for made in map(self._derived, tags)}
            found = self._by_id.get(key_id)
        if found is None:
            raise KeyUnknown("the block is encrypted with a key that is not here")
        return found

    def _derived(self, tag: int) -> BlockKeyMaterial:
        found = self._by_tag.get(tag)
        if found is None:
            name, secret = self._secrets.get(tag, ("", self._nobody))
            if not secret:
                raise CodecError("there is no key for blocks of nobody: set codec_key_file")
            found = self._by_tag[tag] = derive_key(secret, name)
        return found


def derive_key(secret: bytes, name: str) -> BlockKeyMaterial:
    """The key of a tenant, "" for nobody: HKDF with SHA-256 (RFC 5869)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    made = HKDF(SHA256(), KEY_BYTES + ID_BYTES, salt=None, info=_INFO + name.encode()).derive(secret)
    return BlockKeyMaterial(made[KEY_BYTES:].hex(), made[:KEY_BYTES])


def read_key_file(path: str | Path) -> bytes:
    """The secret for blocks of nobody. Raises ConfigError for a file that others can read, or that is too short."""
    try:
        file = Path(path)
        status = file.stat()
        data = file.read_bytes() if status.st_size <= KEY_FILE_BYTES_MAX else b""
    except OSError as error:
        raise ConfigError(f"cannot read codec_key_file {path}: {error.strerror}", key="codec_key_file") from error
    if status.st_mode & 0o007:
        raise ConfigError(
            f"every user of the machine can read codec_key_file {path}: chmod o= {path}", key="codec_key_file"
        )
    if len(data) < KEY_FILE_BYTES_MIN:
        raise ConfigError(
            f"codec_key_file {path} has no {KEY_FILE_BYTES_MIN} to {KEY_FILE_BYTES_MAX} bytes: "
            f"head -c {KEY_FILE_BYTES_MIN} /dev/urandom > {path}",
            key="codec_key_file",
        )
    return data
