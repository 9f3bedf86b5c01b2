"""Blocks on a real disk in the form of a codec: written by one pool, brought back by the next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvservice
from kvservice.api.pool import Pool
from kvservice.client.tier_overview import not_decoded, tiers_of
from kvservice.core.segment.blockfile import FILE_HEADER_BYTES, disk_room, unpack_file_header
from kvservice.pool.tiers import TierPhase
from kvservice.testing.eventually import eventually
from kvservice.wire.figures import encode_tiers
from kvservice.wire.v1 import shard_pb2
from tests.integration.embedded import open_embedded

SHAPE = (4, 2, 16, 64)  # layer, K or V, token, number
BLOCKS = 8


def open_pool(disk: Path, key_file: Path, codec: str) -> Pool:
    """A pool whose disk is open."""
    pool, runtime = open_embedded(disk, disk_codec=codec, codec_key_file=str(key_file))
    eventually(lambda: runtime._tiers.states()[0].phase is TierPhase.OPEN, "the disk is open")
    return pool


def used_bytes(pool: Pool) -> int:
    """What the disk's books count."""
    runtime = pool._thread._runtime
    assert runtime is not None
    return runtime.stats().tiers[0].used_bytes


def counters(pool: Pool) -> dict[str, int]:
    runtime = pool._thread._runtime
    assert runtime is not None
    return dict(runtime.stats().counters)


@pytest.mark.parametrize(
    ("codec", "accepts", "steps"),
    [("planes+aesgcm", "", ("planes", "aesgcm")), ("aesgcm", "int8", ("int8", "aesgcm")), ("none", "", ())],
)
def test_blocks_come_back_from_disk_in_the_next_pool(
    tmp_path: Path, codec: str, accepts: str, steps: tuple[str, ...]
) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    key_file.chmod(0o600)
    layout = kvservice.Layout(block_tokens=16, shape=SHAPE, accept_codec=accepts)
    blocks = np.random.default_rng(0).standard_normal((BLOCKS, *SHAPE)).astype("float32")
    with open_pool(tmp_path / "disk", key_file, codec) as pool:
        assert pool.attach("m", layout).put(range(16 * BLOCKS), blocks).stored == BLOCKS
        eventually(lambda: counters(pool).get("tier_disk_written_blocks", 0) == BLOCKS, "the blocks are on disk")
        counted = used_bytes(pool)
    files = list((tmp_path / "disk").rglob("*.safetensors"))
    assert counted == sum(disk_room(path.stat().st_size - FILE_HEADER_BYTES) for path in files), "what the files take"
    headers = [
        unpack_file_header(data[:FILE_HEADER_BYTES])
        for data in (path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file())
        if len(data) > FILE_HEADER_BYTES
    ]
    found = [header for header in headers if header is not None]
    assert len(found) == BLOCKS
    for header in found:
        assert tuple(step.partition(":")[0].partition("=")[0] for step in header.codec.split("+") if step) == steps
    with open_pool(tmp_path / "disk", key_file, codec) as pool:
        eventually(lambda: counters(pool).get("tier_disk_found", 0) == BLOCKS, "the blocks were found")
        assert used_bytes(pool) == counted
        with pool.attach("m", layout).get(range(16 * BLOCKS)) as hit:
            assert hit.tokens == 16 * BLOCKS
            off = np.abs(hit.copy() - blocks).max()
            assert off == 0 if accepts == "" else 0 < off < 0.03


def test_a_wrong_key_is_told_once_and_in_what_status_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {name: tmp_path / name for name in ("first", "other")}
    for name, file in keys.items():
        file.write_bytes(name.encode() * 16)
        file.chmod(0o600)
    layout = kvservice.Layout(block_tokens=16, shape=SHAPE)
    blocks = np.zeros((BLOCKS, *SHAPE), "float32")
    with open_pool(tmp_path / "disk", keys["first"], "aesgcm") as pool:
        assert pool.attach("m", layout).put(range(16 * BLOCKS), blocks).stored == BLOCKS
        eventually(lambda: counters(pool).get("tier_disk_written_blocks", 0) == BLOCKS, "the blocks are on disk")
    with open_pool(tmp_path / "disk", keys["other"], "aesgcm") as pool:
        eventually(lambda: counters(pool).get("tier_disk_found", 0) == BLOCKS, "the blocks were found")
        with pool.attach("m", layout).get(range(16 * BLOCKS)) as hit:
            assert hit.tokens == 0
        assert pool._thread._runtime is not None
        stats = pool._thread._runtime.stats()
        (disk,) = tiers_of(shard_pb2.StatsReply(tiers=encode_tiers(stats.tiers)), stats.counters)
        assert not_decoded(disk).startswith(f"a key or a codec is missing here for {BLOCKS} blocks")
    assert [record.message for record in caplog.records].count("blocks_cannot_be_decoded") == 1
