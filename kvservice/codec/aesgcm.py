"""Encryption at rest: AES-256-GCM, with a key of the block's tenant and a random nonce for each block.

What the header says of the block is authenticated with it, so a file that is damaged, forged or put in another's place
is no block. What the header says is not hidden: keys, lengths, positions and which blocks have one owner.
"""

from __future__ import annotations

import os
import struct

from kvservice.codec.base import Coded
from kvservice.codec.keys import KeyRing
from kvservice.core.block.numbers import Numbers
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.errors import CodecError, ConfigError

NONCE_BYTES = 12  # what GCM is made for; random ones are safe for four billion blocks of one key
TAG_BYTES = 16  # behind the encrypted bytes
_NUMBERS = struct.Struct("<QQQQQd")  # length, digest, position, route, tag and time of a block


class AesGcm:
    name = "aesgcm"
    interface_version = 1

    def __init__(self, keys: KeyRing) -> None:
        """Raises ConfigError when the library is not installed."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                "the codec 'aesgcm' needs cryptography, which comes with the extra 'codecs' (pip install cryptography)",
                key="disk_codec",
            ) from error
        self._cipher = AESGCM
        self._keys = keys

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded:
        found = self._keys.for_tag(header.block.account_tag)
        nonce = os.urandom(NONCE_BYTES)
        made = self._cipher(found.key).encrypt(nonce, data, _beside(header, header.codec, found.key_id))
        return Coded(made, key_id=found.key_id, nonce=nonce)

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        if parameters or len(header.nonce) != NONCE_BYTES or len(data) != len(target) + TAG_BYTES:
            raise CodecError("this is nothing that the codec aesgcm has made")
        found = self._keys.by_id(header.key_id)
        before = header.codec.rpartition("+")[0]
        try:
            target[:] = self._cipher(found.key).decrypt(header.nonce, data, _beside(header, before, found.key_id))
        except InvalidTag:
            raise CodecError("the block was changed, or its header was") from None


def _beside(header: BlockFileHeader, codec: str, key_id: str) -> bytes:
    """What is authenticated and not encrypted. `codec`: the codecs before this one."""
    block = header.block
    numbers = _NUMBERS.pack(
        block.payload_bytes, block.digest, block.position, block.route, block.account_tag, block.stored_at
    )
    parts = (block.key, numbers, block.fingerprint, codec.encode(), key_id.encode())
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
