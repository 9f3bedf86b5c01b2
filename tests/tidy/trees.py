"""The Python files of the tree, what each imports, and its syntax tree. Pure reading of files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GENERATED = "kvservice/wire/v1"


@dataclass(frozen=True, slots=True)
class Import:
    module: str  # dotted, absolute
    line: int
    top_level: bool  # runs when the module is imported


def sources(root: Path, *folders: str) -> Iterator[Path]:
    """Written (not generated) Python files. The link kvservice/actors is never followed: name actors as well."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root).as_posix()
            if not relative.startswith((GENERATED + "/", "kvservice/actors/")):
                yield path


def parse(path: Path) -> ast.Module:
    """The file's tree, which nobody may change: it is kept, because a dozen rules look at each file."""
    state = path.stat()
    return _parsed(path, state.st_mtime_ns, state.st_size)


@cache
def _parsed(path: Path, changed_ns: int, size: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def forget_parsed() -> None:
    """Give back the memory of all kept trees, about 250 MB."""
    _parsed.cache_clear()
    _imports_of.cache_clear()


def imports_of(root: Path, path: Path) -> tuple[Import, ...]:
    state = path.stat()
    return _imports_of(root, path, state.st_mtime_ns, state.st_size)


@cache
def _imports_of(root: Path, path: Path, changed_ns: int, size: int) -> tuple[Import, ...]:
    parts = path.relative_to(root).with_suffix("").parts
    if parts[0] == "actors":
        parts = ("kvservice", *parts)
    found: list[Import] = []

    def visit(node: ast.AST, top_level: bool) -> None:
        for child in ast.iter_child_nodes(node):
            line = getattr(child, "lineno", 0)
            found.extend(Import(module, line, top_level) for module in imported_modules(child, parts))
            visit(child, top_level and not runs_later_or_never(child))

    visit(parse(path), True)
    return tuple(found)


def runs_later_or_never(node: ast.AST) -> bool:
    """Whether the import of a module does not run this: a function's body, or what is for type checkers only."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def imported_modules(node: ast.AST, parts: tuple[str, ...]) -> list[str]:
    """What this one node imports; also through `import_module("name")` and `__import__("name")`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = list(parts[: -node.level]) if node.level else []
        base += node.module.split(".") if node.module else []
        return [".".join([*base, alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name, value = called_name(node), node.args[0].value
        if name in ("import_module", "__import__") and isinstance(value, str):
            return [value]
    return []


def called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""
