"""How commands print: tables for people, JSON and YAML for programs, once or again and again.

A command gathers its data in one function and draws it in another. It calls `show`, and has all formats and `--watch`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from kvservice.errors import KVServiceError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 120  # Characters a line if the output is no terminal, so that tables in files and pipes are not cut.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # why a file cannot take more of what is printed

T = TypeVar("T")


class Format(str, Enum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_for_people(self) -> bool:
        return self in (Format.TABLE, Format.WIDE)


def console(*, stderr: bool = False, width_min: int = 0) -> Console:
    """A console that makes lines of PLAIN_WIDTH characters if it writes to no terminal. A terminal of fewer than
    `width_min` characters wraps the lines itself."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    made = Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)
    made.width = max(made.width, width_min)
    return made


def drop_output() -> None:
    """Call it when stdout takes no more, as when `head` has gone: what is printed from here on, also at the end of
    Python, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_reader_gone() -> bool:
    """Whether nobody reads stdout any more. A command that may print nothing for hours must ask."""
    waiting = select.poll()
    waiting.register(sys.stdout.fileno(), 0)
    return bool(waiting.poll(0))


def show(
    gather: Callable[[], T],
    draw: Callable[[T, bool], RenderableType],
    form: Format = Format.TABLE,
    watch: float | None = None,
    data: Callable[[T], Any] | None = None,
    width_min: int = 0,
) -> T:
    """Gather and print, with `watch` again after so many seconds until Ctrl-C. Blocks. Returns what was gathered last.

    Args:
        gather: may block for RPCs, and raise KVServiceError. While watching, that error is shown and asked again.
        draw: makes what people see; its second argument is True if they want every column.
        data: dicts and lists with stable keys, for JSON and YAML. Default: the fields of a dataclass.
        width_min: what the tables need; made for less, they would lose columns and the ends of numbers.
    """
    as_data = data or plain_data
    found = gather()
    if watch is None:
        write(found, draw, form, as_data, width_min=width_min)
    elif form.is_for_people and sys.stdout.isatty():
        found = _watch_on_screen(found, gather, lambda each: draw(each, form is Format.WIDE), watch)
    else:
        found = _watch_in_pipe(found, gather, draw, form, as_data, watch)
    return found


def write(
    found: T,
    draw: Callable[[T, bool], RenderableType],
    form: Format,
    data: Callable[[T], Any] | None = None,
    *,
    again: bool = False,
    width_min: int = 0,
) -> None:
    """Print once. With `again` it is one of many in a stream: JSON takes one line, YAML is a document of its own.

    Raises KVServiceError when stdout is a file on a full disk."""
    try:
        _write(found, draw, form, data, again, width_min)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _FULL:
            raise
        drop_output()  # or Python fails once more at its end
        raise KVServiceError(f"the output cannot be written: {error.strerror}") from error


def _write(
    found: T,
    draw: Callable[[T, bool], RenderableType],
    form: Format,
    data: Callable[[T], Any] | None,
    again: bool,
    width_min: int,
) -> None:
    if form.is_for_people:
        _print(draw(found, form is Format.WIDE), console(width_min=width_min))
        return
    values = (data or plain_data)(found)
    if form is Format.JSON:
        print(json.dumps(values) if again else json.dumps(values, indent=2), flush=again)
        return
    import yaml

    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=PLAIN_WIDTH)
    print(f"---\n{text}" if again else text, end="", flush=again)


def _print(picture: RenderableType, on: Console) -> None:
    """Without the blanks that Rich fills each line with: a terminal that is too narrow makes empty lines of them."""
    with on.capture() as caught:
        on.print(picture)
    on.file.write(re.sub(" +\n", "\n", caught.get()))
    on.file.flush()


def plain_data(found: Any) -> Any:
    return asdict(found) if is_dataclass(found) and not isinstance(found, type) else found


def _watch_on_screen(found: T, gather: Callable[[], T], draw: Callable[[T], RenderableType], seconds: float) -> T:
    """Redraw on the alternate screen. At the end the last picture stays on the ordinary one."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    wrong = ""
    screen = console()

    def picture() -> Group:
        head = f"every {seconds:g} s; {datetime.now():%H:%M:%S}; Ctrl-C ends"
        return Group(Text(f"{head}  {wrong}".rstrip(), style="red" if wrong else "dim"), draw(found))

    try:
        with Live(picture(), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(seconds)
                try:
                    found, wrong = gather(), ""
                except KVServiceError as error:
                    wrong = error.message
                live.update(picture(), refresh=True)
    except KeyboardInterrupt:
        _print(draw(found), screen)
    return found


def _watch_in_pipe(
    found: T,
    gather: Callable[[], T],
    draw: Callable[[T, bool], RenderableType],
    form: Format,
    data: Callable[[T], Any],
    seconds: float,
) -> T:
    try:
        while True:
            write(found, draw, form, data, again=True)
            sys.stdout.flush()
            time.sleep(seconds)
            found = _gather_again(gather, found)
    except KeyboardInterrupt:
        return found
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        drop_output()
        return found


def _gather_again(gather: Callable[[], T], before: T) -> T:
    try:
        return gather()
    except KVServiceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return before
