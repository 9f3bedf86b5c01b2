"""Every test here has the marker `helm`, and skips where `make helm` could not install its tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm.chart import HELMS, TOOLS

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = not all((TOOLS / name).exists() for name in (*HELMS, "hadolint"))
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.helm)
            if missing:
                item.add_marker(pytest.mark.skip(reason="Helm is not installed: `make helm` installs it"))
