"""The codecs of a pool: what a setting means, and what is learnt of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvservice.codec.coder import Coder
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.numbers import number_fields
from kvservice.core.events import PullResult
from kvservice.core.messages import EngineSpec
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import ConfigError
from kvservice.pool.coders import Coders, check_codecs, split_setting
from kvservice.testing.codec_contract import block_of
from tests.unit.codec.test_int8 import kv

PAYLOAD = kv(0)


def spec_of(accepts: str = "") -> EngineSpec:
    fields = {"model": "m", **number_fields("bfloat16", 64, 16, accepts)}
    layout = SlotLayout(1, 8, len(PAYLOAD) // 8, 16)
    return EngineSpec(b"e" * 16, "m", Fingerprint.of(fields), layout)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    return path


def stored_by(coder: Coder, spec: EngineSpec) -> str:
    """The codecs that a block of this engine is stored with, after it came back whole."""
    block = block_of(PAYLOAD)
    block = type(block)(block.key, len(PAYLOAD), block.digest, 0, block.route, 0, spec.fingerprint.digest[:16])
    done = coder.encode(block, memoryview(PAYLOAD))
    assert done is not None
    target = bytearray(len(PAYLOAD))
    assert coder.decode(done.header, memoryview(done.data), memoryview(target)) is PullResult.OK
    assert bytes(target) == PAYLOAD or done.header.codec.startswith("int8")
    return "+".join(step.partition(":")[0].partition("=")[0] for step in done.header.codec.split("+"))


@pytest.mark.parametrize(
    ("setting", "accepts", "codec"),
    [
        ("none", "", ""),
        ("none", "int8", "int8"),
        ("planes", "", "planes"),
        ("planes+aesgcm", "", "planes+aesgcm"),
        ("planes+aesgcm", "int8:0.1", "int8+aesgcm"),
        ("aesgcm", "", "aesgcm"),
        ("auto", "", ""),
    ],
)
def test_setting_and_engine_say_how_blocks_are_stored(key_file: Path, setting: str, accepts: str, codec: str) -> None:
    coders, spec = Coders(str(key_file)), spec_of(accepts)
    assert stored_by(coders.make(setting), spec) == ("aesgcm" if "aesgcm" in setting else ""), "nothing is known of it"
    coders.learn(spec)
    assert stored_by(coders.make(setting), spec) == codec


def test_every_tier_reads_what_any_setting_wrote(key_file: Path) -> None:
    coders, spec = Coders(str(key_file)), spec_of()
    coders.learn(spec)
    block = block_of(PAYLOAD)
    block = type(block)(block.key, len(PAYLOAD), block.digest, 0, block.route, 0, spec.fingerprint.digest[:16])
    done = coders.make("planes+aesgcm").encode(block, memoryview(PAYLOAD))
    assert done is not None
    target = bytearray(len(PAYLOAD))
    for _ in range(2):
        result = coders.make("none").decode(done.header, memoryview(done.data), memoryview(target))
        assert result is PullResult.OK and bytes(target) == PAYLOAD
    assert Coders().make("none").decode(done.header, memoryview(done.data), memoryview(target)) is PullResult.STALE


def test_missing_library_makes_blocks_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    coders, spec = Coders(), spec_of()
    coders.learn(spec)
    block = block_of(PAYLOAD)
    block = type(block)(block.key, len(PAYLOAD), block.digest, 0, block.route, 0, spec.fingerprint.digest[:16])
    done = coders.make("planes").encode(block, memoryview(PAYLOAD))
    assert done is not None and done.header.codec
    monkeypatch.setitem(__import__("sys").modules, "blosc2", None)
    reader = coders.make("none")
    result = reader.decode(done.header, memoryview(done.data), memoryview(bytearray(len(PAYLOAD))))
    assert result is PullResult.STALE and reader.counters() == {"codec_key_unknown": 1}


def test_engine_without_numbers_teaches_nothing() -> None:
    coders = Coders()
    spec = EngineSpec(b"e" * 16, "m", Fingerprint.of({"model": "m"}), SlotLayout(1, 1, 64, 16))
    coders.learn(spec)
    assert coders.numbers_of(spec.fingerprint.digest[:16]) is None


@pytest.mark.parametrize("setting", ["none+planes", "planes+planes", "auto+planes", "aesgcm+planes"])
def test_setting_in_a_wrong_order_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="codec"):
        split_setting(setting)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("aesgcm", "needs a key: set codec_key_file"),
        ("aes-gcm", "no package offers.*built in: none, auto, aesgcm, int8, planes"),
    ],
)
def test_codec_that_cannot_be_used_is_refused_at_the_start(setting: str, says: str) -> None:
    check_codecs(["none", "planes", "auto+aesgcm", "int8"], has_keys=True)
    with pytest.raises(ConfigError, match=says):
        check_codecs([setting], has_keys=False)
