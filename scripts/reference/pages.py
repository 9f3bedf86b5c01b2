"""Every page of docs/reference that is made from the code, by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scripts.reference import api, cli, conformance, engines, errors, metrics, rpcs, settings, states

FOLDER = Path(__file__).parent.parent.parent / "docs" / "reference"
SUBJECTS = (settings, cli, errors, rpcs, api, states, metrics, conformance, engines)
PAGES: dict[str, Callable[[], str]] = {name: page for subject in SUBJECTS for name, page in subject.PAGES.items()}
