"""`kvservice tier check`: whether the blocks in the folder of a disk tier are whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvservice.cli.exits import ExitCode
from kvservice.cli.output import Format, show
from kvservice.cli.tree import Output, command, new_tree

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvservice.tier.folder_check import FolderCheck

app = new_tree("Look at what a tier keeps on this machine.")
NAMES_SHOWN = 3  # of each kind of finding, for people; -o json has all of them
MEANINGS = {  # attribute of FolderCheck -> what it is, and what becomes of it
    "missing": "named by the index, without a file; the next start forgets them",
    "orphaned": "not named by the index; the next start reads their headers",
    "differing": "named by the index with other contents; they are what their files say",
    "damaged": "wrong header, length or digest; they are removed when they are read",
    "other_versions": "written by another version; the next start removes them",
    "unreadable": "cannot be opened or read; look at the kernel's log",
}


@command(
    app,
    None,
    "kvservice tier check /mnt/nvme/kvservice/default/n0",
    "kvservice tier check /mnt/nvme/kvservice/default/n0 -o json",
)
def check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of one node: disk_path/SERVICE/NODE.")],
    output: Output = Format.TABLE,
) -> None:
    """Check the files and the index of a disk tier.

    It reads every file and changes nothing. The node must not run. Exits with 1 if anything is wrong."""
    from kvservice.cli.progress import Progress
    from kvservice.tier.folder_check import check_folder

    def gather() -> FolderCheck:
        with Progress("checking") as progress:
            return check_folder(path, lambda done, count: progress.update("block files", done, count))

    if not show(gather, _draw, output).is_sound:
        raise typer.Exit(ExitCode.PROBLEM)


def _draw(found: FolderCheck, wide: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from kvservice.units import format_bytes

    lines = [f"{found.path}: {found.blocks} whole blocks, {format_bytes(found.bytes)}; index: {found.index}"]
    if found.encoded:
        lines.append(f"{found.encoded} of them are encoded: their digest is checked when they are read")
    if found.unfinished:
        lines.append(f"{found.unfinished} unfinished: were being written; the next start removes them")
    for name, meaning in MEANINGS.items():
        keys = getattr(found, name)
        if keys:
            lines.append(f"{len(keys)} {name.replace('_', ' ')}: {meaning}")
            lines += [f"  {key}" for key in (keys if wide else keys[:NAMES_SHOWN])]
            if not wide and len(keys) > NAMES_SHOWN:
                lines.append(f"  and {len(keys) - NAMES_SHOWN} more: -o wide, -o json")
    return Group(*(Text(line) for line in lines))
