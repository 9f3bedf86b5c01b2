"""`kvservice tier check`: whether the blocks in the folder of a disk tier are whole. `kvservice tier drift`: what int8
does to a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvservice.cli.exits import ExitCode
from kvservice.cli.output import Format, show
from kvservice.cli.tree import Output, command, new_tree
from kvservice.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvservice.engine.lossy import LossFigures
    from kvservice.tier.folder_check import FolderCheck

app = new_tree("Check a tier (blocks below the memory), and measure int8.")
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

    if not path.is_dir():
        raise ConfigError(f"{path} is no folder: name disk_path/SERVICE/NODE, with the disk_path of the node's shard")

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


@command(
    app,
    None,
    "kvservice tier drift models/SmolLM2-135M prompt.txt",
    "kvservice tier drift Qwen/Qwen3-8B prompt.txt --device cuda --tokens 4096",
)
def drift(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its name at Hugging Face.")],
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text as the model's users write it.")],
    tokens: Annotated[int, typer.Option(min=32, metavar="N", help="Most tokens of the text to use.")] = 1024,
    limit: Annotated[
        float, typer.Option(min=0.0, metavar="DRIFT", help="Exit with 1 if a block drifts further.")
    ] = 0.05,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where the model computes, as torch names it.")
    ] = "cpu",
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of its numbers; auto: as its weights are stored.")
    ] = "auto",
    output: Output = Format.TABLE,
) -> None:
    """Measure what int8 does to a model, without a service.

    The model continues a text twice: behind its exact K and V, and behind those that int8 gives back. Needs torch and
    transformers. Exits with 1 if a block drifts further than the limit, at which a service would switch int8 off."""

    def measure() -> LossFigures:
        try:
            from kvservice.engine.lossy import measure_int8
            from kvservice.engine.model import PagedModel
            from kvservice.serve.prompt_file import refuse_missing_folder
        except ModuleNotFoundError as error:
            raise ConfigError(f"this needs {error.name}: pip install torch transformers", key="model") from error
        refuse_missing_folder(model)
        try:
            words = text.read_text(encoding="utf-8")
            found = PagedModel.open(model, device=device, dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{str(error).splitlines()[0]}", key="model") from error
        return measure_int8(found, found.encode(words)[:tokens])

    found = show(measure, _draw_loss, output)
    if max(found.drift_keys, found.drift_values) > limit:
        raise typer.Exit(ExitCode.PROBLEM)


def _draw_loss(found: LossFigures, wide: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    kl = f"KL {found.kl_mean:.2g} nats in the mean, {found.kl_max:.2g} at most"
    lines = [
        f"int8 stores {found.stored_share:.1%} of the bytes of {found.prefix_tokens} tokens.",
        f"Drift of the worst block: K {found.drift_keys:.4f}, V {found.drift_values:.4f}.",
        f"The next {found.asked_tokens} tokens behind it: {kl}; "
        f"{found.same_first:.1%} have the same likeliest successor.",
    ]
    return Group(*map(Text, lines))
