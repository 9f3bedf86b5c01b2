"""The connector still reads of a request what the benchmark's requests have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.connector_step import BLOCK, Engine
from kvservice.testing.eventually import eventually
from tests.settled import has_slots

REQUESTS = 4


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(REQUESTS, "one in 16")
    yield made
    made.close()


def test_each_request_stores_a_block_in_every_block_of_steps(engine: Engine) -> None:
    eventually(lambda: has_slots(engine.session), "slots in stock")  # a block without a slot is not stored
    planned = [engine.step(number)[2] for number in range(BLOCK)]
    assert sum(planned) >= REQUESTS
