"""The program of docs/howto/replay-your-traffic.md, as a user copies it from the page."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvservice.replay.trace import BLOCK_TOKENS, read_trace

PAGE = Path(__file__).parents[3] / "docs/howto/replay-your-traffic.md"


class Tokenizer:
    """A token for each character."""

    @staticmethod
    def from_pretrained(name: str) -> Tokenizer:
        return Tokenizer()

    def encode(self, text: str) -> list[int]:
        return [ord(one) for one in text]


def test_the_program_of_the_page_makes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("transformers")
    library.AutoTokenizer = Tokenizer
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setattr(sys, "argv", ["make_trace.py", "any"])
    prompts = ["a" * 2 * BLOCK_TOKENS + "b", "a" * 2 * BLOCK_TOKENS, "c" * BLOCK_TOKENS + "a" * BLOCK_TOKENS]
    log = [{"seconds": 7.5 + at, "prompt": prompt, "answer_tokens": 3} for at, prompt in enumerate(prompts)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{json.dumps(row)}\n" for row in log)))
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    made = tmp_path / "trace.jsonl"
    with made.open("w") as file, contextlib.redirect_stdout(file):
        exec(program, {})
    first, second, other = read_trace(made).requests
    assert (first.at, second.at, first.tokens) == (0.0, 1.0, 2 * BLOCK_TOKENS + 1)
    assert first.keys[:2] == second.keys and not set(other.keys) & set(first.keys)
