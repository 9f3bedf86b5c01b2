"""One word for one thing: the words that this project does not use, with what it says instead; and type names.

A word is refused as a name: in Python, the protos, the chart's values and templates, and in strings that are names of
counters, metrics, options and keys. Where it can mean nothing else here, it is refused in comments and documents too.
The name of a test is a sentence, and counts as prose.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.tidy.rules import SOURCE_FOLDERS
from tests.tidy.trees import parse, sources


@dataclass(frozen=True, slots=True)
class Instead:
    say: str
    prose: bool = False  # refused in comments, texts and documents too


WORDS: dict[str, Instead] = {
    "lookup shard": Instead("lookup service, or lookup partition", prose=True),
    "directory index": Instead("directory", prose=True),
    "directory table": Instead("directory", prose=True),
    "mover": Instead("copier", prose=True),
    "move worker": Instead("copy worker", prose=True),
    "gpu workers": Instead("copy workers"),
    "switchboard": Instead("connector", prose=True),
    "side": Instead("KV cache group"),
    "family": Instead("KV cache group"),
    "reach": Instead("sliding window"),
    "governor": Instead("admission", prose=True),
    "passed over": Instead("not admitted"),
    "ghost": Instead("eviction history", prose=True),
    "culprit": Instead("eviction history: caused_by", prose=True),
    "door": Instead("authenticator", prose=True),
    "guest": Instead("authenticator: the caller", prose=True),
    "let in": Instead("authenticate"),
    "turn out": Instead("revoke"),
    "original": Instead("primary copy"),
    "promote": Instead("make primary; of tiers: bring back", prose=True),
    "demote": Instead("write down", prose=True),
    "distrust": Instead("quarantine", prose=True),
    "verdict": Instead("diagnosis, or result", prose=True),
    "fate": Instead("history", prose=True),
    "facts": Instead("evidence, state or answer"),
}

METRIC_FAMILY = "Prometheus calls the samples of one metric a family"
ADDRESS_FAMILY = "sockets have an address family"
SEARCHSORTED = "numpy's searchsorted has a parameter of this name"
HINT = "a kind of action in kv_hints, as routers call it"
ROPE = "transformers' original_max_position_embeddings"

# (word, beginning of a path): why the word stays there.
ALLOWED: dict[tuple[str, str], str] = {
    ("family", "kvservice/observe/"): METRIC_FAMILY,
    ("family", "kvservice/proxy/metrics.py"): METRIC_FAMILY,
    ("family", "tests/helm/test_monitoring.py"): METRIC_FAMILY,
    ("family", "tests/unit/observe/test_metrics.py"): METRIC_FAMILY,
    ("family", "kvservice/auth/tls.py"): ADDRESS_FAMILY,
    ("family", "kvservice/transfer/devices.py"): ADDRESS_FAMILY,
    ("side", "kvservice/auth/tls.py"): "ssl's server_side",
    ("side", "kvservice/core/directory/key_table.py"): SEARCHSORTED,
    ("side", "kvservice/core/segment/copy_runs.py"): SEARCHSORTED,
    ("side", "benchmarks/pd_handoff.py"): "vLLM's VLLM_NIXL_SIDE_CHANNEL_HOST",
    ("demote", "kvservice/connector/scheduler/hints.py"): HINT,
    ("demote", "tests/unit/connector/scheduler/test_hints.py"): HINT,
    ("demote", "docs/howto/hints.md"): HINT,
    ("original", "kvservice/connector/vllm/identity.py"): ROPE,
    ("original", "tests/unit/connector/vllm/test_identity.py"): ROPE,
    ("original", "kvservice/engine/model.py"): ROPE,
    ("original", "tests/unit/engine/test_blend.py"): ROPE,
    ("original", "tests/unit/engine/test_loop.py"): ROPE,
    ("original", "tests/vllm/tiny_model.py"): ROPE,
    ("original", "tests/faults/test_naming_engines.py"): ROPE,
}

TEXTS = ("*.py", "*.pyi", "*.md", "*.proto", "*.yaml", "*.yml", "*.tpl", "*.toml", "*.sh", "*.c", "*.json", "*.txt")
PLACES = (
    *SOURCE_FOLDERS,
    "docs",
    "protos",
    "helm",
    "docker",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
)
DATA = (
    "benchmarks/results/",
    "examples/documents/",
    "kvservice/wire/v1/",
    "kvservice/actors/",
    "tests/tidy/words.py",
    "tests/tidy/test_tidy.py",
)
IN_PROSE = re.compile(
    rf"(?<![a-z])({'|'.join(word.replace(' ', '[ _-]') for word in WORDS if WORDS[word].prose)})s?(?![a-z])",
    re.IGNORECASE,
)
IN_NAMES = re.compile(f" ({'|'.join(WORDS)})s? ")
TEST_NAME_PARTS = 6  # documents cite tests by name; no name of a counter, setting or metric is as long
NAME = re.compile(r"[A-Za-z_][\w-]*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
COMMENT = {".proto": "//", ".yaml": "#", ".yml": "#", ".tpl": "{{/*"}


def words(root: Path, allowed: Collection[tuple[str, str]] = tuple(ALLOWED)) -> list[str]:
    """`allowed`: (word, beginning of a path) that are not findings."""
    findings: list[str] = []
    for path in _texts(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        found = {(text.count("\n", 0, match.start()) + 1, match[1]) for match in IN_PROSE.finditer(text)}
        found |= {(line, match[1]) for line, split in names_of(path, text) if (match := IN_NAMES.search(split))}
        for line, written in sorted(found):
            word = re.sub("[ _-]", " ", written).lower()
            if not any(word == one and name.startswith(place) for one, place in allowed):
                findings.append(f"{name}:{line}: {written!r}: say {WORDS[word].say}")
    return findings


def type_names(root: Path) -> list[str]:
    """A class name means one thing in the whole project."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources(root, "kvservice", "actors"):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(root).as_posix()}:{node.lineno}")
    return [f"{', '.join(found)}: {name} is {len(found)} types" for name, found in places.items() if len(found) > 1]


def _texts(root: Path) -> Iterator[Path]:
    for place in PLACES:
        start = root / place
        found = [start] if start.is_file() else sorted(one for ending in TEXTS for one in start.rglob(ending))
        for path in found:
            if not path.is_symlink() and not path.relative_to(root).as_posix().startswith(DATA):
                yield path


def names_of(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, parts of the name in lower case, with a blank before and behind each) of every name in the file."""
    yield 1, _split(path.stem)
    if path.suffix == ".py":
        found = _python_names(parse(path))
    elif path.suffix in COMMENT:
        mark = COMMENT[path.suffix]
        lines = enumerate(text.splitlines(), 1)
        found = ((number, name) for number, line in lines for name in NAME.findall(line.split(mark)[0]))
    else:  # prose: what is written with underscores is a name, or that of a test
        lines = enumerate(text.splitlines(), 1)
        found = (
            (number, name)
            for number, line in lines
            for name in NAME.findall(line)
            if 1 < len(name.split("_")) < TEST_NAME_PARTS
        )
    for line, name in found:
        yield line, _split(name)


@cache
def _split(name: str) -> str:
    return f" {' '.join(PART.findall(name)).lower()} "


def _python_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield line, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                pass  # a sentence
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.keyword(arg=str(name)) | ast.alias(name=name):
                yield line, name
            case ast.Constant(value=str(value)) if re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", value):
                yield line, value
