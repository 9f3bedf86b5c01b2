"""What the steps of a demo write where there is no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from examples.demo.stage import Steps


def test_without_a_terminal_a_step_is_a_line_and_no_bar() -> None:
    out = io.StringIO()
    with Steps(Console(file=out), 2) as steps:
        steps.begin("question 1 to A")
        steps.begin("stopping")
    assert out.getvalue() == "… question 1 to A\n… stopping\n"
