from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvservice.api.pool_thread import PoolThread
from kvservice.connector.sglang.options import SGLangOptions
from tests.unit.connector.sglang.host_memory import OPTIONS


@pytest.fixture
def thread() -> Iterator[PoolThread]:
    """One pool for several ranks or engines."""
    made = PoolThread(SGLangOptions.parse(OPTIONS))
    yield made
    made.end()
