"""One process that has imported vLLM, and forks for every engine that the tests start.

Importing takes eight seconds of a core and loading the small model three, so tests that start twenty engines would
mostly import. What is forked runs its module as `python -m` does, with an environment, pipes and a process of its own;
our code is not among what was imported before. Started on first use, ends with the interpreter that runs pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MESSAGE_BYTES = 1 << 17
PRELOADED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader",
    "vllm.entrypoints.openai.api_server",
    "transformers.models.auto.tokenization_auto",
)


class Forked:
    """As much of `subprocess.Popen` as tests use. The exit code is not known: 0 stands for any."""

    def __init__(self, pid: int, descriptor: int, stdin: io.FileIO | None, stdout: io.BufferedReader | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._descriptor = descriptor

    def poll(self) -> int | None:
        return 0 if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return 0

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def _ended(self, timeout: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        return bool(waiting.poll(None if timeout is None else timeout * 1000))


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stderr: int,
    *,
    output: int | None = None,
    namespaces_of: int | None = None,
) -> Forked:
    """`python -m module arguments` in a forked process, in a session of its own when `output` is given.

    Its stdin and stdout are pipes, or nothing and `output`. `namespaces_of`: a process whose network and mounts it
    shall see. Blocks until the process is there, the first time until vLLM is imported."""
    given, kept = [], []
    if output is None:
        (child_in, our_in), (our_out, child_out) = os.pipe(), os.pipe()
        given, kept = [child_in, child_out], [our_in, our_out]
    else:
        given = [os.open(os.devnull, os.O_RDONLY), os.dup(output)]
    asked = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
    asked.update(session=output is not None, namespaces_of=namespaces_of)
    control = _nursery()
    socket.send_fds(control, [json.dumps(asked).encode()], [*given, stderr])
    for descriptor in given:
        os.close(descriptor)
    answer, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
    assert descriptors, "the process that forks engines has ended; its message is above"
    stdin, stdout = (os.fdopen(kept[0], "wb", 0), os.fdopen(kept[1], "rb")) if kept else (None, None)
    return Forked(int(answer), descriptors[0], stdin, stdout)


@functools.cache
def _nursery() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # Engines that share two cores must not spin while they wait for their threads.
    environment.update(VLLM_LOGGING_LEVEL="WARNING", VLLM_LOGGING_STREAM="ext://sys.stderr", OMP_WAIT_POLICY="passive")
    subprocess.Popen(
        [sys.executable, "-m", "tests.vllm.nursery", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        env=environment,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return ours


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    from vllm.utils import system_utils

    # On a CPU vLLM starts its own processes afresh, for the sake of OpenMP's threads; here there are none yet by then.
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else every child's collector would touch, and so copy, all of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for exit codes
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
        if not message:
            return
        held, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(held, 1)  # until the parent holds a descriptor of this process
            for descriptor in (held, go):
                os.close(descriptor)
            control.close()
            break
        child = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [child])
        os.write(go, b".")
        for descriptor in (held, go, child, *descriptors):
            os.close(descriptor)
    become(json.loads(message), descriptors)


def become(asked: dict[str, Any], descriptors: list[int]) -> None:
    """In the child: what an interpreter that was started with this would do."""
    import torch

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if asked["session"]:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if asked["namespaces_of"] is not None:
        enter(asked["namespaces_of"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # the library has read the variable already
    sys.argv = [asked["module"], *asked["arguments"]]
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001  the end of the process; its log says why
        traceback.print_exc()
    # As an interpreter ends, but without taking its modules apart: that would first copy all that was forked.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def enter(pid: int) -> None:
    """What nsenter(1) does."""
    libc, folder = ctypes.CDLL(None, use_errno=True), Path.cwd()
    for kind in ("net", "mnt"):
        with Path(f"/proc/{pid}/ns/{kind}").open() as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")
    os.chdir(folder)


if __name__ == "__main__":
    main()
