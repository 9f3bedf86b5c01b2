"""What every journey begins with: the wheel, and an empty folder with a short path, because sockets go into it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.wheel import build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def empty_folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvj-"))
    yield made
    shutil.rmtree(made)
