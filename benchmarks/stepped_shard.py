"""`python -m benchmarks.stepped_shard shard --node …`: `kvservice`, but a shard's wall clock can be set wrong.

It hands the shard a wall clock that adds the seconds in the file which KVSERVICE_TEST_CLOCK names. Whoever writes the
file sets the clock of every such shard, as an operator or a bad time server would. No file: the clock is right.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

CLOCK_VARIABLE = "KVSERVICE_TEST_CLOCK"


def stepped_time() -> float:
    """Seconds since 1970 as this process is to believe."""
    try:
        return time.time() + float(Path(os.environ[CLOCK_VARIABLE]).read_text())
    except (OSError, ValueError):
        return time.time()


def main() -> None:
    from kvservice.cli.main import app
    from kvservice.shard import process
    from kvservice.shard.server import ShardServer

    process.ShardServer = partial(ShardServer, wall_clock=stepped_time)  # type: ignore[assignment,misc]
    app(prog_name="kvservice")


if __name__ == "__main__":
    main()
