"""What an engine of the demos leaves in /dev/shm when it is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.sglang_process import SHARED_MEMORY, shared_memory_of_session

MAKER = """
import multiprocessing, sys, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_semaphores_of_a_killed_engine_are_known() -> None:
    """Who makes one maps it under another name, so only its inode tells."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as made:
        assert made.stdout is not None
        path = Path(f"{SHARED_MEMORY}/sem.{made.stdout.readline().strip().lstrip('/')}")
        assert path.exists()
        assert shared_memory_of_session(made.pid) == {path}
        assert not shared_memory_of_session(made.pid + 1_000_000)
        assert made.stdin is not None
        made.stdin.close()  # Python's own tracker removes it
