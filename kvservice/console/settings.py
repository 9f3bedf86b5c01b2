"""The settings of the console, checked once at its start, and the certificate that it serves with."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvservice.auth.tls import is_loopback
from kvservice.console.access import check_token, new_token
from kvservice.errors import ConfigError

PORT = 7480  # the default
TOKEN_FILE_BYTES_MAX = 4096  # more than the longest token; the rest of a larger file is not read


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """Raises ConfigError for what cannot work."""

    token: str
    host: str = "127.0.0.1"
    port: int = PORT  # 0 means any free port
    names: frozenset[str] = frozenset()  # DNS names by which browsers may call the console, in lower case
    certificate: Path | None = None  # PEM; None = plain HTTP
    key: Path | None = None
    allow_plaintext: bool = False
    interval_seconds: float = 1.0  # between two readings while somebody watches
    printed_token: bool = True  # whether the printed URL has the token

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("give both --certificate and --key, or neither", key="certificate")
        if self.certificate is None and not is_loopback(self.host) and not self.allow_plaintext:
            raise ConfigError(
                f"{self.host} can be reached from other machines, and without TLS whoever is on the way reads the token"
                ": give --certificate and --key; or set KVSERVICE_TLS_DIR; or stay on 127.0.0.1 and come through "
                "`ssh -L`; or, behind something that ends TLS, set KVSERVICE_ALLOW_PLAINTEXT=1",
                key="certificate",
            )

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"


def token_of(path: Path | None) -> str:
    """The token in this file, or a new one. Blocks. Raises ConfigError."""
    if path is None:
        return new_token()
    try:
        with path.open("rb") as file:
            return check_token(file.read(TOKEN_FILE_BYTES_MAX).decode("ascii", "replace"))
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror}", key="token_file") from error


class Certificate:
    """A certificate with its key, read again when the files change. Blocks to read them; one caller at a time."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError for files that cannot be served with."""
        self._files = (certificate, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self._stamp = self._read_stamp()
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot serve with {certificate} and {key}: {error}; both are PEM, and the key is not encrypted",
                key="certificate",
            ) from error

    def renew(self) -> bool:
        """Take changed files for new connections. Returns whether it did; files that do not fit are left."""
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return False
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a pair that does not fit spoils its context
            self._load(self.context)
        except (OSError, ssl.SSLError):
            return False
        self._stamp = stamp
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        context.load_cert_chain(certificate, key, password="")  # without one OpenSSL would ask on the terminal

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = [path.stat() for path in self._files]
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)
