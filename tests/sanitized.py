"""`make sanitize`: the C modules, built with AddressSanitizer and UndefinedBehaviorSanitizer, under the near tests.

The copies are in build/sanitize, so the checkout keeps its own. What a sanitizer finds ends the tests with its report.
Leaks are not looked for: the interpreter keeps memory until its end. As a plugin of pytest this module loads the
copies before anything imports the others. Needs gcc, and takes a minute.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "sanitize"
FLAGS = "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
RUNTIMES = ("libasan.so", "libubsan.so")  # loaded before the interpreter's own libraries
TESTS = (
    "tests/unit/core/store/test_pins.py",
    "tests/unit/core/directory",
    "tests/unit/core/segment",
    "tests/unit/memory/test_runs.py",
    "tests/property/test_block_table.py",
    "tests/property/test_mirror.py",
    "tests/fuzz/test_damage.py",
)
VARIABLE = "KVSERVICE_TEST_SANITIZED"  # set for the tests: the folder of the copies


def build() -> None:
    """Compile the modules of pyproject.toml into BUILT. Exits if one of them could not be."""
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "--quiet", "build_ext", "--force"]
    folders = ["--build-lib", str(BUILT), "--build-temp", str(BUILT / "objects")]
    environment = {**os.environ, "CC": "gcc", "CFLAGS": FLAGS, "LDFLAGS": FLAGS}
    subprocess.run([*command, *folders], cwd=ROOT, env=environment, check=True)
    sources = {source.relative_to(ROOT).with_suffix("") for source in (ROOT / "kvservice").rglob("*.c")}
    built = {path.relative_to(BUILT).with_name(path.name.partition(".")[0]) for path in modules()}
    if missing := sources - built:
        sys.exit(f"not compiled: {', '.join(sorted(map(str, missing)))}")


def modules() -> list[Path]:
    return sorted((BUILT / "kvservice").rglob("*.so"))


def load() -> None:
    """Import the copies under the names of the modules."""
    for path in modules():
        name = ".".join(path.relative_to(BUILT).with_name(path.name.partition(".")[0]).parts)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def main(tests: Sequence[str]) -> int:
    build()
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in RUNTIMES
    ]
    environment = {
        **os.environ,
        VARIABLE: str(BUILT),
        "LD_PRELOAD": ":".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0",  # a test looks at what this signal does
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # each object of Python between red zones of its own
    }
    # A sanitizer writes to the descriptor and ends the process, so pytest must not keep what is written there.
    options = ["-q", "--capture=sys", "-p", "tests.sanitized", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or TESTS))
elif VARIABLE in os.environ:
    load()
