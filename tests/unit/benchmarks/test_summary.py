"""Results become a table in which goals that were missed are seen."""

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


def test_missed_goal_says_no(tmp_path: Path) -> None:
    document = json.loads((RESULTS / "local_bandwidth.json").read_text())
    ways = {"store": {"gb_per_second": 1.0, "memcpy_gb_per_second": 2.0, "ratio": 0.5}}
    ways["load"] = {"gb_per_second": 1.9, "memcpy_gb_per_second": 2.0, "ratio": 0.95}
    (tmp_path / "local_bandwidth.json").write_text(json.dumps({**document, "figures": {"2048 KiB": ways}}))
    lines = write(tmp_path).read_text().splitlines()
    assert "| store, 2048 KiB | 1.00 GB/s | memcpy 2.00 | 0.50 | no |" in lines
    assert "| load, 2048 KiB | 1.90 GB/s | memcpy 2.00 | 0.95 | yes |" in lines


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"benchmark": "transfer_bandwidth", "figures": {}}'])
def test_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ValueError, match=r"odd\.json is no result"):
        write(tmp_path)
