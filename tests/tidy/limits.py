"""The rule of limits: a comment beside each module-level number says why it is what it is and what happens at it.

A number is a constant in upper case whose value contains a literal number. The comment stands on its line, or on the
line directly above it. The rule sees that there is a comment; whether it gives a reason is for the reviewer.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tidy.trees import parse, sources

CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
FOR_TOOLS = re.compile(r"#\s*(noqa|type:|fmt:|ruff:|pragma)")


def limits(root: Path) -> list[str]:
    findings: list[str] = []
    for path in sources(root, "kvservice", "actors"):
        name = path.relative_to(root).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in parse(path).body:
            for constant in constants(node):
                if not is_explained(lines, node.lineno, node.end_lineno or node.lineno):
                    findings.append(f"{name}:{node.lineno}: say beside {constant} why it is what it is")
    return findings


def constants(node: ast.stmt) -> list[str]:
    """The names in upper case that this statement sets to a number."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    if node.value is None or not is_number(node.value):
        return []
    names = [name for target in targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [name.id for name in names if isinstance(name, ast.Name) and CONSTANT.fullmatch(name.id)]


def is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) or is_number(right)
        case ast.Tuple(elts=elements):
            return bool(elements) and all(is_number(element) for element in elements)
        case _:
            return False


def is_explained(lines: list[str], first: int, last: int) -> bool:
    """`first`, `last`: the lines of the statement, counted from 1."""
    if first > 1 and lines[first - 2].startswith("#") and not FOR_TOOLS.match(lines[first - 2]):
        return True
    return any("#" in line and not FOR_TOOLS.match(line[line.index("#") :]) for line in lines[first - 1 : last])
