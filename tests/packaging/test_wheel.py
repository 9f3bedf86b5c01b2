"""What users install: the wheel has every part as real files, and the source folder `actors` cannot be misused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvservice
from kvservice.testing.eventually import eventually
from kvservice.testing.unique import SESSION_VARIABLE
from tests.conftest import left_behind, segments
from tests.packaging.wheel import ROOT, build_wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_written_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvservice").rglob("*.py")}
    written |= {"kvservice/" + path.relative_to(ROOT).as_posix() for path in (ROOT / "actors").rglob("*.py")}
    assert len(written) > 20
    assert written - names == set()


def test_actors_are_real_files_in_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = archive.getinfo("kvservice/actors/__init__.py")
    assert (info.external_attr >> 16) & 0o170000 in (0, 0o100000)  # a regular file, not a link
    assert archive.read(info) == (ROOT / "actors" / "__init__.py").read_bytes()


def test_the_wheel_holds_types_generated_code_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "kvservice/py.typed" in names
    page = ROOT / "kvservice/console/static"
    assert {path.relative_to(ROOT).as_posix() for path in page.rglob("*.*")} <= names
    assert {f"kvservice/wire/v1/{name}_pb2.pyi" for name in ("common", "lookup", "shard")} <= names
    assert {f"kvservice/wire/v1/{name}_pb2_grpc.py" for name in ("common", "lookup", "shard")} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"kvservice", f"kvservice-{kvservice.__version__}.dist-info"}


def test_the_wheel_imports_without_engine_ray_or_transport(wheel: Path) -> None:
    """In a clean process that finds the wheel first and refuses what belongs to the extras."""
    code = (
        "import sys\n"
        "for name in ('vllm', 'ray', 'nixl', 'nixl_cu12', 'torch', 'grpc_tools'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(wheel)!r})\n"
        "import kvservice, kvservice.core.block.keys, kvservice.discovery, kvservice.wire.v1.shard_pb2\n"
        "import kvservice.transfer.base, kvservice.wire.serving\n"
        "print(kvservice.__file__)\n"
    )
    # Not measured by `make coverage`: its plug-in would import the tree before the wheel.
    environment = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_CONFIG"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=wheel.parent, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(wheel))


def test_the_demo_shows_a_remote_hit_and_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    """From the script that pip installs, where nothing of the extras can be imported."""
    site, scratch = tmp_path / "site", Path(tempfile.mkdtemp(prefix="kvd-"))  # short: sockets go into it
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--no-index",
        "--target",
        str(site),
    ]
    subprocess.run([*install, str(wheel)], check=True, timeout=120, capture_output=True)
    refused = "".join(f"sys.modules[{name!r}] = None\n" for name in ("vllm", "ray", "nixl_cu12", "torch"))
    (site / "sitecustomize.py").write_text(f"import sys\n{refused}")
    before, session = segments(), uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(site), "TMPDIR": str(scratch), SESSION_VARIABLE: session}
    result = subprocess.run(
        [site / "bin" / "kvservice", "demo"],
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    words = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert words == ["started", "stored", "first", "second", "removed", "next"]
    assert "8.0 MiB from n0" in result.stdout and "nothing moved" in result.stdout
    assert not left_behind(before, session)
    scratch.rmdir()  # it is empty again


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, from the wheel with two extras and what they need, in an environment that had nothing."""
    place = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=120)
    words = [place / "bin" / "pip", "install", "--disable-pip-version-check", "--quiet", f"{wheel}[certs,proxy]"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return place / "bin" / "kvservice"


class Alone:
    """Runs the command in an empty folder, with nothing of this repository in its environment."""

    def __init__(self, command: Path) -> None:
        self.command = command
        self.folder = Path(tempfile.mkdtemp(prefix="kva-"))  # short: sockets go into it
        passed = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVSERVICE"))}
        self.environment = {**passed, "KVSERVICE_RUNTIME_DIR": str(self.folder / "run"), "TMPDIR": str(self.folder)}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.command, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def alone(installed: Path) -> Iterator[Alone]:
    made = Alone(installed)
    yield made
    shutil.rmtree(made.folder)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_the_wheel_alone_serves_and_says_what_is_missing(alone: Alone) -> None:
    assert alone.run("--version").stdout.strip() == f"kvservice {kvservice.__version__}"
    demo = alone.run("demo")
    assert (demo.returncode, demo.stderr) == (0, "") and "8.0 MiB from n0" in demo.stdout
    assert alone.run("certs", str(alone.folder / "tls")).returncode == 0, "an extra that was asked for"
    for words in (["up"], ["shard", "--node", "n", "--transport", "nixl"]):
        refused = alone.run(*words)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
        assert "comes with the extra" in refused.stderr and "pip install" in refused.stderr
    assert alone.run("status").returncode == 3
    up = subprocess.Popen(
        [alone.command, "up", "--no-ray", "--pool-bytes", "16MiB"],
        cwd=alone.folder,
        env=alone.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: alone.run("status").returncode == 0, "the status of a service that is up")
    finally:
        up.terminate()
    assert "Traceback" not in up.communicate(timeout=60)[1] and up.returncode == 0


def test_the_source_folder_actors_refuses_to_be_imported() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import actors"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert result.returncode != 0
    assert "import kvservice.actors" in result.stderr
