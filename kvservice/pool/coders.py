"""The codecs of one pool: ours and those that another package installs, the keys of its tenants, and what is known of
the blocks of its engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

from kvservice.codec.aesgcm import AesGcm
from kvservice.codec.base import Codec, Coded
from kvservice.codec.coder import Coder
from kvservice.codec.guard import Guard
from kvservice.codec.int8 import Int8
from kvservice.codec.keys import KeyRing, read_key_file
from kvservice.codec.planes import Planes
from kvservice.codec.where_it_pays import WherePays
from kvservice.core.block.numbers import Numbers, numbers_of
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.messages import EngineSpec
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.errors import ConfigError, KeyUnknown
from kvservice.plugins import CODECS, load, made
from kvservice.pool.tier_specs import NONE

AUTO = "auto"
OURS = ("aesgcm", "int8", "planes")
MODELS_MAX = 4096  # fingerprints that are remembered; blocks of older ones are stored as they are


class Coders:
    """Made before the pool. Any thread may call."""

    def __init__(self, key_file: str = "") -> None:
        """`key_file`: the secret for blocks that belong to no tenant; "" = there is none. Raises ConfigError."""
        self.keys = KeyRing(read_key_file(key_file) if key_file else b"")
        self.guard = Guard()
        self._numbers: BoundedTable[bytes, Numbers] = BoundedTable(MODELS_MAX)
        self._lock = threading.Lock()  # of the table

    def learn(self, spec: EngineSpec) -> None:
        """An engine attached: its blocks can be encoded from now on."""
        found = numbers_of(dict(spec.fingerprint.fields), spec.model)
        if found is not None:
            with self._lock:
                self._numbers.put(spec.fingerprint.block_mark, found)

    def numbers_of(self, fingerprint: bytes) -> Numbers | None:
        with self._lock:
            return self._numbers.get(fingerprint)

    def make(self, setting: str) -> Coder:
        """The Coder of one tier. It reads what any codec of ours has written, whatever the setting is.

        May import libraries and other packages, which takes seconds. Raises ConfigError.
        """
        names = split_setting(setting)
        lossy = Int8(self.guard)
        writing: list[Codec] = [lossy]
        hears: list[WherePays] = []
        for name in names:
            if name == AUTO:
                hears.append(WherePays(Planes()))
                writing.append(hears[-1])
            elif name == Planes.name:
                writing.append(Planes())
            elif name == AesGcm.name:
                writing.append(AesGcm(self.keys))
            elif name != lossy.name:
                writing.append(find_codec(name))
        reading = [_Later(Planes.name, Planes), _Later(AesGcm.name, lambda: AesGcm(self.keys))]
        return Coder(writing, reading, self.numbers_of, hears[0].tier_read if hears else None)


def split_setting(setting: str) -> list[str]:
    """The names in a setting such as "auto+aesgcm". Raises ConfigError for an order that makes no sense."""
    names = [] if setting == NONE else setting.split("+")
    if NONE in names or len(set(names)) < len(names) or {AUTO, Planes.name} <= set(names):
        raise ConfigError(f"the codec {setting!r} names something twice, or none beside others", key="disk_codec")
    if AesGcm.name in names[:-1]:
        raise ConfigError(f"in the codec {setting!r} aesgcm must be the last: nothing is gained after it")
    return names


def check_codecs(settings: Sequence[str], *, has_keys: bool) -> None:
    """Check the settings of all tiers before the pool starts. May import. Raises ConfigError.

    `has_keys`: whether there are tenants or a key file.
    """
    for setting in settings:
        names = split_setting(setting)
        if AesGcm.name in names and not has_keys:
            raise ConfigError(
                "the codec 'aesgcm' needs a key: set codec_key_file, or tenants_file, whose tenants have secrets",
                key="codec_key_file",
            )
        for name in names:
            if name == AesGcm.name:
                AesGcm(KeyRing())
            elif name in (AUTO, Planes.name):
                Planes()
            elif name not in OURS:
                find_codec(name)


def find_codec(name: str) -> Codec:
    """The codec of another package with this name. Raises ConfigError for one that fails or lacks a method."""
    codec = made(CODECS, name, load(CODECS, name, (NONE, AUTO, *OURS)), Codec)
    if (called := getattr(codec, "name", None)) != name:
        raise ConfigError(f"codec {name!r} calls itself {called!r}: see docs/plugins.md")
    return cast(Codec, codec)


class _Later:
    """A codec that is only read with. Its library is imported for the first block that needs it."""

    def __init__(self, name: str, make: Callable[[], Codec]) -> None:
        self.name = name
        self._make = make
        self._made: Codec | None = None

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        return None

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        if self._made is None:
            try:
                self._made = self._make()
            except ConfigError as error:
                raise KeyUnknown(error.message) from None
        self._made.decode(header, parameters, data, target)
