"""Figures in README and docs come from the results in the tree, and none from a tree that nobody can check out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.committed import AGAIN, Results, Unclean, is_clean
from benchmarks.figures import BLOCKS, PAGES, rendered
from benchmarks.report import RESULTS, ROOT
from benchmarks.summary import TABLE, summary_of

DOCS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
UNCLEAN = {path.stem for path in RESULTS.glob("*.json") if not is_clean(json.loads(path.read_text()))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_results_say(page: Path) -> None:
    text = page.read_text()
    assert rendered(text, Results()) == text, "run `make figures`"


def test_the_table_of_results_has_all_of_them() -> None:
    assert (RESULTS / TABLE).read_text() == summary_of(RESULTS)[0], "run `make figures`"


def test_every_block_has_a_place() -> None:
    named = re.findall(r"<!-- figures: ([a-z-]+) -->", "".join(page.read_text() for page in PAGES))
    assert sorted(named) == sorted(BLOCKS)


def test_no_result_of_a_tree_with_uncommitted_changes_is_cited() -> None:
    """A page may name it where it says that it is to be measured again."""
    found = [
        f"{page.name}:{number}: {name}.json"
        for page in DOCS
        for number, line in enumerate(page.read_text().splitlines(), 1)
        for name in re.findall(r"([a-z0-9_]+)\.json", line)
        if name in UNCLEAN and AGAIN not in line.lower()
    ]
    assert not found


def test_a_figure_changes_with_its_result_and_cites_a_clean_one(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    results, path = Results(tmp_path), tmp_path / "peers.json"
    before = BLOCKS["peers"](results)
    document = json.loads(path.read_text())
    answer = document["figures"]["mooncake"]["lookup"]["512"]
    said, answer["p50_ms"] = f"`batch_is_exist` {answer['p50_ms']:.1f};", 77.7
    path.write_text(json.dumps(document))
    assert BLOCKS["peers"](results) == before.replace(said, "`batch_is_exist` 77.7;") != before
    path.write_text(json.dumps({**document, "commit": f"{document['commit']}-dirty"}))
    with pytest.raises(Unclean, match="to be measured again"):
        BLOCKS["peers"](results)
    assert AGAIN in rendered("<!-- figures: peers -->\n<!-- /figures -->", results).lower()


def test_a_table_names_the_processor_and_day_of_its_result(tmp_path: Path) -> None:
    document = json.loads((RESULTS / "peers.json").read_text())
    document |= {"date": "2020-01-02T00:00:00", "machine": {"cpu": "Other(R) Processor @ 1GHz", "cpu_count": 3}}
    (tmp_path / "peers.json").write_text(json.dumps(document))
    for name in ("bandwidth", "lookups"):
        assert f"{document['commit'][:7]}, 2020-01-02, 3 cores, Other 1GHz (`peers.json`)" in BLOCKS[name](
            Results(tmp_path)
        )
