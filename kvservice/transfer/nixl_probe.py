"""Checks for `kvservice doctor` whether NIXL moves bytes on this machine, and over which lanes, in a child.

`python -m kvservice.transfer.nixl_probe` is that child; it prints one JSON line.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
from typing import Any

from kvservice.transfer.nixl import load_nixl, nixl_available

PROBE_BYTES = 4 << 20  # enough that UCX chooses its lanes as for real blocks, and moved in milliseconds
AGENT_PREFIX = "kvsprobe"
# UCX prints which lanes an endpoint uses: '… ucp_worker.c:1997 UCX INFO  kvsprobe-0 intra-node cfg#1 rma_am(tcp/lo) …'
_LANES = re.compile(rf"{AGENT_PREFIX}-0 (?!self)\S+ cfg#\d+ (.+)$", re.MULTILINE)


def loopback_probe(timeout_seconds: float = 60.0) -> dict[str, Any]:
    """Move 4 MiB between two agents in a child process. Blocks; never raises.

    Keys: available, moved (every byte arrived), backends {name: 'ok' or the type of error}, lanes (UCX's own text for
    what the connection used, e.g. 'rma_am(tcp/lo) am(tcp/lo cma/memory)'; 'unknown' when it printed none), error.
    """
    if not nixl_available():
        return _result(
            available=False, error="NIXL is not installed: it comes with the extra 'nixl' (pip install nixl-cu12)"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env={**os.environ, "UCX_LOG_LEVEL": "info"},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return _result(error=f"no answer within {timeout_seconds} s")
    report = done.stdout + done.stderr
    lines = [line[1:] for line in done.stdout.splitlines() if line.startswith("@")]
    if not lines:
        return _result(error=report[-500:])
    found = json.loads(lines[0])
    lanes = _LANES.search(report)
    return _result(
        moved=bool(found["moved"]), backends=found["backends"], lanes=lanes.group(1).strip() if lanes else "unknown"
    )


def _result(
    *,
    available: bool = True,
    moved: bool = False,
    backends: dict[str, str] | None = None,
    lanes: str = "unknown",
    error: str = "",
) -> dict[str, Any]:
    return {"available": available, "moved": moved, "backends": backends or {}, "lanes": lanes, "error": error}


def main() -> None:
    api, errors = load_nixl()
    agents = [api.nixl_agent(f"{AGENT_PREFIX}-{i}", api.nixl_agent_config(backends=["UCX"])) for i in (0, 1)]
    backends: dict[str, str] = {"UCX": "ok"}
    for name in agents[0].get_plugin_list():
        if name in backends:
            continue
        try:
            agents[0].create_backend(name, {})
            backends[name] = "ok"
        except errors as error:
            backends[name] = type(error).__name__
    maps = [mmap.mmap(-1, PROBE_BYTES) for _ in agents]
    maps[1][:] = os.urandom(PROBE_BYTES)
    bases = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in maps]
    for agent, base in zip(agents, bases, strict=True):
        agent.register_memory([(base, PROBE_BYTES, 0, "")], "DRAM")
    name = agents[0].add_remote_agent(agents[1].get_agent_metadata())
    local, remote = (agents[0].get_xfer_descs([(base, PROBE_BYTES, 0)], "DRAM") for base in bases)
    peer = name.decode() if isinstance(name, bytes) else str(name)
    handle = agents[0].initialize_xfer("READ", local, remote, peer)
    state = agents[0].transfer(handle)
    while state == "PROC":
        state = agents[0].check_xfer_state(handle)
    print("@" + json.dumps({"backends": backends, "moved": state == "DONE" and maps[0][:] == maps[1][:]}), flush=True)
    os._exit(0)  # some plugins hang in their destructors


if __name__ == "__main__":
    main()
