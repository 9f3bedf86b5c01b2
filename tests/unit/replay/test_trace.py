"""Rules of kvservice.replay.trace and synthetic: a file that is not trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvservice.errors import InvalidRequest
from kvservice.replay import trace as traces
from kvservice.replay.synthetic import Workload, make_trace
from kvservice.replay.trace import read_trace

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}


def write(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_request_keeps_its_time_tokens_and_block_identity(tmp_path: Path) -> None:
    other = {**GOOD, "timestamp": 0, "hash_ids": [7, 9]}
    found = read_trace(write(tmp_path, GOOD, "", other))
    assert [request.at for request in found.requests] == [0.0, 1.5], "requests are in the order of their times"
    first, second = found.requests
    assert first.keys[0] == second.keys[0] and first.keys[1] != second.keys[1]
    assert (second.tokens, second.answer_tokens) == (600, 3)
    assert (found.block_count, found.unique_count, found.hit_rate_max) == (4, 3, 0.25)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        ({**GOOD, "timestamp": "soon"}, "timestamp"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp"),
        ({**GOOD, "timestamp": True}, "timestamp"),
        ({**GOOD, "timestamp": -1}, "timestamp"),
        ({**GOOD, "timestamp": 10**400}, "timestamp"),
        ({**GOOD, "input_length": 600.5}, "input_length"),
        ({**GOOD, "output_length": -1}, "output_length"),
        ({**GOOD, "input_length": 1025}, "do not fill 2 blocks"),
        ({**GOOD, "hash_ids": None}, "hash_ids"),
        ({**GOOD, "hash_ids": [1, "2"]}, "hash_ids"),
        ({**GOOD, "hash_ids": [1, True]}, "hash_ids"),
        ({**GOOD, "hash_ids": [1, 1 << 63]}, "hash_ids"),
        ({**GOOD, "hash_ids": [1, 1]}, "different ones"),
        ({**GOOD, "hash_ids": []}, "different ones"),
        ('"' + "x" * traces.LINE_BYTES_MAX + '"', "longer than"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(tmp_path: Path, row: object, said: str) -> None:
    with pytest.raises(InvalidRequest, match=r"line 2\b") as caught:
        read_trace(write(tmp_path, GOOD, row, GOOD))
    assert said in caught.value.message


def test_only_what_the_limit_asks_for_is_read(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, GOOD, GOOD, "{"), limit=2).requests) == 2


def test_a_trace_larger_than_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "BLOCKS_MAX", 3)
    with pytest.raises(InvalidRequest, match="--limit"):
        read_trace(write(tmp_path, GOOD, GOOD))
    monkeypatch.setattr(traces, "REQUESTS_MAX", 1)
    with pytest.raises(InvalidRequest, match="--limit"):
        read_trace(write(tmp_path, GOOD, GOOD))


def test_no_file_and_no_request_are_errors_that_say_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(InvalidRequest, match="has no request"):
        read_trace(write(tmp_path))


def test_a_made_up_trace_depends_on_its_seed_only() -> None:
    """Its conversations grow."""
    workload = Workload(seconds=300, scan_rate=0.2, chain_blocks_max=40)
    assert make_trace(workload, 3) == make_trace(workload, 3) != make_trace(workload, 4)
    found = make_trace(workload, 3)
    assert 0.2 < found.hit_rate_max < 0.9
    seen = {request.keys for request in found.requests}
    grown = [r for r in found.requests if any(r.keys[:n] in seen for n in range(5, len(r.keys)))]
    assert grown, "no turn extends an earlier one"
    assert all(len(request.keys) <= 40 and len(set(request.keys)) == len(request.keys) for request in found.requests)
