"""The site builds without a warning, has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import redirects

ROOT = Path(__file__).resolve().parents[2]
ZENSICAL = ROOT / ".venv-docs" / "bin" / "zensical"
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"?(https?://[^\s\">]+)")
# The offline search's, for pages that are opened from a folder by a browser without workers there.
ALLOWED = {"https://unpkg.com/iframe-worker/shim"}


@pytest.mark.skipif(not ZENSICAL.exists(), reason="`make .venv-docs/.installed` makes what builds the site")
def test_the_site_builds_strictly_and_is_whole(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = [ZENSICAL, "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    site = tmp_path / "build" / "site"
    names = [path.relative_to(tmp_path / "docs") for path in (tmp_path / "docs").rglob("*.md")]
    pages = [name.with_name("index.html") if name.name == "README.md" else name.with_suffix(".html") for name in names]
    missing = [page for page in pages if not (site / page).exists()]
    assert missing == []
    loaded = {found for page in site.rglob("*.html") for found in LOADED.findall(page.read_text())}
    assert loaded <= ALLOWED
    assert list(site.rglob("search*")), "the index of the search"
    redirects.write(site)
    for old, new in redirects.MOVED.items():
        moved = (site / old).with_suffix(".html")
        (target,) = re.findall(r'href="([^"]+)">', moved.read_text().split("<p>")[1])
        assert (moved.parent / target).resolve() == (site / new).with_suffix(".html").resolve()


@pytest.mark.skipif(not ZENSICAL.exists(), reason="`make .venv-docs/.installed` makes what builds the site")
def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[gone](nowhere.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nsite_dir: site\n")
    built = subprocess.run([ZENSICAL, "build", "--strict"], cwd=tmp_path, capture_output=True, timeout=240)
    assert built.returncode != 0
