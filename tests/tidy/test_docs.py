"""The pages: the architecture is short, its file names are there, every decision is listed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.check_links import FENCE, pages
from scripts.redirects import MOVED

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
WORDS_MAX = 1500  # of a page: what one reads in one sitting
LINE_CHARS_MAX = 120
FIGURES = re.compile(r"<!-- figures:.*?<!-- /figures -->", re.DOTALL)  # written by `make figures`
MADE = "<!-- Made from "  # by `make docs-reference`
# Written later, or a label in a hash.
MADE_UP = re.compile(r"^benchmarks/results/(gpu|local)/|^kvservice/(group|[a-z-]+/\d)$")
BARE_NAME = re.compile(r"pip3? install\s+(?:-\S+\s+)*['\"]?kvservice(?!\S*(?: @ |\.whl))")
CODE_PATH = re.compile(r"`((?:kvservice|actors|protos|tests|helm|benchmarks|examples|scripts)/[\w/.-]*)`")


def test_a_page_is_read_in_one_sitting() -> None:
    """Words outside of blocks. What is made from the code or from results is looked up, not read."""
    words = {
        page.relative_to(DOCS).as_posix(): len(FIGURES.sub("", FENCE.sub("", page.read_text())).split())
        for page in sorted(DOCS.rglob("*.md"))
        if MADE not in page.read_text()
    }
    assert not {name for name, count in words.items() if count > WORDS_MAX}


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r"(?:: |- )([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_a_page_that_moved_leads_to_one_that_is_there() -> None:
    assert [old for old in MOVED if (DOCS / old).exists()] == []
    assert [new for new in MOVED.values() if not (DOCS / new).is_file()] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_no_link_leaves_the_pages_of_the_site(page: Path) -> None:
    """A file outside of docs/ is named as code: the site does not have it."""
    targets = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", FENCE.sub("", page.read_text()))
    assert [one for one in targets if not (page.parent / one).resolve().is_relative_to(DOCS)] == []


def test_nothing_tells_to_install_by_the_bare_name() -> None:
    """The name is on no package index: who installs by it gets something else, or nothing."""
    tracked = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    tracked += [path for folder in ("kvservice", "actors", "helm", "examples") for path in (ROOT / folder).rglob("*")]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in tracked
        if path.suffix in (".md", ".py", ".txt", ".yaml", ".tpl") and path.is_file()
        for match in BARE_NAME.finditer(path.read_text())
    ]
    assert found == []


def test_no_page_names_the_wheel_by_its_tag() -> None:
    """With a compiler it is one of a platform and a Python, without one of any."""
    named = [page.name for page in pages(ROOT) if re.search(r"kvservice-\d\S*\.whl", page.read_text())]
    assert named == []


def test_every_page_of_docs_is_linked() -> None:
    linked = {
        (page.parent / target).resolve()
        for page in pages(ROOT)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
        if "://" not in target
    }
    assert [page.relative_to(ROOT).as_posix() for page in sorted(DOCS.rglob("*.md")) if page not in linked] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = {path for path in CODE_PATH.findall(page.read_text()) if not MADE_UP.search(path)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_architecture_names_every_package() -> None:
    text = (DOCS / "ARCHITECTURE.md").read_text()
    packages = sorted(path.parent.name for path in (ROOT / "kvservice").glob("*/__init__.py"))
    assert [name for name in packages if f"kvservice/{name}/" not in text and f"kvservice/{name} " not in text] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_lines_of_pages_fit_a_screen(page: Path) -> None:
    """Rows of tables, code and what is generated may be longer."""
    lines = FIGURES.sub("", FENCE.sub("", page.read_text())).splitlines()
    long = [
        line
        for line in lines
        if len(line) > LINE_CHARS_MAX and not line.startswith(("|", "![")) and " " in line.strip()
    ]
    assert MADE in page.read_text() or not long


def test_every_decision_is_in_the_list_with_its_title() -> None:
    rows = re.findall(
        r"^\| \[(\d+)\]\((\S+)\) \| (.+) \|$", (DOCS / "decisions" / "README.md").read_text(), re.MULTILINE
    )
    titles = [re.match(r"# (\d+)\. (.+)\n", page.read_text()) for page in DECISIONS]
    found = [(page.name[:4], page.name, title[2]) for page, title in zip(DECISIONS, titles, strict=True) if title]
    assert rows == found
    assert [number for number, _, _ in found] == [f"{index:04}" for index in range(1, len(DECISIONS) + 1)]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name[:4])
def test_a_decision_says_what_was_not_done_and_what_follows(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
    assert headings == ["Context", "Decision", "Instead of", "Consequences"]


# Where it is said, for all pages, that no GPU has run the CUDA side; and what sums up what has been seen at all.
GPU_STATUS = "docs/reference/limits.md"
SUMMARIES = {"README.md", "docs/index.md", "docs/seen-working.md", "docs/reference/sharing.md", "docs/kubernetes.md"}
NO_GPU_YET = re.compile(
    r"(?i)\b(?:not|never|nothing|no one|no row)\b[^.|#]{0,60}\b(?:run|ran|seen|measured)\b[^.|#]{0,30}\ba GPU"
)


def test_one_page_says_that_no_gpu_has_run_it() -> None:
    """Until a committed result of `make gpu` on a real driver makes every such sentence wrong."""
    sources = [path for folder in ("kvservice", "actors") for path in (ROOT / folder).rglob("*.py")]
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md"), *sources]
    saying = {
        path.relative_to(ROOT).as_posix()
        for path in texts
        if MADE not in (text := path.read_text(encoding="utf-8")) and NO_GPU_YET.search(" ".join(text.split()))
    }
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results" / "gpu").glob("part*.json")]
    if any(result["figures"].get("driver") == "cuda" for result in results):
        assert saying == set(), "a GPU has run it: take the sentence out"
    else:
        assert GPU_STATUS in saying and saying <= SUMMARIES | {GPU_STATUS}
