"""Peers of this machine whose memory is read through a mapping."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.header import SLOT_VERSION
from kvservice.errors import TransferError
from kvservice.memory.segment import Segment
from kvservice.transfer import mapped
from kvservice.units import MiB


def test_a_peer_of_another_slot_version_is_refused_with_both(tmp_path: Path) -> None:
    peer = Segment.create(tmp_path / "peer", Geometry(MiB, 2), "peer")
    described, epoch = mapped.describe(peer), peer.epoch
    peer.close()
    with peer.path.open("r+b") as file:
        control = bytearray(file.read(64))
        control[56:60] = (SLOT_VERSION + 1).to_bytes(4, "little")
        control[60:] = zlib.crc32(control[:60]).to_bytes(4, "little")
        file.seek(0)
        file.write(control)
    both = f"has version {SLOT_VERSION + 1}, and this process knows version {SLOT_VERSION}: upgrade the older"
    with pytest.raises(TransferError, match=both):
        mapped.MappedPeer(described, epoch)
