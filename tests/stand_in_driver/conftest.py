"""Builds the stand-in driver once a session; without a C compiler these tests skip, counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvservice.copying.cuda import driver as cuda_driver
from kvservice.copying.cuda.driver import Driver
from tests.stand_in_driver.build import build, compiler
from tests.stand_in_driver.engine import Controls


@pytest.fixture(scope="session")
def library_path() -> str:
    if compiler() is None:
        pytest.skip("no C compiler for the stand-in driver")
    return str(build())


@pytest.fixture
def controls(library_path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controls]:
    """This process's driver is the stand-in until the end of the test."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", library_path)
    cuda_driver.load.cache_clear()
    made = Controls(cuda_driver.load())
    yield made
    made.set_back()
    cuda_driver.load.cache_clear()


@pytest.fixture
def driver(controls: Controls) -> Driver:
    found = Driver.of_device("0")
    found.bind()
    return found
