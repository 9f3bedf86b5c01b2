"""The token that an engine or a command sends to shards, from a file that may be replaced while the process runs.

A Token belongs to one event loop or thread. It reads the file there, once a second at most, and blocks meanwhile.
"""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Callable
from pathlib import Path

from kvservice.auth.tenants import TOKEN_BYTES_MAX, TOKEN_PREFIX, token_metadata
from kvservice.config import token_of_environment
from kvservice.errors import ConfigError

log = logging.getLogger("kvservice.client")

LOOK_SECONDS = 1.0  # a replaced token is used within this time. One look is one stat() call.
CallMetadata = tuple[tuple[str, str], ...]


class Token:
    """A token and the metadata with which calls carry it; the metadata is empty when there is no token."""

    def __init__(self, value: str = "", path: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """A file takes precedence over a value. Without either there is no token.

        Raises ConfigError when `path` is itself a token: every error about the file would show it.
        """
        if path.startswith(TOKEN_PREFIX):
            raise ConfigError(
                "token_file is a token; write it to a file, and give the path of the file", key="token_file"
            )
        self._path = Path(path) if path else None
        self._metadata: CallMetadata = token_metadata(value) if value and not path else ()
        self._clock = clock
        self._look_at = 0.0
        self._stamp: tuple[int, int, int] | None = None
        self._complained = ""

    @classmethod
    def of_environment(cls, path: str | None = None) -> Token:
        """KVSERVICE_TOKEN_FILE or KVSERVICE_TOKEN, unless a file is named. Raises ConfigError for a malformed token."""
        value, named = token_of_environment()
        return cls(value, path or named)

    @classmethod
    def of_command(cls) -> Token:
        """That of the environment, read at once, so that a wrong file is not taken for a service that does not answer.
        Raises ConfigError."""
        token = cls.of_environment()
        token.metadata()
        return token

    def metadata(self) -> CallMetadata:
        """The metadata of a call. Raises ConfigError when the file cannot be read and never could."""
        if self._path is not None and self._clock() >= self._look_at:
            self._look_at = self._clock() + LOOK_SECONDS
            self._read(self._path)
        return self._metadata

    def metadata_for(self, address: str, *, encrypted: bool) -> CallMetadata:
        """The metadata of a call to this address; empty for a plaintext port, where others could read the token.

        Raises ConfigError as `metadata` does.
        """
        return self.metadata() if encrypted or address.startswith("unix:") else ()

    def _read(self, path: Path) -> None:
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
                raise ConfigError("it is not a regular file", key="token_file")
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            with path.open(encoding="ascii") as file:
                text = file.read(TOKEN_BYTES_MAX + 1).strip()
            self._metadata = token_metadata(text)
            self._stamp, self._complained = stamp, ""
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            reason = error.message if isinstance(error, ConfigError) else f"it cannot be read ({type(error).__name__})"
            reason = f"token file {path}: {reason}"
            if not self._metadata:
                self._look_at = 0.0
                raise ConfigError(reason, key="token_file") from None
            if reason != self._complained:
                self._complained = reason
                log.warning("token_file_not_taken", extra={"reason": reason})
