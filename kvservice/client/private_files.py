"""Files that hold secrets: replaced at once, and at no moment readable by more people than they should be."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Blocks until the bytes are on disk. A link is replaced, not followed. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # whatever the umask
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)
