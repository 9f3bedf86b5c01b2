"""An engine's process that ends while its pool is in it: nothing is said on stderr, nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.rounds import rounds

pytestmark = pytest.mark.faults

ENGINE = """
import atexit, asyncio, logging, sys, time
from kvservice.connector.options import ConnectorOptions
from kvservice.session.pool_choice import choose_pool
from kvservice.session.session import Session
from kvservice.core.messages import EngineSpec, SealItem
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.units import BlockKey, SpanRoute
from tests.unit.connector.line import LAYOUT

logging.basicConfig(level=logging.INFO)
spec = EngineSpec(b"e" * 16, "m", Fingerprint.of({"model": "m"}), LAYOUT)
pool = choose_pool(ConnectorOptions.parse({"mode": "embedded", "memory": "16MiB"}), spec)
session = Session(pool.open, pool.spec, lambda: True)
attachment = session.start(20.0)
assert attachment is not None
if sys.argv[1] != "killed by its exit":
    atexit.register(session.close)  # as an engine in this process is shut down when it is collected
deadline = time.monotonic() + 20
while not (refs := session.take_slots(attachment.attachment_id, 8)) and time.monotonic() < deadline:
    time.sleep(0.01)
items = [SealItem(ref, BlockKey(bytes([i]) * 16), None, i, SpanRoute(1)) for i, ref in enumerate(refs)]
if sys.argv[1] == "while it stores":
    session.seal(attachment.attachment_id, items)
print(attachment.segment_path)
"""


@pytest.mark.parametrize("how", ["in order", "while it stores", "killed by its exit"])
def test_an_embedded_pool_ends_with_its_process_in_silence(how: str) -> None:
    for _ in range(rounds(1, failed_before=1.0, campaign=20)):
        ended = subprocess.run(
            [sys.executable, "-c", ENGINE, how], capture_output=True, text=True, timeout=90, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert "Traceback" not in ended.stderr and "session_failed" not in ended.stderr, ended.stderr
        assert "Task " not in ended.stderr, ended.stderr
        assert not Path(ended.stdout.strip()).exists()
