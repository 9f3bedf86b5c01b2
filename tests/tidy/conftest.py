"""The rules keep the trees of all files while they look at them, and not while other tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tidy.trees import forget_parsed


@pytest.fixture(scope="package", autouse=True)
def no_trees_are_left() -> Iterator[None]:
    yield
    forget_parsed()
