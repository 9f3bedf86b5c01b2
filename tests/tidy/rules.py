"""The rules of the source tree, each a function from a root folder to its findings.

Pure reading of files: nothing is imported or executed, so a planted fault in a copy shows that a rule bites.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.tidy.trees import called_name, imports_of, parse, sources

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
SOURCE_FOLDERS = ("kvservice", "actors", "examples", "benchmarks", "scripts", "tests")

# Everybody may import these.
GROUND = frozenset(
    {"aio", "breaker", "descriptors", "errors", "garbage", "private_files", "signals", "units", "version"}
)

# Package → the other packages of kvservice that it may import. A package's place in the tree says what it may know.
LAYERS: dict[str, frozenset[str]] = {
    "": frozenset({"api"}),
    "aio": frozenset(),
    "breaker": frozenset(),
    "descriptors": frozenset(),
    "garbage": frozenset(),
    "errors": frozenset(),
    "units": frozenset(),
    "version": frozenset(),
    "private_files": frozenset(),
    "signals": frozenset(),
    "config": frozenset(),
    "plugins": frozenset(),
    "core": frozenset(),
    "observe": frozenset({"core"}),
    "auth": frozenset({"core", "config"}),
    "discovery": frozenset({"auth"}),
    "wire": frozenset({"core", "auth", "observe"}),
    "memory": frozenset({"core", "observe"}),
    "transfer": frozenset({"core", "memory", "observe"}),
    "client": frozenset({"core", "wire", "auth", "config", "discovery", "observe"}),
    "lookup": frozenset({"core", "wire", "auth", "memory", "client", "discovery", "config", "observe"}),
    "codec": frozenset({"core"}),
    "tier": frozenset({"core", "memory", "transfer", "codec", "observe", "plugins"}),
    "pool": frozenset(
        {"core", "memory", "transfer", "tier", "codec", "client", "lookup", "config", "observe", "plugins"}
    ),
    "shard": frozenset(
        {"core", "wire", "auth", "memory", "transfer", "client", "lookup", "pool", "tier"}
        | {"discovery", "config", "observe"}
    ),
    "copying": frozenset({"core", "memory", "discovery", "config", "observe"}),
    "session": frozenset({"client", "core", "auth", "pool", "discovery", "config", "observe"}),
    "api": frozenset({"core", "auth", "client", "memory", "pool", "session", "observe"}),
    "connector": frozenset(
        {"api", "client", "core", "auth", "memory", "transfer", "pool", "copying", "session"}
        | {"discovery", "config", "observe"}
    ),
    "engine": frozenset(
        {"api", "core", "memory", "pool", "copying", "session", "connector", "codec", "config", "observe"}
    ),
    "serve": frozenset(
        {"client", "core", "wire", "auth", "lookup", "connector", "actors", "discovery", "config", "observe"}
    ),
    "proxy": frozenset({"config", "observe"}),
    "console": frozenset({"auth", "proxy"}),
    "replay": frozenset({"core", "serve"}),
    "actors": frozenset(
        {"core", "auth", "memory", "transfer", "lookup", "shard", "pool", "client", "copying", "discovery"}
        | {"config", "observe"}
    ),
    "testing": frozenset(
        {"core", "wire", "auth", "memory", "transfer", "lookup", "client", "pool", "shard", "connector", "actors"}
        | {"copying", "session", "serve", "tier", "codec", "discovery", "config", "observe"}
    ),
    "__main__": frozenset({"cli"}),
    "cli": frozenset(
        {"core", "wire", "auth", "memory", "transfer", "lookup", "client", "pool", "shard", "connector", "actors"}
        | {
            "copying",
            "serve",
            "proxy",
            "console",
            "replay",
            "testing",
            "tier",
            "codec",
            "engine",
            "discovery",
            "config",
            "observe",
        }
    ),
}

# Package → its rooms from the ground up. A room may import the rooms before it; rooms of one tuple know nothing of each
# other. A room is a folder, or a file beside the folders.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "core": (
        ("bounded_table", "transitions", "segment/layout"),
        ("block", "tier/tier_block"),
        ("segment",),
        ("messages",),
        ("reconcile", "actions"),
        ("slices",),
        ("explain",),
        ("events",),
        ("store",),
        ("context",),
        ("directory",),
        ("tier",),
        ("acquire",),
        ("drain",),
        ("peer_calls",),
        ("writes",),
        ("attachments",),
        ("shard",),
    ),
    "connector": (
        ("weights", "plan", "config_text", "cpu_packing", "failures"),
        ("options", "cache_groups", "step_failures"),
        ("scheduler", "worker"),
        ("layerwise", "shared"),
        ("vllm", "offloading", "sglang", "lmcache"),
    ),
    "copying": (
        ("message", "memory", "profiling"),
        ("copies",),
        ("device",),
        ("engine",),
        ("cuda",),
        ("worker",),
        ("process",),
    ),
    "engine": (
        ("blocks", "options"),
        ("schedule", "paged", "sampling"),
        ("model",),
        ("sharing",),
        ("cache", "blend", "lossy"),
        ("loop",),
    ),
}

# What the command line may import before it knows which command runs: everything else costs start-up time.
CLI_TOP_LEVEL = frozenset({"", "cli"}) | GROUND

# Third-party module → the packages, or folders of packages, where it is at home.
HOMES: dict[str, frozenset[str]] = {
    "vllm": frozenset({"connector/vllm", "connector/offloading"}),
    "sglang": frozenset({"connector/sglang"}),
    "lmcache": frozenset({"connector/lmcache"}),
    "ray": frozenset({"actors", "cli", "serve"}),
    "nixl": frozenset({"transfer"}),
    "nixl_cu12": frozenset({"transfer"}),
    "nixl_cu13": frozenset({"transfer"}),
    "grpc": frozenset({"auth", "wire", "lookup", "shard", "client", "cli", "actors", "testing"}),
    "grpc_health": frozenset({"auth", "wire", "lookup", "shard", "client", "cli", "testing"}),
    "grpc_reflection": frozenset({"wire", "lookup", "shard", "cli"}),
    "google.protobuf": frozenset({"wire", "lookup", "shard", "client", "testing"}),
    "torch": frozenset({"api", "connector", "transfer", "memory", "copying", "engine", "testing"}),
    "transformers": frozenset({"connector/shared", "engine", "serve"}),
    "triton": frozenset({"copying/cuda"}),
    "opentelemetry": frozenset({"observe"}),
    "prometheus_client": frozenset({"observe", "connector", "proxy"}),
    "msgspec": frozenset({"connector/sglang"}),
    "yaml": frozenset({"cli"}),
    "xxhash": frozenset({"core", "connector"}),
    "typer": frozenset({"cli"}),
    "rich": frozenset({"cli"}),
    "matplotlib": frozenset({"cli"}),
    "pydantic": frozenset({"serve", "config", "connector", "engine", "session"}),
    "aiohttp": frozenset({"proxy", "console"}),
    "multidict": frozenset({"proxy"}),
    "cryptography": frozenset({"cli", "codec"}),
    "obstore": frozenset({"tier"}),
    "blosc2": frozenset({"codec"}),
    "textual": frozenset({"cli"}),
}
ONE_FILE = ("nixl", "nixl_cu12", "nixl_cu13")

# Folders, and modules beside others, that decide and do nothing else.
PURE = ("kvservice/core/", "kvservice/engine/blocks.py", "kvservice/engine/schedule.py")
IMPURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "ctypes",
        "datetime",
        "http",
        "io",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "queue",
        "random",
        "sched",
        "secrets",
        "select",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "torch",
        "urllib",
        "uuid",
    }
)
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "breakpoint"})
PICKLERS = frozenset({"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})
DRAWER_NAMES = frozenset({"util", "utils", "common", "helper", "helpers", "misc"})
CHECKING_CALLS = ("raises", "warns", "fail", "assert_", "check_", "expect_")
CHECKING_BASES = ("Contract", "StateMachine")


def package_of(root: Path, path: Path) -> str:
    """'core' for kvservice/core/block/keys.py, 'errors' for kvservice/errors.py, '' for kvservice/__init__.py."""
    parts = path.relative_to(root).with_suffix("").parts
    if parts[0] == "actors":
        return "actors"
    return "" if parts[1] == "__init__" else parts[1]


def is_within(module: str, home: str) -> bool:
    return module == home or module.startswith(home + ".")


def target_package(module: str) -> str | None:
    """The package of kvservice that this import reaches, None for a foreign one."""
    if not is_within(module, "kvservice"):
        return None
    head = module.split(".")[1] if "." in module else ""
    return "" if head.startswith("_") else head


def layering(root: Path) -> list[str]:
    findings: list[str] = []
    for path in sources(root, "kvservice", "actors"):
        package = package_of(root, path)
        name = path.relative_to(root)
        if package not in LAYERS:
            findings.append(f"{name}: package {package!r} has no place in the layering table")
            continue
        for item in imports_of(root, path):
            target = target_package(item.module)
            if target is None or target in ("", package) or target in GROUND | LAYERS[package]:
                continue
            findings.append(f"{name}:{item.line}: {package or 'kvservice'} must not import kvservice.{target}")
    return findings


def rooms(root: Path) -> list[str]:
    """Layering inside the packages of ROOMS: each import goes to a room further down, or stays in its own."""
    findings: list[str] = []
    for package in ROOMS:
        home = root / "kvservice" / package
        for path in sources(root, f"kvservice/{package}"):
            name, module = path.relative_to(root), path.relative_to(home).with_suffix("").as_posix()
            if module == "__init__":
                continue
            mine = room_of(package, module)
            if mine is None:
                findings.append(f"{name}: {module} has no place among the rooms of {package}")
                continue
            for item in imports_of(root, path):
                if not is_within(item.module, f"kvservice.{package}"):
                    continue
                theirs = room_of(package, "/".join(item.module.split(".")[2:]))
                if theirs is not None and theirs.name != mine.name and theirs.floor >= mine.floor:
                    findings.append(f"{name}:{item.line}: {package}/{mine.name} must not import {theirs.name}")
    return findings


def no_circles(root: Path) -> list[str]:
    """No module imports itself on a way round, also not for types only: each can be read after those it names."""
    files = {module_name(root, path): path for path in sources(root, "kvservice", "actors")}
    arrows = {
        name: {found for item in imports_of(root, path) if (found := nearest(item.module, files)) not in (None, name)}
        for name, path in files.items()
    }
    while True:  # what imports nothing that is left is in no circle
        done = {name for name, targets in arrows.items() if not targets & arrows.keys()}
        if not done:
            return [f"{files[name].relative_to(root)}: in a circle of imports" for name in sorted(arrows)]
        arrows = {name: targets for name, targets in arrows.items() if name not in done}
        if not arrows:
            return []


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    parts = ("kvservice", *parts) if parts[0] == "actors" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def nearest(module: str, files: Mapping[str, Path]) -> str | None:
    """The file that defines this module, or this name in a module."""
    while module and module not in files:
        module = module.rpartition(".")[0]
    return module or None


@dataclass(frozen=True, slots=True)
class Room:
    floor: int
    name: str


def room_of(package: str, module: str) -> Room | None:
    """`module`: its path in the package. The longest name of a room that it begins with counts."""
    found = [
        Room(floor, name)
        for floor, names in enumerate(ROOMS[package])
        for name in names
        if is_within(module.replace("/", "."), name.replace("/", "."))
    ]
    return max(found, key=lambda room: len(room.name), default=None)


def lazy_cli(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{item.line}: import {item.module} inside the function that needs it"
        for path in sources(root, "kvservice/cli")
        for item in imports_of(root, path)
        if item.top_level and (target_package(item.module) or "") not in CLI_TOP_LEVEL
    ]


def third_party_homes(root: Path) -> list[str]:
    findings: list[str] = []
    one_file: dict[Path, int] = {}
    for path in sources(root, "kvservice", "actors"):
        package, name = package_of(root, path), path.relative_to(root)
        for item in imports_of(root, path):
            for module, homes in HOMES.items():
                if is_within(item.module, module) and not homes & {
                    package,
                    name.parent.as_posix().removeprefix("kvservice/"),
                }:
                    findings.append(f"{name}:{item.line}: {module} is at home in {', '.join(sorted(homes))} only")
            if any(is_within(item.module, module) for module in ONE_FILE):
                one_file[name] = item.line
    if len(one_file) > 1:
        findings.append(f"nixl belongs in one file, found in {', '.join(map(str, one_file))}")
    return findings


def core_purity(root: Path) -> list[str]:
    findings: list[str] = []
    for path in sources(root, "kvservice"):
        name = path.relative_to(root)
        if not name.as_posix().startswith(PURE):
            continue
        for item in imports_of(root, path):
            if item.module.split(".")[0] in IMPURE:
                findings.append(f"{name}:{item.line}: it decides and does nothing else: no {item.module}")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
                findings.append(f"{name}:{node.lineno}: what decides is synchronous")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
                findings.append(f"{name}:{node.lineno}: what decides does not call {node.func.id}()")
    return findings


def no_pickle(root: Path) -> list[str]:
    findings: list[str] = []
    for path in sources(root, *SOURCE_FOLDERS):
        name = path.relative_to(root)
        for item in imports_of(root, path):
            if item.module.split(".")[0] in PICKLERS or item.module in ("torch.load", "torch.save"):
                findings.append(f"{name}:{item.line}: {item.module} can run code from its input")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("load", "save") and ast.unparse(node.value) == "torch":
                findings.append(f"{name}:{node.lineno}: torch.{node.attr} pickles")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                findings.append(f"{name}:{node.value.lineno}: allow_pickle")
    return findings


def sizes(root: Path) -> list[str]:
    findings: list[str] = []
    for path in sources(root, *SOURCE_FOLDERS):
        name = path.relative_to(root)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES_MAX:
            findings.append(f"{name}: {lines} lines, at most {FILE_LINES_MAX}")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    findings.append(
                        f"{name}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
                    )
    return findings


def kept_cancellations(root: Path) -> list[str]:
    """No task survives its cancellation: see kvservice/aio.py."""
    findings: list[str] = []
    for path in sources(root, "kvservice", "actors", "examples", "benchmarks", "scripts"):
        name = path.relative_to(root)
        for item in imports_of(root, path):
            if item.module == "asyncio.wait_for":
                findings.append(f"{name}:{item.line}: asyncio.wait_for may lose a cancellation: use kvservice.aio")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and node.attr == "wait_for" and ast.unparse(node.value) == "asyncio":
                findings.append(f"{name}:{node.lineno}: asyncio.wait_for may lose a cancellation: use kvservice.aio")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
                if {"cancel", "gather"} <= {called_name(call) for call in calls}:
                    findings.append(f"{name}:{node.lineno}: {node.name} cancels once and then waits: use end_tasks")
    return findings


def handlers_without_locks(root: Path) -> list[str]:
    """A handler runs between two steps of the main thread, which may hold the lock that `Event.set` waits for."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: the handler of a signal takes a lock: put into a queue.SimpleQueue"
        for path in sources(root, *SOURCE_FOLDERS)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal"
        for handler in node.args[1:]
        if any(isinstance(inner, ast.Attribute) and inner.attr == "set" for inner in ast.walk(handler))
    ]


def no_drawers(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: a module is named after what it owns"
        for path in sources(root, *SOURCE_FOLDERS)
        if path.stem in DRAWER_NAMES or path.parent.name in DRAWER_NAMES
    ]


def formatter_decides(root: Path) -> list[str]:
    """No statement is kept from the formatter. A table may be, below a comment that says why it is one."""
    findings: list[str] = []
    for path in sources(root, *SOURCE_FOLDERS):
        text = path.read_text(encoding="utf-8")
        if "fmt:" not in text:
            continue
        name, lines = path.relative_to(root), text.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type != tokenize.COMMENT:
                continue
            line, said = token.start[0], token.string.removeprefix("#").strip()
            if said.startswith("fmt: skip"):
                findings.append(f"{name}:{line}: let the formatter lay it out")
            if said == "fmt: off" and not (line > 1 and lines[line - 2].lstrip().startswith("#")):
                findings.append(f"{name}:{line}: say in the line above why this is a table")
    return findings


def actors_link(root: Path) -> list[str]:
    link = root / "kvservice" / "actors"
    if not link.is_symlink():
        return ["kvservice/actors is not a link: git with core.symlinks=false, or somebody copied the folder"]
    target = link.readlink().as_posix()
    return [] if target == "../actors" else [f"kvservice/actors points to {target}, not ../actors"]


def tests_that_check(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: no test in it can fail"
        for path in sources(root, "tests")
        if path.name.startswith("test_") and not any(is_check(node) for node in ast.walk(parse(path)))
    ]


def one_wait(root: Path) -> list[str]:
    """Tests wait with `kvservice.testing.eventually`: it names what was awaited, and one variable makes it patient."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: wait with kvservice.testing.eventually"
        for path in sources(root, "tests")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.While)
        and {"sleep", "monotonic"} <= {called_name(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
    ]


# Folders of tests/unit that are no package of kvservice, with what their tests are about.
OTHER_UNIT_FOLDERS = {
    "benchmarks": "the figures and campaigns of benchmarks/",
    "examples": "what the demos print and need",
    "scripts": "what scripts/ does to an environment",
}


def tests_mirror_the_product(root: Path) -> list[str]:
    """A folder of tests/unit has the name of a package, and a file beside them that of a module of kvservice/."""
    unit, product, findings = root / "tests/unit", root / "kvservice", []
    for path in sources(root, "tests/unit"):
        folder = path.relative_to(unit).parent
        if folder.parts and folder.parts[0] not in OTHER_UNIT_FOLDERS and not (product / folder).is_dir():
            findings.append(f"{path.relative_to(root)}: kvservice/{folder} is no package")
        if not folder.parts and not any((product / f"{name}.py").is_file() for name in beginnings(path.stem)):
            findings.append(f"{path.relative_to(root)}: no module of kvservice/ has this name: choose a folder")
    return findings


def beginnings(stem: str) -> list[str]:
    """`test_config_definition`: config_definition, config."""
    words = stem.split("_")[1:]
    return ["_".join(words[:count]) for count in range(len(words), 0, -1)]


TEST_NAME_CHARS_MAX = 60  # a line of pytest's report has room for the file and the name


def names_of_tests(root: Path) -> list[str]:
    """A test's name says the rule; the reason is in its docstring."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: {node.name} has {len(node.name)} characters, at most "
        f"{TEST_NAME_CHARS_MAX}: name the rule, and say the reason in the docstring"
        for path in sources(root, "tests")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > TEST_NAME_CHARS_MAX
    ]


def is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Call):
        return called_name(node).startswith(CHECKING_CALLS)
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base).endswith(CHECKING_BASES) for base in node.bases)
    return False


RULES = {
    rule.__name__: rule
    for rule in (
        layering,
        rooms,
        no_circles,
        lazy_cli,
        third_party_homes,
        core_purity,
        no_pickle,
        sizes,
        kept_cancellations,
        handlers_without_locks,
        no_drawers,
        formatter_decides,
        actors_link,
        tests_that_check,
        one_wait,
        tests_mirror_the_product,
        names_of_tests,
    )
}
