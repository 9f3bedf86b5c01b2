"""Programs that the stages start in processes of their own: `python -m benchmarks.gpu.children NAME …`.

Each owns something that must be another process's (memory behind an IPC handle), or ends in a state that no process
should go on in (a dead context, a broken capture).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.findings import call, wait_for
from kvservice.copying.cuda.driver import IPC_HANDLE_BYTES, Driver

EVENT_FLAGS = 2 | 4  # without timing, for other processes
OFFSET = 4096
MARK = 7


def _driver() -> Driver:
    found = Driver.of_device("0")
    found.bind()
    return found


def exporter(size: str) -> None:
    """Print handle, offset and the handle of an event that follows a copy, and keep them valid until the input ends."""
    driver = _driver()
    base = driver.allocate(int(size))
    handle, offset = driver.export(base + OFFSET)
    event, exported = ctypes.c_void_p(), (ctypes.c_ubyte * IPC_HANDLE_BYTES)()
    call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(EVENT_FLAGS))
    call("cuIpcGetEventHandle", ctypes.byref(exported), event)
    host, stream = np.full(1 << 20, MARK, np.uint8), driver.stream()
    driver.copy(base, host.ctypes.data, host.nbytes, stream)
    driver.record(event.value or 0, stream)
    print(handle.hex(), offset, bytes(exported).hex(), flush=True)
    sys.stdin.readline()


def expandable() -> None:
    """Print whether memory of torch has an IPC handle, under the settings of the environment."""
    import torch

    tensor = torch.zeros(1 << 22, device="cuda")
    driver = _driver()
    try:
        driver.export(tensor.data_ptr())
        print("has a handle")
    except Exception as error:  # noqa: BLE001  what it says is the finding
        print(f"{type(error).__name__}: {str(error)[:120]}")


def capture(deed: str) -> None:
    """Do this in another thread while a CUDA graph is captured in torch's default mode, which vLLM uses too."""
    import torch

    torch.cuda.init()
    driver = _driver()
    host = torch.empty(64 << 20, dtype=torch.uint8)
    there = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    stream, event = driver.stream(), driver.event()
    inter = torch.cuda.Event(interprocess=True)
    inter.ipc_handle()

    def pin() -> None:
        driver.pin(host.data_ptr(), host.nbytes)
        driver.unpin(host.data_ptr())

    def query() -> None:
        driver.record(event, stream)
        driver.has_passed(event)

    deeds: dict[str, Callable[[], object]] = {
        "host register": pin,
        "event record and query": query,
        "copy": lambda: driver.copy(there.data_ptr(), host.data_ptr(), 4096, stream),
        "allocate": lambda: driver.free(driver.allocate(1 << 20)),
    }
    said: list[str] = []

    def elsewhere() -> None:
        try:
            driver.bind()
            deeds[deed]()
            said.append("the call is fine")
        except Exception as error:  # noqa: BLE001  what it says is the finding
            said.append(f"the call fails: {str(error)[:90]}")

    x, graph = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            y = x + 1
            if deed in deeds:
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join(20)
            else:
                inter.record(torch.cuda.current_stream())
            y = y + 1
        graph.replay()
        torch.cuda.synchronize()
        said.append("the capture is fine")
    except Exception as error:  # noqa: BLE001  what it says is the finding
        said.append(f"the capture is broken: {str(error)[:120]}")
    print("; ".join(said).replace("\n", " "))


def dead_context() -> None:
    """Which calls still work after a kernel touched an illegal address, and whether the driver calls it final."""
    import torch

    from kvservice.copying.cuda.copies import gather_launcher

    torch.cuda.init()
    driver = _driver()
    gather = gather_launcher(driver)
    memory = mmap.mmap(-1, 1 << 20)
    host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    driver.pin(host, len(memory))
    stream, event, device = driver.stream(), driver.event(), driver.allocate(1 << 20)
    try:
        if gather is None:
            print("no gather kernel: a failed assertion of torch instead")
            torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")].sum().item()
        else:
            gather(np.array([4096]), np.array([device]), np.array([64]), stream)
        wait_for(stream)
        print("nothing happened")
    except Exception as error:  # noqa: BLE001  what it says is the finding
        print(f"the fault: {str(error)[:90]}")
    calls: dict[str, Callable[[], object]] = {
        "bind": driver.bind,
        "record": lambda: driver.record(event, stream),
        "query": lambda: driver.has_passed(event),
        "copy": lambda: driver.copy(device, host, 4096, stream),
        "unpin": lambda: driver.unpin(host),
        "allocate": lambda: driver.allocate(4096),
        "free": lambda: driver.free(device),
        "destroy stream": lambda: driver.destroy_stream(stream),
    }
    for name, work in calls.items():
        try:
            work()
            print(f"{name}: works")
        except Exception as error:  # noqa: BLE001  what it says is the finding
            print(f"{name}: {str(error)[:90]}")
    print(f"seen as final: {bool(driver.fatal)}")
    sys.stdout.flush()
    os._exit(0)  # what is left cannot be taken down in order


def vram(size: str) -> None:
    """Let NIXL read host memory into GPU memory."""
    from kvservice.transfer.nixl import load_nixl, make_agent

    api, _ = load_nixl()
    driver = _driver()
    count = int(size)
    here, there = driver.allocate(count), mmap.mmap(-1, count)
    there[:] = os.urandom(count)
    host = ctypes.addressof(ctypes.c_char.from_buffer(there))
    reader, owner = make_agent(api, "kvsv-reader"), make_agent(api, "kvsv-owner")
    reader.register_memory([(here, count, 0, "")], "VRAM")
    owner.register_memory([(host, count, 0, "")], "DRAM")
    name = reader.add_remote_agent(owner.get_agent_metadata())
    local = reader.get_xfer_descs([(here, count, 0)], "VRAM")
    remote = reader.get_xfer_descs([(host, count, 0)], "DRAM")
    transfer = reader.initialize_xfer("READ", local, remote, name.decode() if isinstance(name, bytes) else str(name))
    started = time.perf_counter()
    state = reader.transfer(transfer)
    while state == "PROC":
        state = reader.check_xfer_state(transfer)
    seconds = time.perf_counter() - started
    back = np.zeros(4096, np.uint8)
    call("cuMemcpy", ctypes.c_uint64(back.ctypes.data), ctypes.c_uint64(here), ctypes.c_size_t(back.nbytes))
    found = {"state": state, "same": back.tobytes() == there[:4096], "GB/s": round(count / seconds / 1e9, 2)}
    print(json.dumps(found), flush=True)
    os._exit(0)  # UCX's threads may not end


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program for program in (exporter, expandable, capture, dead_context, vram)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
