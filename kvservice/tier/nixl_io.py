"""Block files through a storage plug-in of NIXL: POSIX (its queues in user space), or GDS (cuFile).

An agent for each thread, because NIXL's agents have one queue and one lock. NIXL has no thread for it, so the thread
that waits polls, with pauses: without them it would use a whole core. All targets are slots in host memory, whose
digest is computed before a block counts.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence

import numpy as np

from kvservice.errors import TransferError
from kvservice.transfer.nixl import load_nixl, make_storage_agent

POLL_SECONDS = 0.000_1  # between two looks; a block of 2 MiB takes a millisecond on a fast drive


class NixlIO:
    """Satisfies FileIO. `plugin` is NIXL's name of it. Raises TransferError where it cannot be loaded."""

    def __init__(self, plugin: str) -> None:
        api, self._errors = load_nixl()
        self._plugin = plugin
        self._name = f"kvservice-{uuid.uuid4().hex}"
        try:
            self._agent = make_storage_agent(api, self._name, plugin)
        except self._errors as error:
            raise TransferError(
                f"NIXL cannot load its plug-in {plugin} here: {type(error).__name__}: {error}"
            ) from error

    def read(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        size = os.fstat(descriptor).st_size
        whole, at = [], 0
        for part in parts:
            if at + len(part) > size:  # NIXL refuses to read over the end, and direct access to read less than a page
                break
            whole.append(part)
            at += len(part)
        self._transfer("READ", descriptor, whole)
        if len(whole) < len(parts) and at < size:
            at += os.preadv(descriptor, [parts[len(whole)]], at)
        return at

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> None:
        self._transfer("WRITE", descriptor, parts)

    def close(self) -> None:
        del self._agent

    def _transfer(self, operation: str, descriptor: int, parts: Sequence[memoryview]) -> None:
        if not parts:
            return
        addresses = [np.frombuffer(part, np.uint8).__array_interface__["data"][0] for part in parts]
        memory = [(address, len(part), 0) for address, part in zip(addresses, parts, strict=True)]
        places, at = [], 0
        for part in parts:
            places.append((at, len(part), descriptor))
            at += len(part)
        agent, plugins, registered = self._agent, [self._plugin], []
        try:
            try:
                registered.append(agent.register_memory([(*one, "") for one in memory], "DRAM", backends=plugins))
                registered.append(agent.register_memory([(0, at, descriptor, "")], "FILE", backends=plugins))
                local, remote = agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(places, "FILE")
                handle = agent.initialize_xfer(operation, local, remote, self._name, backends=plugins)
                try:
                    state = agent.transfer(handle)
                    while state == "PROC":
                        time.sleep(POLL_SECONDS)
                        state = agent.check_xfer_state(handle)
                finally:
                    agent.release_xfer_handle(handle)
            finally:
                for one in reversed(registered):
                    agent.deregister_memory(one, backends=plugins)
        except self._errors as error:
            raise OSError(f"NIXL {self._plugin}: {type(error).__name__}: {error}") from error
        if state != "DONE":
            raise OSError(f"NIXL {self._plugin}: state {state}")
