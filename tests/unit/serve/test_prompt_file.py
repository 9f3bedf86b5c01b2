"""Which lines of a file are prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvservice.errors import ConfigError
from kvservice.serve.prompt_file import read_prompts


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"], ids=["line", "paragraph", "next-line"])
def test_a_line_ends_where_json_lines_end(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"one{separator}two"}, {"prompt": "three"}]
    path.write_text("\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert [question.text for question in read_prompts(path)] == [f"one{separator}two", "three"]
    path.write_text(f'["{separator}"]\n\n{{', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3"):
        read_prompts(path)


@pytest.mark.parametrize(
    "line",
    ["[1, -1]", "[4294967296]", "[" * 100_000, '{"messages": [{"role": "user"}], "chat_template_kwargs": [1]}'],
    ids=["negative", "large", "deep", "no-mapping"],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    """A token id out of range ended the command with a traceback, and so did what is nested too deep."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"[1, 2]\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)
