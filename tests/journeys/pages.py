"""The steps of a journey, taken from the pages: which blocks are run or written, and what the commands should print.

A page marks a block that belongs to a journey with a comment on the line above it. Readers do not see the comment:

    <!-- journey: python -->
    ```console
    $ pip install kvservice.whl
    Successfully installed …
    ```

- A block with a title (```python title="first.py") is a file of this name, written into the journey's folder.
- A `console` block is typed. A line that begins with `$ ` is a command, which may go on behind a backslash or in lines
  that begin with `> `. The lines below a command are what it prints. Without a `$ ` in the block, each line is a
  command that may print anything.
- A `python` block without a title is run as a program. It prints the `text` block that follows, if one follows next.

Words in the comment behind the name, with commas: `in another terminal` opens a new shell in the folder of the first;
`stays` means that the last command of the block does not end by itself. It is interrupted, as by Ctrl-C, at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- journey: (?P<words>[^>]+) -->\n\Z")
TITLE = re.compile(r'title="([^"]+)"')
OPTIONS = ("in another terminal", "stays")
NUMBER = r"\d+(?:[.,]\d+)*"
# What varies from run to run, and what may stand there instead. A time or a speed may have another unit.
VARYING = {
    re.compile(rf"{NUMBER} ?{unit}\b"): rf"{NUMBER} ?{unit}" for unit in (r"(?:ms|m|s|µs|seconds)", r"[KMG]?i?B/s")
} | {
    re.compile(rf"{NUMBER}(?= GiB free\b)|(?<=pid ){NUMBER}"): NUMBER,
    re.compile(r"\b[0-9a-f]{8,}\b"): r"[0-9a-f]+",  # a random name
}


@dataclass(frozen=True, slots=True)
class Command:
    text: str  # may have several lines
    output: str | None  # what the page shows below it; None: nothing is shown, so anything may be printed


@dataclass(frozen=True, slots=True)
class Step:
    """One marked block."""

    page: Path
    line: int  # of the block's first line in the page
    commands: tuple[Command, ...] = ()
    file: str = ""  # not empty: the block is this file
    content: str = ""
    new_terminal: bool = False
    stays: bool = False

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def steps_of(name: str, pages: Iterable[Path]) -> list[Step]:
    """The steps of a journey in the order of the pages and of their blocks. Raises ValueError for an unknown word in a
    mark, or a journey without steps."""
    found = [step for page in pages for step in _steps(name, page)]
    if not found:
        raise ValueError(f"no page has a block of the journey {name!r}")
    return found


def _steps(name: str, page: Path) -> list[Step]:
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    found: list[Step] = []
    for number, fence in enumerate(fences):
        mark = MARK.search(text, 0, fence.start())
        if mark is None:
            continue
        journey, *options = [word.strip() for word in mark["words"].split(",")]
        if unknown := set(options) - set(OPTIONS):
            raise ValueError(f"{page}: a journey's mark says {', '.join(sorted(unknown))}; known: {', '.join(OPTIONS)}")
        if journey != name:
            continue
        following = fences[number + 1] if number + 1 < len(fences) else None
        step = _step(page, text.count("\n", 0, fence.start()) + 1, fence, following)
        found.append(replace(step, new_terminal=OPTIONS[0] in options, stays=OPTIONS[1] in options))
    return found


def _step(page: Path, line: int, fence: re.Match[str], following: re.Match[str] | None) -> Step:
    language, content = fence["info"].split(" ")[0], fence["text"]
    if title := TITLE.search(fence["info"]):
        return Step(page, line, file=title[1], content=content)
    if language == "console":
        return Step(page, line, commands=tuple(commands_of(content)))
    if language == "python":
        program = f"python - <<'END OF THE BLOCK'\n{content}END OF THE BLOCK"
        output = following["text"] if following is not None and following["info"].split(" ")[0] == "text" else None
        return Step(page, line, commands=(Command(program, output),))
    raise ValueError(f"{page}:{line}: a journey runs console and python blocks and writes those with a title")


def commands_of(block: str) -> list[Command]:
    """The commands of a console block with what each should print."""
    lines = block.splitlines()
    has_prompts = any(line.startswith("$ ") for line in lines)
    found: list[Command] = []
    going_on = False
    for line in lines:
        if going_on:
            before = found[-1]
            found[-1] = replace(before, text=f"{before.text}\n{line.removeprefix('> ')}")
        elif line.startswith("$ ") or (not has_prompts and line.strip() and not line.startswith("#")):
            found.append(Command(line.removeprefix("$ "), None))
        elif found and has_prompts:
            before = found[-1]
            if line.startswith("> ") and before.output is None:
                found[-1] = replace(before, text=f"{before.text}\n{line[2:]}")
            else:
                found[-1] = replace(before, output=f"{before.output or ''}{line}\n")
        going_on = bool(found) and found[-1].output is None and found[-1].text.endswith("\\")
    return found


def prints(expected: str, actual: str, *, so_far: bool = False) -> bool:
    """Whether a command printed what its page shows. `…` stands for any text in a line, a line of `…` for any lines.

    Figures with a unit of time or speed, random names, process ids and the width of columns may differ. With `so_far`
    the command may have printed more lines below.
    """
    wanted = [line.rstrip() for line in expected.strip().splitlines()]
    pattern = "\n".join(_pattern(line) for line in wanted)
    text = "\n".join(line.rstrip() for line in actual.strip().splitlines())
    return re.fullmatch(pattern + r"(?:\n(?:.*\n)*.*)?" if so_far else pattern, text) is not None


def _pattern(line: str) -> str:
    if line.strip() == "…":
        return r"(?:.*\n)*?.*"
    parts = re.split(r"(…)", line)
    return "".join(".*" if part == "…" else _literal(part) for part in parts)


def _literal(text: str) -> str:
    """A regular expression for this text in which what varies from run to run is left open."""
    found = [
        (match.start(), match.end(), other) for varying, other in VARYING.items() for match in varying.finditer(text)
    ]
    parts, at = [], 0
    for begin, end, other in sorted(found):
        if begin >= at:
            parts += [re.escape(text[at:begin]), other]
            at = end
    return re.sub(r"(\\ ){2,}", " +", "".join([*parts, re.escape(text[at:])]))
