"""A policy, a tier and a codec of another package, really installed: found by entry points, used, refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvservice.client.shard import ShardClient
from kvservice.codec import base as codec_base
from kvservice.codec.base import Codec
from kvservice.core.block.numbers import Numbers
from kvservice.core.events import PullResult
from kvservice.core.segment.blockfile import FILE_HEADER_BYTES
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.errors import ConfigError
from kvservice.plugins import CODECS, TIERS, PluginGroup, load, methods_of
from kvservice.pool.coders import Coders, find_codec
from kvservice.pool.eviction import find_policy
from kvservice.pool.tier_factory import find_tier, make_tier
from kvservice.pool.tier_specs import TierSpec
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.codec_contract import CodecContract
from kvservice.testing.eviction_contract import ChainEvictionContract
from kvservice.testing.tier_contract import StartedTier, some
from kvservice.tier import base as tier_base
from kvservice.tier.base import Tier, WriteResult
from kvservice.units import BlockKey, MiB
from tests.integration.engine import LAYOUT, Engine, chain

SOURCE = Path(__file__).parent / "first_in"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and its metadata, as pip leaves them."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(SOURCE, folder / "source")  # building leaves files beside the source
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-index", "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(site))
    return site


class TestInstalledPolicy(ChainEvictionContract):
    @pytest.fixture
    def policy(self, installed: Path) -> EvictionPolicy:
        return find_policy("first-in")()


def searching(site: Path) -> dict[str, str]:
    """The variable with which other processes find the package."""
    return {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}


async def stored_first_is_still_there(site: Path, eviction: str) -> bool:
    """Store a prompt, use it, then store more prompts than the pool holds."""
    variables = {**searching(site), "KVSERVICE_EVICTION": eviction}
    with LocalCluster(1, 0, pool_bytes=16 * MiB, transport="shm", environment=variables) as cluster:
        engine = await Engine.attach(ShardClient(cluster.socket("n0")))
        first = chain(seed=1, count=4)
        await engine.store(first)
        for seed in range(2, 2 + 16 * MiB // (8 * LAYOUT.payload_bytes)):
            await engine.store(chain(seed, count=8))
            await engine.read_all(first)
        found = len((await engine.read_all(first)).blocks)
        engine.let_go()
        await engine.pool.close()
        return found == len(first)


@pytest.mark.parametrize(("eviction", "stays"), [("first-in", False), ("lru", True), ("default", True)])
async def test_shard_evicts_by_the_policy_of_its_setting(site: Path, eviction: str, stays: bool) -> None:
    """A prompt that is used all the time stays under our policies, and goes first under the installed one."""
    assert await stored_first_is_still_there(site, eviction) is stays


def test_shard_with_a_policy_of_another_version_does_not_start(site: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvservice", "shard", "--node", "n0", "--eviction", "of-tomorrow"],
        env={**os.environ, **searching(site), "KVSERVICE_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "'of-tomorrow' of kvservice-first-in 1.0 is written for interface version 2" in done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("of-tomorrow", "interface version 2, and this kvservice calls version 1"),
        ("half", "has no method " + ", ".join(methods_of(EvictionPolicy))),
        ("broken", "cannot be imported: AttributeError"),
        ("clock", "installed in group kvservice.eviction: broken, first-in, half, of-tomorrow"),
    ],
)
def test_policy_that_does_not_fit_is_refused_by_name(installed: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        find_policy(name)
    assert repr(name) in refused.value.message


def test_two_packages_that_offer_one_name_are_both_named(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = installed.glob("*.dist-info")
    other = shutil.copytree(found, tmp_path / "other_first_in-2.0.dist-info")
    metadata = (other / "METADATA").read_text()
    (other / "METADATA").write_text(metadata.replace("Name: kvservice-first-in", "Name: other-first-in"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"kvservice-first-in 1\.0 and other-first-in 1\.0 both offer"):
        find_policy("first-in")


# -- tiers and codecs ----


class TestInstalledCodec(CodecContract):
    @pytest.fixture
    def codec(self, installed: Path) -> Codec:
        return find_codec("backwards")

    @pytest.fixture
    def numbers(self) -> Numbers:
        return Numbers("float32", 4, 64)


class DictPlace:
    def __init__(self, name: str) -> None:
        self._spec = TierSpec("objects", f"dict://{name}", 0, "evicted", "backwards", "ours")

    def make(self) -> Tier:
        return make_tier(self._spec, Coders())

    @property
    def _files(self) -> dict[BlockKey, bytes]:
        files: dict[BlockKey, bytes] = self.make().files  # type: ignore[attr-defined]
        return files

    def take(self, key: BlockKey) -> bytes | None:
        return self._files.get(key)

    def put(self, key: BlockKey, data: bytes) -> None:
        self._files[key] = data


def test_installed_tier_keeps_blocks_as_an_installed_codec_does(installed: Path, tmp_path: Path) -> None:
    place = DictPlace(tmp_path.name)
    tier = StartedTier(place.make())
    block, payload = some(1)
    assert tier.write((block, payload)) == (WriteResult.OK,)
    stored = place.take(block.key)
    assert stored is not None and stored[FILE_HEADER_BYTES:] == payload[::-1]
    assert tier.result_of(block) is PullResult.OK
    place.put(block.key, stored[:-1] + bytes([stored[-1] ^ 1]))
    assert tier.result_of(block) is not PullResult.OK
    tier.close()


def test_shard_with_a_tier_of_another_version_does_not_start(site: Path, tmp_path: Path) -> None:
    for name, value, says in (
        ("OBJECTS_URL", "tomorrow://x", "tier 'tomorrow' of kvservice-first-in 1.0 is written for interface version 2"),
        ("OBJECTS_CODEC", "tomorrow", "codec 'tomorrow' of kvservice-first-in 1.0 is written for interface version 2"),
    ):
        variables = {"KVSERVICE_OBJECTS_URL": "dict://x", f"KVSERVICE_{name}": value}
        done = subprocess.run(
            [sys.executable, "-m", "kvservice", "shard", "--node", "n0"],
            env={**os.environ, **searching(site), **variables, "KVSERVICE_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2 and says in done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("misnamed", "calls itself 'forwards'"),
        ("half", "has no method decode"),
        ("nobody", "installed in group kvservice.codecs: backwards, half, misnamed, tomorrow"),
    ],
)
def test_codec_that_does_not_fit_is_refused_by_name(installed: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        find_codec(name)
    assert repr(name) in refused.value.message


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("half://x", "tier 'half' has no method start, write, read, erase, probe, counters, close"),
        ("nobody://x", "installed in group kvservice.tiers: dict, half, tomorrow"),
    ],
)
def test_tier_that_does_not_fit_is_refused_by_name(installed: Path, url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_tier(url)


def test_our_own_schemes_are_no_plugins() -> None:
    assert [find_tier(f"{scheme}://x") for scheme in ("s3", "gs", "file")] == [None] * 3


def test_groups_have_the_versions_of_their_interfaces() -> None:
    assert (TIERS.interface_version, CODECS.interface_version) == (
        tier_base.INTERFACE_VERSION,
        codec_base.INTERFACE_VERSION,
    )


@pytest.mark.parametrize("group", [TIERS, CODECS], ids=["tiers", "codecs"])
def test_group_without_packages_says_that_none_is_installed(group: PluginGroup) -> None:
    with pytest.raises(ConfigError, match=f"installed in group {group.name}: none"):
        load(group, "s3", ("none",))
