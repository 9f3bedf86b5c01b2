"""What README and the pages tell to type exists: commands, their options, extras, and the connector's options."""

from __future__ import annotations

import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomllib
import typer.main

from kvservice.cli.main import app
from kvservice.connector.offloading.options import TierOptions
from kvservice.connector.options import ConnectorOptions
from kvservice.connector.sglang.options import SGLangOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
README_LINES_MAX = 120
BLOCK = re.compile(r"^ *```(?:console|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^|[;&|($`] *|=\S* )(kvservice [a-z][^`\n;&|>]*)", re.MULTILINE)
CONFIG = re.compile(r"--kv-transfer-config\s+'(\{.*?\})'(?=\s|$)", re.DOTALL)
EXTRAS = re.compile(r"\bkvservice(?:-\S+\.whl)?\[([\w,]+)\]")
STORAGE = re.compile(r"--hicache-storage-backend-extra-config\s+'(\{.*?\})'(?=\s|$)", re.DOTALL)
ELISION = "…"
# README's blocks and who runs them.
RUN_BY = {
    "kvservice demo": "tests/packaging/test_wheel.py",
    "make demo": "tests/ray/test_demo.py",
    "vllm serve MODEL": "this file: it needs a GPU",
    "make install model": "tests/vllm/test_readme.py",
    "curl -s": "tests/vllm/test_readme.py",
}


def inner(command: Any) -> dict[str, Any]:
    """The commands below one; none below one that is run."""
    return dict(getattr(command, "commands", {}))


@cache
def tree() -> Any:
    return typer.main.get_command(app)


def joined(text: str) -> str:
    """Commands that go on behind a backslash or in lines with `> `, in one line."""
    return re.sub(r"\\\n\s*(?:> +)?|\n> +", " ", text)


def unknown(words: list[str]) -> str:
    """What of this call there is not; empty when all of it is there."""
    found = tree()
    rest = list(words)
    while rest and rest[0] in inner(found):
        found = inner(found)[rest.pop(0)]
    if inner(found) and len(words) > 1:
        return " ".join(words)
    known = {
        option
        for parameter in found.get_params(typer.Context(found))
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {"--help", "-h"}
    given = [word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return ", ".join(f"{found.name} {option}" for option in given if option not in known)


def calls(text: str) -> list[str]:
    """Every call of `kvservice` in the page, in blocks and in the text."""
    found = []
    for match in CALL.finditer(re.sub(r" +#.*$", "", joined(text), flags=re.MULTILINE)):
        found.append(match[1].strip())
    return found


@each_page
def test_commands_and_options_of_the_page_exist(page: Path) -> None:
    wrong = []
    for call in calls(page.read_text()):
        words = [word.strip(",.:)") for word in call.replace("[", " ").replace("]", " ").split()[1:]]
        if ELISION in call or not re.fullmatch(r"[a-z-]+", words[0]):
            words = [word for word in words if ELISION not in word]
        if words and words[0] in inner(tree()) and (missing := unknown(words)):
            wrong.append(f"{call}: {missing}")
    assert wrong == []


@each_page
def test_every_engine_is_started_with_options_that_exist(page: Path) -> None:
    for found in CONFIG.findall(joined(page.read_text())):
        if ELISION in found:
            continue
        config = json.loads(found)
        if config["kv_connector"] == "OffloadingConnector":
            (tier,) = config["kv_connector_extra_config"]["secondary_tiers"]
            assert (tier.pop("type"), tier.pop("module_path")) == ("KVServiceTier", "kvservice.connector.offloading")
            TierOptions(**tier)
            continue
        assert config["kv_connector"] == "KVServiceConnector"
        assert config["kv_connector_module_path"] == "kvservice.connector.vllm"
        assert config["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
        ConnectorOptions.parse(config.get("kv_connector_extra_config", {}))


@each_page
def test_every_storage_of_sglang_has_options_that_exist(page: Path) -> None:
    for found in STORAGE.findall(joined(page.read_text())):
        config = json.loads(found)
        assert config["module_path"] == "kvservice.connector.sglang" and config["class_name"] == "HiCacheKVService"
        assert config.pop("hicache_storage_pass_prefix_keys")
        SGLangOptions.parse(config)


@each_page
def test_extras_that_a_page_names_exist(page: Path) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for found in EXTRAS.findall(page.read_text()) for extra in found.split(",")}
    assert named <= set(known)


def test_readme_is_short_and_somebody_runs_each_of_its_blocks() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES_MAX
    blocks = BLOCK.findall(text)
    assert len(blocks) == len(RUN_BY)
    for block, what in zip(blocks, RUN_BY, strict=True):
        assert what in block


def test_an_engine_with_a_gpu_is_started_as_one_without() -> None:
    """The options of the line that no test can run are among those of the line that one runs."""
    with_gpu, without = (joined(block) for block in BLOCK.findall((ROOT / "README.md").read_text())[2:4])
    options = [
        {word for word in shlex.split(text[text.index("vllm serve") :]) if word.startswith("--")}
        for text in (with_gpu, without)
    ]
    assert options[0] <= options[1]
    assert CONFIG.findall(with_gpu) == CONFIG.findall(without)


def test_options_that_show_their_own_name_are_named() -> None:
    """Typer 0.27 takes the metavar of an unnamed option for its name if they are alike: --node became --NODE."""
    unnamed = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / "kvservice" / "cli").rglob("*.py"))
        for argument in ast.walk(ast.parse(path.read_text()))
        if isinstance(argument, ast.arg | ast.Assign)
        for call in ast.walk(argument)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "typer.Option" and not call.args
        for word in call.keywords
        if word.arg == "metavar" and ast.unparse(word.value)[1:-1].lower() == _name_of(argument)
    ]
    assert unnamed == []


def _name_of(argument: ast.arg | ast.Assign) -> str:
    """Of a parameter, or of a kind of option that several commands take."""
    return argument.arg if isinstance(argument, ast.arg) else ast.unparse(argument.targets[0]).lower()
