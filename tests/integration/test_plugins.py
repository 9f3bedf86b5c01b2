"""A policy of another package, really installed: found by its entry point, used by a shard, refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvservice.client.shard import ShardClient
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.errors import ConfigError
from kvservice.plugins import CODECS, TIERS, PluginGroup, load
from kvservice.pool.eviction import METHODS, find_policy
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eviction_contract import ChainEvictionContract
from kvservice.units import MiB
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
        ("half", "has no method " + ", ".join(METHODS)),
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


@pytest.mark.parametrize("group", [TIERS, CODECS], ids=["tiers", "codecs"])
def test_group_without_packages_says_that_none_is_installed(group: PluginGroup) -> None:
    with pytest.raises(ConfigError, match=f"installed in group {group.name}: none"):
        load(group, "s3")
