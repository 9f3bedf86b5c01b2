"""Names for services and files of tests, which say what run of tests made them."""

from __future__ import annotations

import os
import uuid

SESSION_VARIABLE = "KVSERVICE_TEST_SESSION"  # an id of the run, which its processes inherit
SESSION_DIGITS, NAME_DIGITS = 3, 8  # hexadecimal; few: paths of sockets end after 107 bytes


def unique_name() -> str:
    """Eight characters that nobody else uses: digits, of which the first three are those of the run's id. Outside of a
    run the first is no digit."""
    run = os.environ.get(SESSION_VARIABLE, "x")[:SESSION_DIGITS]
    return (run + uuid.uuid4().hex)[:NAME_DIGITS]
