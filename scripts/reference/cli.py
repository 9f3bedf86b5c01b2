"""docs/reference/cli.md, and a page for each group of commands beside it, from the tree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import typer

from kvservice.cli.main import app
from kvservice.cli.tree import GROUPS, LeafWithSettings
from scripts.reference.markdown import cell

MADE = "<!-- Made from kvservice/cli by `make docs-reference`. Do not edit. -->"
COMMON = ("--service", "--lookup", "--output", "--watch")  # what `status` has of them is told once

HEAD = f"""# Command line

{MADE}

`kvservice` is one tree of commands; `python -m kvservice` is the same. Every command answers `-h` with its options and
examples. Results go to stdout; progress, logs and errors go to stderr. [Exit codes](errors.md#exit-codes) are the same
for all.

"""

COMMON_HEAD = """
## Options that many commands have

| option | meaning |
|---|---|
"""

FORMATS = """
`-o json` and `-o yaml` print all fields, with names that stay the same. With `--watch` they print one JSON object a
line, or one YAML document, each time. `-o wide` adds what the table leaves out.

## From another machine

Commands that ask a running service find the one of the machine that they run on. Those with `--lookup`, such as
`status`, `explain`, `warm`, `clear` and `drain`, reach it from any machine; there they need a certificate of the
service's CA. A client's certificate may ask; `drain`, `pin` and `clear` need one of a node:

```console
$ kvservice certs ./bastion --ca /etc/kvservice/tls --role client
$ export KVSERVICE_TLS_DIR=$PWD/bastion KVSERVICE_LOOKUP=10.0.0.5:7400,10.0.0.6:7400
$ kvservice status
```

One lookup partition is enough: each knows all nodes. `status` shows those that you name.

## Completion

`kvservice --install-completion` installs completion of commands, options and values for the shell that you use: bash,
zsh, fish or PowerShell. `kvservice --show-completion` prints it instead.
"""


def overview_page() -> str:
    root = tree()
    return overview({name: in_group(root, name) for name in GROUPS}, root.commands["status"])


def tree() -> Any:
    return typer.main.get_command(app)


def in_group(root: Any, name: str) -> list[Any]:
    return [each for each in root.commands.values() if each.rich_help_panel == name]


def overview(by_group: dict[str, list[Any]], status: Any) -> str:
    text = HEAD
    for group, commands in by_group.items():
        text += f"**[{group}](cli/{group.lower()}.md)**\n\n| command | what it does |\n|---|---|\n"
        for command in commands:
            target = f"cli/{group.lower()}.md#kvservice-{command.name}"
            text += f"| [`{command.name}`]({target}) | {summary(command)} |\n"
        text += "\n"
    text = text.rstrip("\n") + "\n" + COMMON_HEAD
    common = [each for each in status.params if each.opts[0] in COMMON]
    text += option_rows(each.get_help_record(typer.Context(status)) for each in common)
    return text + FORMATS


def group_page(group: str, commands: list[Any]) -> str:
    parts = [f"# Command line: {group.lower()}\n\n{MADE}\n"]
    for command in commands:
        below = getattr(command, "commands", None)
        if below is None:
            parts.append(section(command, f"kvservice {command.name}", "##"))
            continue
        parts.append(f"## kvservice {command.name}\n\n{inspect.cleandoc(command.help)}\n")
        parts += [section(each, f"kvservice {command.name} {each.name}", "###") for each in below.values()]
    return "\n".join(parts)


def section(command: Any, name: str, level: str) -> str:
    with typer.Context(command, info_name=name) as context:
        params = [each for each in command.params if not each.hidden]
        usage = " ".join([name, "[OPTIONS]", *(piece for each in params for piece in each.get_usage_pieces(context))])
        records = [each.get_help_record(context) for each in params if each.opts[0] not in COMMON]
    text = f"{level} {name}\n\n{prose(command.help)}\n\n"
    text += f"`{usage}`\n\n"
    rows = option_rows(records)
    if rows:
        text += f"| option | meaning |\n|---|---|\n{rows}\n"
    also = [f"`{each.opts[0]}`" for each in params if each.opts[0] in COMMON]
    if also:
        text += f"Also {', '.join(also)} ([common options](../cli.md#options-that-many-commands-have)).\n\n"
    if isinstance(command, LeafWithSettings):
        text += f"{settings_of(command)}\n\n"
    examples = "\n".join(f"$ {line}" for line in command.epilog.splitlines())
    return f"{text}```console\n{examples}\n```\n"


def settings_of(command: LeafWithSettings) -> str:
    """Which settings the command reads, in one sentence or two; the shorter of the two lists is told."""
    every = "Also every [setting](../settings.md), as an option of its name"
    used, unused = ([each.opts[0] for each in command.settings() if each.hidden is hidden] for hidden in (False, True))
    if not unused:
        return f"{every}."
    if len(unused) < len(used):
        return f"{every}; {listed(unused)} {'changes' if len(unused) == 1 else 'change'} nothing here."
    return f"{every}. It reads {listed(used)}; the others change nothing here."


def listed(options: list[str]) -> str:
    *first, last = [f"`{each}`" for each in options]
    return f"{', '.join(first)} and {last}" if first else last


def option_rows(records: Iterable[tuple[str, str] | None]) -> str:
    return "".join(f"| `{record[0]}` | {cell(record[1])} |\n" for record in records if record is not None)


def summary(command: Any) -> str:
    return inspect.cleandoc(command.help).partition("\n")[0]


def prose(text: str) -> str:
    return inspect.cleandoc(text)


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": overview_page,
    **{f"cli/{name.lower()}.md": lambda name=name: group_page(name, in_group(tree(), name)) for name in GROUPS},  # type: ignore[misc]
}
