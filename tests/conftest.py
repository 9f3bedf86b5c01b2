"""What every test gets: the real model's folder, and a check that the whole run left nothing behind.

The markers are declared in pyproject.toml. A run marks its environment, so that every process it starts can be told
from those of other runs on the same machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.integration.proxy_lab import Lab
    from tests.vllm.replica import Replica

from kvservice.testing.eventually import NotInTime, eventually
from kvservice.testing.unique import NAME_DIGITS, SESSION_DIGITS, SESSION_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
NO_PROCESSES_VARIABLE = "KVSERVICE_TEST_NO_PROCESSES"  # set by `make test-fast`
PROCESS_EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PATTERN = "kvservice-*"
NAMED_BY_A_RUN = re.compile(
    rf"kvservice-[a-z]*([0-9a-f]{{{SESSION_DIGITS}}})[0-9a-f]{{{NAME_DIGITS - SESSION_DIGITS}}}-"
)
GRACE_SECONDS = 10.0  # detached processes may still be ending when the last test returns

# Half a minute, Ray's own, is not always enough for its control plane beside other tests on two cores; one that has not
# come by then never does, and is started again (tests/ray_nodes.py).
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "60")
os.environ.setdefault("RAY_worker_niceness", "0")  # actors are what is tested here, no job behind other work

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("kvservice", deadline=None)
settings.load_profile("kvservice")

# These belong to the interpreter that runs pytest and end with it.
OWN_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"tests.vllm.nursery")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The prepared SmolLM2-135M-Instruct; made on first use."""
    spec = importlib.util.spec_from_file_location("prepare_model", ROOT / "examples" / "prepare_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path: Path = module.ensure_model()
    return path


@pytest.fixture(scope="session")
def shallow_model(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first layers: a fifth of the computing, for tests whose point is what happens between the computing."""
    from tests.vllm.tiny_model import make_shallow

    return make_shallow(tmp_path_factory.mktemp("shallow"), model_path, layers=6)


@pytest.fixture(scope="session")
def without_cache(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """An engine without our connector: what it says is what everybody with `shallow_model` has to say. Not yet `ready`,
    so that it loads beside those of the module that asks first."""
    from tests.vllm.replica import Replica

    log = tmp_path_factory.mktemp("without-cache") / "replica.log"
    replica = Replica(shallow_model, None, log, max_model_len=2048, max_num_batched_tokens=256)
    try:
        yield replica
    finally:
        replica.close()


def pytest_configure() -> None:
    """In a run without processes, to start one is an error: such a test is marked `processes`."""
    if NO_PROCESSES_VARIABLE in os.environ:
        sys.addaudithook(refuse_processes)


def refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event in PROCESS_EVENTS:
        raise AssertionError(f"{event} of {arguments[:1]}: mark the test `processes`")


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    """Starts fake servers and proxies, and ends them with the test."""
    from tests.integration.proxy_lab import Lab

    made = Lab()
    yield made
    await made.end()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Ends the session with an error when a shared-memory file or a process of the tests outlives it.

    The first session fixture to be set up, so the last one to be torn down.
    """
    if SESSION_VARIABLE in os.environ:  # one of several lanes: whoever started them looks once, at the end of all
        yield
        return
    before = segments()
    os.environ[SESSION_VARIABLE] = session = uuid.uuid4().hex
    yield
    if left := left_behind(before, session):
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)


def left_behind(before: set[Path], session: str) -> list[str]:
    """What is still there after some seconds of grace."""
    with contextlib.suppress(NotInTime):
        eventually(lambda: not leftovers(before, session), "nothing left behind", GRACE_SECONDS)
    return leftovers(before, session)


def segments() -> set[Path]:
    return set(SHARED_MEMORY.glob(SEGMENT_PATTERN))


def leftovers(before: set[Path], session: str) -> list[str]:
    ours = processes_of(session)
    left = [f"process {pid}: {command}" for pid, command in ours.items()]
    for path in sorted(segments() - before):
        made = NAMED_BY_A_RUN.match(path.name)
        if made is not None and not session.startswith(made[1]):
            continue  # by another run
        holders = mapping_processes(path)
        if not holders or holders & ours.keys():  # one held only by others belongs to another run
            left.append(f"shared memory {path}")
    return left


def processes_of(session: str) -> dict[int, str]:
    marker = f"{SESSION_VARIABLE}={session}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if marker not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile, or somebody else's
        if command and not (parent == os.getpid() and any(helper in command for helper in OWN_HELPERS)):
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:200]
    return found


def mapping_processes(path: Path) -> set[int]:
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if str(path) in (entry / "maps").read_text():
                found.add(int(entry.name))
        except OSError:
            continue
    return found
