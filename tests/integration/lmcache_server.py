"""`lmcache server` as a process, with our L2 adapter, and LMCache's own tools. Installed by make, beside .venv."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from kvservice.testing.cluster import START_SECONDS, LocalCluster, free_port
from kvservice.testing.eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".venv-lmcache" / "site"
needs_lmcache = pytest.mark.skipif(not SITE.is_dir(), reason="LMCache is absent: make .venv-lmcache/.installed")
CHUNK_TOKENS = 64
TOOL_SECONDS = 240.0


def variables() -> dict[str, str]:
    paths = f"{ROOT}{os.pathsep}{SITE}"
    quiet = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **quiet}


def adapter(**params: object) -> str:
    """What --l2-adapter takes."""
    plugin = {"type": "plugin", "module_path": "kvservice.connector.lmcache", "class_name": "KVServiceL2Adapter"}
    return json.dumps({**plugin, "adapter_params": {"weights_version": "v1", **params}})


def tool(*arguments: str) -> str:
    """What `lmcache ARGUMENTS` prints. It must succeed."""
    return program("lmcache.cli.main", *arguments)


def program(module: str, *arguments: str) -> str:
    """What a program prints that imports LMCache. It must succeed."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TOOL_SECONDS
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


class LMCacheServer:
    """With a level 1 of a gigabyte, and level 2 in the shard of this node."""

    def __init__(self, cluster: LocalCluster, node: str, log: Path, **params: object) -> None:
        self.port, self._http, prometheus = free_port(), free_port(), free_port()
        self.log = log
        # The defaults of a server and of a client without a GPU do not fit: auto takes both kinds.
        options = {
            "host": "127.0.0.1",
            "port": self.port,
            "http-port": self._http,
            "prometheus-port": prometheus,
            "l1-size-gb": 1,
            "l1-init-size-gb": 1,
            "eviction-policy": "LRU",
            "chunk-size": CHUNK_TOKENS,
            "supported-transfer-mode": "auto",
            "l2-adapter": adapter(socket=cluster.socket(node), **params),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", "server", *arguments],
                env=variables(),
                stdout=output,
                stderr=output,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http}"

    def __enter__(self) -> LMCacheServer:
        try:
            eventually(self._answers, f"the LMCache server is up; see {self.log}", START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def level_2(self) -> Mapping[str, Any]:
        """What our adapter says in the server's status."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=30) as reply:
            status = json.loads(reply.read())
        found = _adapters(status)
        assert len(found) == 1, status
        return found[0]

    def close(self) -> None:
        """End it as an operator does. It must end by itself within half a minute."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{self.url}/healthcheck", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def _adapters(status: object) -> list[Mapping[str, Any]]:
    """Wherever the status has them."""
    if isinstance(status, dict):
        if status.get("type") == "KVServiceL2Adapter":
            return [status]
        return [one for value in status.values() for one in _adapters(value)]
    return [one for value in status for one in _adapters(value)] if isinstance(status, list) else []
