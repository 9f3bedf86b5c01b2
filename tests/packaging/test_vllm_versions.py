"""What `make vllm-versions` says: nothing about the vLLM that is installed, and by name what another one changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.vllm_versions import BASES, SourceTree, compare, imports, installed

BASE, TIER = BASES["KVConnectorBase_V1"][0], BASES["SecondaryTierManager"][0]
ENVS = "vllm/envs.py"

pytestmark = pytest.mark.slow


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The installed vLLM, as links that a test may replace by texts of its own."""
    site = installed().site
    for file in {file for file, _, _ in BASES.values()} | {ENVS}:
        place = tmp_path / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text((site / file).read_text())
    for module, _ in imports():
        for file in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
            place = tmp_path / file
            if (site / file).is_file() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(site / file)
    folder = tmp_path / "vllm" / "config"
    folder.mkdir(exist_ok=True)
    for path in (site / "vllm" / "config").glob("*.py"):
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return tmp_path


def replaced(site: Path, file: str, before: str, after: str) -> SourceTree:
    text = (site / file).read_text()
    assert before in text
    (site / file).write_text(text.replace(before, after))
    return SourceTree(site)


def test_the_installed_vllm_fits_and_has_nothing_new() -> None:
    found = compare(installed(), installed())
    assert found.fits and not found.new and found.line("0.32.0") == "vLLM 0.32.0: fits"


@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        (BASE, "def wait_for_save(", "def wait_for_stores(", "KVConnectorBase_V1.wait_for_save is gone"),
        (
            TIER,
            "def drain_jobs(self)",
            "def drain_jobs(self, seconds)",
            "SecondaryTierManager.drain_jobs(self, seconds)",
        ),
        (TIER, "class JobResult", "class JobEnd", "vllm.v1.kv_offload.tiering.base.JobResult"),
        (ENVS, '"VLLM_BATCH_INVARIANT"', '"VLLM_OTHER_SUMS"', "undecided: VLLM_OTHER_SUMS"),
    ],
)
def test_what_another_version_breaks_is_named(other: Path, file: str, before: str, after: str, says: str) -> None:
    found = compare(installed(), replaced(other, file, before, after))
    assert not found.fits and says in found.line("0.99")


def test_a_new_hook_is_named_and_breaks_nothing(other: Path) -> None:
    hook = "    def wait_for_moon(self) -> None:\n        return\n\n    def wait_for_save("
    found = compare(installed(), replaced(other, BASE, "    def wait_for_save(", hook.replace("save(", "save(")))
    assert "KVConnectorBase_V1.wait_for_moon" in found.line("0.99")
