"""Programs that Ctrl-C reaches, also from tests that run in the background."""

from __future__ import annotations

import sys

_RUN = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"


def interruptible(command: list[str]) -> list[str]:
    """The command that runs `command` with SIGINT as a terminal leaves it. What is started in the background ignores
    SIGINT, and so does all that it starts. `preexec_fn` is no way to change that: the fork would run gRPC's handlers,
    which write to the program's stderr."""
    return [sys.executable, "-c", _RUN, *command]
