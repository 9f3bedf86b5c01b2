"""Runs the containers of a rendered pod as processes of this machine, as a kubelet would, and asks their probes.

What differs from a pod, and only this: the pod's address is one of loopback; absolute paths of volumes become folders
under a temporary one, everywhere they occur; cluster names become those addresses; there is no cgroup, no image, no
namespace, and the user is the one that runs the test. Command, arguments, environment, settings file, ports, probes and
hooks are what was rendered.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvservice.testing.eventually import eventually
from tests.helm.chart import ROOT

BIN = ROOT / ".venv" / "bin"
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(slots=True)
class Place:
    """Where a pod runs: its fields, and what becomes of its paths and of names."""

    ip: str
    node: str
    paths: Mapping[str, Path]
    names: Mapping[str, str] = field(default_factory=dict)  # host name -> address
    labels: Mapping[str, str] = field(default_factory=dict)

    def local(self, text: str) -> str:
        known = {**self.names, **{path: str(target) for path, target in self.paths.items()}}
        if not known:
            return text
        longest_first = "|".join(re.escape(word) for word in sorted(known, key=len, reverse=True))
        return re.sub(rf"(?:{longest_first})(?![\w-])", lambda found: known[found.group(0)], text)

    def field_value(self, path: str) -> str:
        if path.startswith("metadata.labels["):
            return self.labels[path.partition("'")[2].rstrip("']")]
        return {"status.podIP": self.ip, "spec.nodeName": self.node}[path]


class ContainerProcess:
    """One container. `environment` is what the image gives."""

    def __init__(self, container: Mapping[str, Any], place: Place, log: Path) -> None:
        self.container = container
        self.place = place
        self.log = log
        self.environment = self._environment()
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        words = [*self.container.get("command", []), *self.container.get("args", [])]
        return [self.place.local(self._expanded(word)) for word in words]

    def start(self, command: list[str] | None = None) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.wrapped(command or self.command()),
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def run(self, command: list[str] | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Until it ends: a container that is to end, or a hook in a running one."""
        words = self.command() if command is None else [self.place.local(word) for word in command]
        words = self.wrapped(words)
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False)

    def wrapped(self, words: list[str]) -> list[str]:
        """What runs this command where the container is to run."""
        return words

    def wait_for(self, probe: str, seconds: float) -> None:
        """Ask the probe until it succeeds."""

        def said() -> str:
            return self.log.read_text(errors="replace")[-3000:]

        def succeeds() -> bool:
            assert self.process is None or self.process.poll() is None, f"ended before its {probe}: {said()}"
            return self.probe(probe)

        eventually(succeeds, f"{probe} of {self.container['name']}", seconds, detail=said)

    def probe(self, name: str) -> bool:
        probe = self.container[name]
        timeout = float(probe.get("timeoutSeconds", 1))
        where = probe["httpGet"]
        named = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        port = named.get(where["port"], where["port"])
        try:
            with urllib.request.urlopen(f"http://{self.place.ip}:{port}{where['path']}", timeout=timeout) as reply:
                return 200 <= int(reply.status) < 400
        except (urllib.error.URLError, OSError):
            return False

    def end(self, seconds: float) -> int:
        """SIGTERM; the exit code. Fails when it takes longer than the pod allows."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    def _environment(self) -> dict[str, str]:
        # Of the tests' own environment a container has only this.
        given = {
            "PATH": f"{BIN}{os.pathsep}/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            **{name: value for name, value in os.environ.items() if name.startswith("KVSERVICE_TEST_")},
        }
        for item in self.container.get("env", []):
            if "valueFrom" in item:
                given[item["name"]] = self.place.field_value(item["valueFrom"]["fieldRef"]["fieldPath"])
            else:
                given[item["name"]] = self.place.local(_expand(item["value"], given))
        return given

    def _expanded(self, word: str) -> str:
        return _expand(word, self.environment)


def _expand(text: str, known: Mapping[str, str]) -> str:
    """$(NAME) as the kubelet does it: what is not known stays."""
    return _REFERENCE.sub(lambda found: known.get(found.group(1), found.group(0)), text)
