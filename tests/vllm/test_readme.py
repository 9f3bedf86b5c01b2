"""The README's first run, as it stands there, on the locked CPU build: `vllm serve` starts, attaches and stores."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.cli.status import collect
from kvservice.testing.cluster import free_port
from kvservice.testing.eventually import NotInTime, eventually
from tests.conftest import SHARED_MEMORY
from tests.vllm.shared_memory import vllm_segments_removed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
PREPARED = ("make install model", "source .venv/bin/activate")  # by whoever runs the tests
SERVICE = f"readme-{os.getpid()}"
PORT, PROMPT = "8000", "/tmp/prompt.json"


def commands() -> list[str]:
    """The two blocks behind the mark: what starts the service and a server, and what sends a prompt."""
    text = (ROOT / "README.md").read_text().partition("<!-- first run")[2]
    return re.findall(r"```console\n(.*?)```", text, re.DOTALL)[:2]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:  # short: a Unix socket goes into it
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", folder)
        monkeypatch.setenv("KVSERVICE_SERVICE", SERVICE)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield Path(folder)


def test_the_commands_of_the_first_run_serve_and_store(here: Path) -> None:
    serve, ask = commands()
    assert all(line in serve for line in PREPARED) and PORT in serve and PORT in ask and PROMPT in ask
    for line in PREPARED:
        serve = serve.replace(line, "true")
    port = str(free_port())
    serve, ask = (block.replace(PORT, port).replace(PROMPT, str(here / "prompt.json")) for block in (serve, ask))
    log = here / "log"
    with vllm_segments_removed(), log.open("wb") as out:
        process = subprocess.Popen(["bash", "-c", serve], cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
            asked = subprocess.run(["bash", "-ec", ask], cwd=ROOT, capture_output=True, text=True, timeout=120)
            usage = json.loads(asked.stdout)["usage"]
            assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (1177, 0)
            assert "kvservice: attached to node local" in log.read_text()
            # Of 128 tokens each: the 1,152 that a second answer has from the pool.
            eventually(lambda: sealed() >= 9, "nine sealed blocks")
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; the service, which is in the background, ends last."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)

    def is_gone() -> bool:
        return process.poll() is not None and not list(SHARED_MEMORY.glob(f"kvservice-{SERVICE}-*"))

    with contextlib.suppress(NotInTime):
        eventually(is_gone, "the end of engine and service", 60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(SHARED_MEMORY.glob(f"kvservice-{SERVICE}-*"))


def sealed() -> int:
    return sum(node.counters.get("blocks_sealed", 0) for node in collect(SERVICE).nodes)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def said() -> str:
        return log.read_text()[-4000:]

    def is_healthy() -> bool:
        assert process.poll() is None, said()
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        return False

    eventually(is_healthy, f"an answer at {url}", START_SECONDS, detail=said)
