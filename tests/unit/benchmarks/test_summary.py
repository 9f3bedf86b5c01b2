"""Results become a table, with a plot of what is measured beside a limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.report import RESULTS
from benchmarks.summary import PLOT, READERS, write


def test_every_result_that_is_there_is_in_the_table(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    text = write(tmp_path).read_text()
    for path in tmp_path.glob("*.json"):
        document = json.loads(path.read_text())
        assert f"## {path.stem}\n\n`{document['command']}` at {document['commit']}" in text
    assert set(READERS) <= {json.loads(path.read_text())["benchmark"] for path in tmp_path.glob("*.json")}
    assert (tmp_path / PLOT).stat().st_size > 10_000


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"benchmark": "transfer_bandwidth", "figures": {}}'])
def test_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ValueError, match=r"odd\.json is no result"):
        write(tmp_path)
