"""Code that runs as another user of this machine, where the tests may become one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ANOTHER = 65534  # nobody, as most systems call him
ROOT = Path(__file__).parents[2]
# What is imported must be readable before the change, and nothing of this user's may be open after it.
_BECOME = f"import os, sys; os.setgroups([]); os.setgid({ANOTHER}); os.setuid({ANOTHER}); os.environ['HOME'] = '/'\n"


def why_not() -> str | None:
    """Reason these tests cannot have a second user, or None."""
    return None if os.geteuid() == 0 else "only root can start a process of another user"


def start(imports: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    """`code` in a process of the other user, with `imports` done before; its output is read from `stdout`."""
    command = [sys.executable, "-c", f"{imports}\n{_BECOME}{code}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("COVERAGE_PROCESS_CONFIG", None)  # it could not write what `make coverage` measures
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def output(imports: str, code: str, *arguments: str) -> str:
    """What it printed, errors too. Blocks until it has ended."""
    done, _ = start(imports, code, *arguments).communicate(timeout=120)
    return done
