"""Rules of `kvservice replay`: one command, in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvservice.cli.exits import ExitCode
from kvservice.cli.main import app
from kvservice.replay.synthetic import Workload, make_trace


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "made-up.jsonl"
    numbers: dict[bytes, int] = {}
    with path.open("w") as file:
        for request in make_trace(Workload(seconds=200), 1).requests:
            row = {
                "timestamp": int(request.at * 1000),
                "input_length": request.tokens,
                "output_length": request.answer_tokens,
                "hash_ids": [numbers.setdefault(key, len(numbers)) for key in request.keys],
            }
            file.write(json.dumps(row) + "\n")
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    return found.exit_code, found.stdout, found.stderr


def test_a_replay_prints_one_row_for_each_way_and_draws_it(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "replay.png"
    code, out, _ = run(trace_file, "--capacity", 100, "--capacity", 400, "--nodes", 2, "--plot", plot)
    assert code == 0
    for row in ("default", "lru", "belady", "2 nodes, local only", "2 nodes, pooled, kv-aware", "12 GB/s"):
        assert row in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_share_of_a_disk_is_named_as_the_nodes_own(trace_file: Path) -> None:
    """On several nodes most of what disks add is read from those of others, which count as hits of other nodes."""
    options = ("--capacity", 100, "--nodes", 4, "--disk", 400)
    code, out, _ = run(trace_file, *options, "-o", "json")
    runs = json.loads(out)["runs"]
    pooled = {"nodes": 4, "pooled": True, "routing": "round-robin"}
    memory, disk = (row for row in runs if pooled.items() <= row.items())
    assert code == 0 and disk["hit_rate"] - memory["hit_rate"] > 2 * disk["disk_rate"] > 0
    assert "of own tier" in run(trace_file, *options)[1]


def test_json_has_stable_keys_and_the_warm_up_is_not_counted(trace_file: Path) -> None:
    options = ("--capacity", 400, "--nodes", 1, "--policy", "belady", "-o", "json")
    rates = []
    for warm_up in (0, 0.5):
        code, out, _ = run(trace_file, *options, "--warm-up", warm_up)
        found = json.loads(out)
        assert code == 0 and found["counted_from_request"] == int(found["requests"] * warm_up)
        assert {"trace", "blocks", "unique_blocks", "hit_rate_max", "runs", "fetch_or_recompute"} <= found.keys()
        rates.append(found["runs"][0]["hit_rate"])
    assert rates[1] > rates[0], "the first times are in the half that is not counted"


def test_wrong_input_is_named_with_its_line(tmp_path: Path, trace_file: Path) -> None:
    """Nothing else is printed."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text(trace_file.read_text().splitlines()[0] + "\n{}\n")
    code, out, errors = run(broken)
    assert (code, out) == (ExitCode.USAGE, "") and "line 2" in errors and "Traceback" not in errors
    code, _, errors = run(trace_file, "--policy", "best")
    assert code == ExitCode.USAGE and "--policy: there is no policy 'best'; choose from: default" in errors
    code, out, errors = run(tmp_path / "nope.jsonl")
    assert (code, out) == (ExitCode.USAGE, "") and "nope.jsonl: No such file" in errors


def test_a_plot_that_cannot_be_written_is_refused_at_once(trace_file: Path, tmp_path: Path) -> None:
    """A folder in its place stands for one without rights, which root does not know."""
    pytest.importorskip("matplotlib")
    (tmp_path / "replay.png").mkdir()
    code, out, errors = run(trace_file, "--plot", tmp_path / "replay.png")
    assert (code, out) == (ExitCode.USAGE, "") and "cannot be written: Is a directory; name another" in errors


def test_without_matplotlib_a_plot_is_refused_at_once(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is played."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, errors = run(trace_file, "--plot", "replay.png")
    assert (code, out) == (ExitCode.USAGE, "") and "pip install matplotlib" in errors
