"""Engines without models, many in few processes: for benchmarks of many engines, and for the soak.

    async with Crowd("service", root, nodes, engines=64, processes=4) as crowd:
        crowd.play(Traffic(rate=5, prompts=100))

See `benchmarks.crowd_engine` for what an engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.crowd_engine import Traffic
from kvservice.aio import end_tasks, within

ATTACH_SECONDS = 120.0  # for all engines to attach: their processes import what they need first
END_SECONDS = 15.0  # for a process to detach its engines
LINE_BYTES_MAX = 1 << 22  # of one status, with the seconds of each request of half a second


@dataclass
class CrowdTally:
    """What all engines did since the last `take`."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    lag: float = 0.0


class Crowd:
    """`nodes[i mod n]` is the node of engine i. Use it with `async with`: leaving it detaches and ends everything."""

    def __init__(
        self,
        service: str,
        root: Path,
        nodes: Sequence[str],
        *,
        engines: int,
        processes: int,
        blocks: int = 24,
        block_bytes: int = 16384,
    ) -> None:
        plan = {"service": service, "blocks": blocks, "block_bytes": block_bytes, "engine_count": engines}
        numbered = [(index, nodes[index % len(nodes)]) for index in range(engines)]
        self._plans = [{**plan, "engines": numbered[place::processes]} for place in range(processes)]
        self._root = root
        self._environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(root), "KVSERVICE_SERVICE": service}
        self._processes: list[asyncio.subprocess.Process | None] = [None] * processes
        self._readers: list[asyncio.Task[None] | None] = [None] * processes
        self._statuses: list[dict[str, Any]] = [{} for _ in range(processes)]
        self._told: dict[str, Any] = {"traffic": asdict(Traffic()), "number": 0}
        self.tally = CrowdTally()

    async def __aenter__(self) -> Crowd:
        try:
            for place in range(len(self._plans)):
                await self.start(place)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self, place: int) -> None:
        """Start a process, or start it again after its end."""
        self._statuses[place] = {}
        with (self._root / f"engines{place}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "benchmarks.crowd_engine",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                limit=LINE_BYTES_MAX,
                start_new_session=True,  # Ctrl-C is for this process, which then ends them in order
            )
        self._processes[place] = process
        self._readers[place] = asyncio.create_task(self._read(place, process))
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._plans[place]).encode() + b"\n")
        self._send(place, {name: value for name, value in self._told.items() if name != "walk"})

    async def close(self) -> None:
        processes = [process for process in self._processes if process is not None]
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            try:
                await within(END_SECONDS, process.wait())
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await end_tasks([reader for reader in self._readers if reader is not None])
        self._processes = [None] * len(self._plans)

    def pids(self) -> dict[str, int]:
        return {f"engines{place}": p.pid for place, p in enumerate(self._processes) if p and p.returncode is None}

    async def kill(self, place: int) -> None:
        """As SIGKILL does: nothing is given back."""
        process = self._processes[place]
        if process is not None:
            process.kill()
            await process.wait()

    def play(self, traffic: Traffic) -> None:
        """What all engines do from now on."""
        self._tell({"traffic": asdict(traffic), "number": self._told["number"] + 1})

    async def walk(self, traffic: Traffic, shift: int = 0, on_progress: Callable[[int], None] | None = None) -> None:
        """Let the engines ask for each prompt of the corpus once, in parallel: prompt p falls to engine p - `shift`."""
        self._tell({"traffic": asdict(traffic), "number": self._told["number"] + 1, "walk": shift})
        before = self.tally.counts["prompts_walked"]
        number = self._told["number"]
        while not all(
            status.get("number") == number and status["walked"] == len(plan["engines"])
            for status, plan in zip(self._statuses, self._plans, strict=True)
        ):
            await asyncio.sleep(0.2)
            self.check()
            if on_progress is not None:
                on_progress(self.tally.counts["prompts_walked"] - before)

    @property
    def is_resting(self) -> bool:
        """Whether every engine has heard of the last `play` and does nothing now."""
        return all(status.get("number") == self._told["number"] and not status["busy"] for status in self._statuses)

    @property
    def attached(self) -> int:
        return sum(status.get("attached", 0) for status in self._statuses)

    def held(self, node: str) -> int:
        """The slots that engines of this node may write, by their own word of up to half a second ago."""
        return sum(status["held"].get(node, 0) for status in self._statuses if status)

    def take(self) -> CrowdTally:
        """What was seen since the last call."""
        taken, self.tally = self.tally, CrowdTally()
        return taken

    async def wait_until_attached(self) -> None:
        wanted = sum(len(plan["engines"]) for plan in self._plans)
        until = asyncio.get_running_loop().time() + ATTACH_SECONDS
        while self.attached < wanted:
            if asyncio.get_running_loop().time() > until:
                why = [message for status in self._statuses for message in status.get("failures", [])]
                raise TimeoutError(f"only {self.attached} of {wanted} engines are attached: {why[:3]}")
            await asyncio.sleep(0.2)
            self.check()

    def check(self) -> None:
        """Raises ChildProcessError if a process has ended by itself."""
        for place, process in enumerate(self._processes):
            if process is not None and process.returncode is not None and process.returncode > 0:
                said = (self._root / f"engines{place}.log").read_text(errors="replace")[-2000:]
                raise ChildProcessError(f"process {place} of the engines ended with {process.returncode}\n{said}")

    def _tell(self, told: dict[str, Any]) -> None:
        self._told = told
        for place in range(len(self._plans)):
            self._send(place, told)

    def _send(self, place: int, told: dict[str, Any]) -> None:
        process = self._processes[place]
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(json.dumps(told).encode() + b"\n")

    async def _read(self, place: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                status = json.loads(line)
            except ValueError:  # killed in the middle of a line
                return
            self._statuses[place] = status
            self.tally.counts.update(status["counts"])
            self.tally.seconds += status["seconds"]
            self.tally.wrong += status["wrong"]
            self.tally.missing += status["missing"]
            self.tally.lag = max(self.tally.lag, status["lag"])
