"""`python -m tests.mutants --seed N`: one small fault at a time, in a line drawn at random, against the near tests.

A mutant that no test notices is a rule that no test keeps, or a line that does nothing. Each survivor deserves a test
of the rule that it breaks, unless it changes nothing that anybody could tell.

Lines are drawn among all that a mutation applies to in core, pool, connector, transfer and client, the same ones for
the same seed and tree. The near tests are those that reach the module in at most three imports, nearest first, without
engines, Ray and namespaces. Everything runs on a copy of the tree, so the checkout stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from kvservice.testing.unique import SESSION_VARIABLE
from tests.conftest import processes_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "pool", "connector", "transfer", "client")
TEST_FOLDERS = ("tests/unit", "tests/property", "tests/contract", "tests/fuzz", "tests/integration", "tests/faults")
MARKERS = "not ray and not vllm and not netns and not helm and not sim and not gpu"
IMPORTS_MAX = 3  # from a test to the module; further away everything tests everything
SECONDS_MAX = 420  # for the near tests of one mutant
TEST_SECONDS_MAX = 90  # a single test that takes longer hangs
MEMORY_BYTES_MAX = 12 << 30  # of addresses; the tests themselves take less than half
LIMITS_FROM = 3  # larger numbers in the source are limits somebody chose; one more of them is as good
SPOKEN = ("log", "logger", "warnings")  # what is said to people has no rule to keep

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Outcome(Enum):
    KILLED = "killed"
    SURVIVED = "survived"
    UNTESTED = "survived, no test is near"
    LATE = "out of time"  # neither: run it again with more --seconds


@dataclass(frozen=True, slots=True)
class Mutant:
    path: Path  # relative to the root
    line: int
    operator: str
    span: tuple[int, int]  # bytes of the file
    new: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.span[0]] + self.new.encode() + source[self.span[1] :]


def mutants_of(path: Path, source: bytes) -> list[Mutant]:
    """Every mutant of one file. Assertions, logging, docstrings and what only type checkers run are left out."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    for node in _running(ast.parse(source)):
        for operator, new in _changes(node):
            assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None
            span = (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)
            found.append(Mutant(path, node.lineno, operator, span, new))
    return found


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run and mean something, outermost first."""
    if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.FunctionDef) and node.name in ("check_invariants", "__repr__", "__str__"):
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_spoken(node.value)):
        return
    yield node
    left_out = {"annotation", "returns", "decorator_list", "slice" if _is_type(node) else ""}
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name not in left_out and isinstance(child, ast.AST):
                yield from _running(child)


def _is_spoken(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in SPOKEN
    )


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id[0].isupper()


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(operator, new text) of what may go wrong at this node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield from _changed("compare", node, lambda new: new.ops.__setitem__(0, COMPARED[type(node.ops[0])]()))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield from _changed("boolean", node, lambda new: setattr(new, "op", other()))
        for number in range(len(node.values)):
            yield from _changed("condition left out", node, lambda new, n=number: new.values.pop(n))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not left out", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not isinstance(node.left, ast.Constant):
        yield from _changed("arithmetic", node, lambda new: setattr(new, "op", COMPUTED[type(node.op)]()))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED:
        yield from _changed("function", node, lambda new: setattr(new.func, "id", CALLED[node.func.id]))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < LIMITS_FROM:
        yield "constant", str(node.value + 1)
    elif isinstance(node, ast.Continue | ast.Break) or _is_effect(node):
        yield "statement left out", "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "returns None", "return None"


def _is_effect(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign | ast.Delete):
        return True
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)


def _changed(operator: str, node: ast.expr, change) -> Iterator[tuple[str, str]]:  # type: ignore[no-untyped-def]
    new = copy.deepcopy(node)
    change(new)
    if isinstance(new, ast.BoolOp) and len(new.values) == 1:
        new = new.values[0]
    yield operator, f"({ast.unparse(new)})"


def drawn(seed: int, count: int) -> list[Mutant]:
    """Lines are equally likely, whatever can be done to them."""
    by_line: dict[tuple[Path, int], list[Mutant]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / "kvservice" / package).rglob("*.py")):
            for mutant in mutants_of(path.relative_to(ROOT), path.read_bytes()):
                by_line[mutant.path, mutant.line].append(mutant)
    chance = random.Random(seed)
    return [chance.choice(by_line[line]) for line in chance.sample(sorted(by_line), count)]


class Tests:
    """Which test files reach which module of the project, in how many imports."""

    def __init__(self) -> None:
        self._imported = {path: set(_imports(path)) for path in _python_files()}
        self._tests = sorted(
            p for p in self._imported if p.name.startswith("test_") and str(p).startswith(TEST_FOLDERS)
        )

    def near(self, module: Path) -> list[Path]:
        """Nearest first; of those equally near in the order of TEST_FOLDERS, which is that of their cost."""
        distances = [(self._distance(test, module), self._cost(test), test) for test in self._tests]
        return [test for distance, _, test in sorted(distances) if distance <= IMPORTS_MAX]

    def _cost(self, test: Path) -> int:
        return next(cost for cost, folder in enumerate(TEST_FOLDERS) if str(test).startswith(folder))

    def _distance(self, start: Path, module: Path) -> int:
        seen, queue = {start}, deque([(start, 0)])
        while queue:
            path, distance = queue.popleft()
            if path == module:
                return distance
            for other in self._imported.get(path, ()):
                if other not in seen and distance < IMPORTS_MAX:
                    seen.add(other)
                    queue.append((other, distance + 1))
        return IMPORTS_MAX + 1


def _python_files() -> list[Path]:
    return [p.relative_to(ROOT) for folder in ("kvservice", "tests") for p in (ROOT / folder).rglob("*.py")]


def _imports(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.startswith(("kvservice.", "tests.")):
                yield Path(name.replace(".", "/") + ".py")


def run(
    mutant: Mutant, copy_of_tree: Path, tests: list[Path], seconds: float, *, are_sound: bool = False
) -> tuple[Outcome, str]:
    """The outcome and the test that noticed. The copy is as it was afterwards. `are_sound`: the tests pass without it.

    Raises RuntimeError when the test that noticed fails without the fault as well, or pytest could not run.
    """
    if not tests:
        return Outcome.UNTESTED, ""
    target = copy_of_tree / mutant.path
    before = target.read_bytes()
    target.write_bytes(mutant.applied(before))
    try:
        code, said = _pytest(copy_of_tree, list(map(str, tests)), seconds)
    except subprocess.TimeoutExpired:
        return Outcome.LATE, ""
    finally:
        target.write_bytes(before)
    if code == pytest.ExitCode.OK:
        return Outcome.SURVIVED, ""
    if code < 0:
        return Outcome.KILLED, f"the tests died of signal {-code}"
    noticed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[|$| )", said, re.MULTILINE)
    if noticed is None:
        hung = re.search(r"Timeout", said)
        if hung and code not in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            return Outcome.KILLED, "a test hung"
        raise RuntimeError(f"pytest ended with {code}:\n{said[-2000:]}")
    if are_sound:
        return Outcome.KILLED, noticed[1]
    check_sound(copy_of_tree, [noticed[1]], seconds)
    return Outcome.KILLED, noticed[1]


def check_sound(copy_of_tree: Path, tests: list[str], seconds: float) -> None:
    """Raises RuntimeError if one of these tests fails without any fault."""
    code, said = _pytest(copy_of_tree, tests, seconds)
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"{' '.join(tests)} fails without any fault as well:\n{said[-2000:]}")


def _limit_memory() -> None:
    """A loop that no longer ends may append to a list."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def _pytest(folder: Path, tests: list[str], seconds: float) -> tuple[int, str]:
    """(exit code, output). Raises TimeoutExpired; nothing of it runs on afterwards."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        MARKERS,
        f"--timeout={TEST_SECONDS_MAX}",
        *tests,
    ]
    session = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", SESSION_VARIABLE: session}
    with tempfile.TemporaryFile() as said:  # a pipe would stay open as long as any process of a test
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
        try:
            process.wait(timeout=seconds)
        finally:
            for pid in (process.pid, *processes_of(session)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return process.returncode, said.read().decode(errors="replace")


def described(mutant: Mutant, source: bytes) -> str:
    old = " ".join(source[slice(*mutant.span)].decode().split())
    return f"{mutant.path}:{mutant.line}  {mutant.operator}: {old[:110]}  ->  {mutant.new[:110]}"


def copy_tree(folder: Path) -> Path:
    """Copy what tests need into this folder."""
    for name in ("kvservice", "tests", "actors", "examples", "benchmarks", "scripts", "protos"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the seed's mutants, from 1")
    parser.add_argument("--seconds", type=float, default=SECONDS_MAX, help="for the near tests of one mutant")
    options = parser.parse_args()
    tests, survivors = Tests(), 0
    with tempfile.TemporaryDirectory(prefix="kvservice-mutants-") as folder:
        copy_of_tree = copy_tree(Path(folder))
        for number, mutant in enumerate(drawn(options.seed, options.count), 1):
            if options.only and number not in options.only:
                continue
            source, began = (copy_of_tree / mutant.path).read_bytes(), time.monotonic()
            outcome, noticed = run(mutant, copy_of_tree, tests.near(mutant.path), options.seconds)
            survivors += outcome is not Outcome.KILLED
            seconds = time.monotonic() - began
            print(f"{number:3} {outcome.value:9} {seconds:4.0f} s  {described(mutant, source)}", flush=True)
            if noticed:
                print(f"      {noticed}", flush=True)
    print(f"seed {options.seed}: {survivors} not killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
