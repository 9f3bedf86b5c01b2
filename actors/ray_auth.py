"""Ray's token and TLS: sets the environment variables that tell Ray which to use, for this process and its children.

What the user has set stays as it is. What this module sets is decided again for each cluster. Use it before connecting,
on the main thread.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from kvservice.discovery import default_runtime_root
from kvservice.private_files import write_private

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
USE_TLS = "RAY_USE_TLS"
# in the folder that `up` makes for the Ray cluster that it starts
CERTIFICATE, KEY, AUTHORITY = "server.crt", "server.key", "ca.crt"
TLS_FILES = {"RAY_TLS_SERVER_CERT": CERTIFICATE, "RAY_TLS_SERVER_KEY": KEY, "RAY_TLS_CA_CERT": AUTHORITY}
HEAD_PREFIX = "ray-head-"
TOKEN_BYTES = 32  # 256 random bits: nobody can guess the token
_decided: dict[str, str] = {}  # what this module has put into the environment


def head_record(service: str) -> Path:
    """The file where `up` notes the Ray cluster that it started: {"pid", "token_path", "tls_dir"}, and "address" once
    it has one."""
    return default_runtime_root() / f"{HEAD_PREFIX}{service}.json"


def read_head(record: Path) -> dict[str, object]:
    """The note of `up`. Empty if there is none, or it cannot be read."""
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def prepare(address: str | None) -> None:
    """Set the variables before this process joins the cluster at `address`; None if the address is not known. Some of
    Ray's commands turn tokens on by themselves and others do not, so the mode is always set."""
    _undo()
    certificates = _noted(address, "tls_dir")
    if certificates is not None and USE_TLS not in os.environ:
        for name, value in tls_variables(certificates).items():
            _decide(name, value)
    if MODE not in os.environ:
        _decide_token(address)
    _reread()


def _decide_token(address: str | None) -> None:
    token_path = _noted(address, "token_path")
    known = None if token_path is None else str(token_path)
    if known is not None and TOKEN not in os.environ and TOKEN_PATH not in os.environ:
        _decide(TOKEN_PATH, known)
    _decide(MODE, "token" if known is not None or _has_token() else "disabled")


def of_new_cluster(token_path: Path) -> dict[str, str]:
    """The variables for a Ray cluster that is about to be started. They turn tokens on, with the user's token or with a
    new one in `token_path`, unless the user has set a mode. The file's folder must exist and be private."""
    _undo()
    if MODE in os.environ:
        return {}
    if _has_token():
        return {MODE: "token"}
    write_private(token_path, secrets.token_hex(TOKEN_BYTES).encode())
    return {MODE: "token", TOKEN_PATH: str(token_path)}


def tls_variables(directory: Path) -> dict[str, str]:
    """The variables for a Ray process that uses the certificates of this folder."""
    return {USE_TLS: "1", **{name: str(directory / file) for name, file in TLS_FILES.items()}}


def asks_for_token() -> bool:
    """Whether the cluster that this process has joined asks for a token."""
    return os.environ.get(MODE, "").lower() == "token"


def _noted(address: str | None, what: str) -> Path | None:
    """The token file, or the folder of certificates, of a cluster that `up` started on this machine."""
    if address is None:
        return None
    for record in sorted(default_runtime_root().glob(f"{HEAD_PREFIX}*.json")):
        found = read_head(record)
        path = found.get(what)
        if found.get("address") == address and isinstance(path, str) and path and Path(path).exists():
            return Path(path)
    return None


def _has_token() -> bool:
    if os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH):
        return True
    return (Path.home() / ".ray" / "auth_token").is_file()


def _decide(name: str, value: str) -> None:
    os.environ[name] = _decided[name] = value


def _undo() -> None:
    for name, value in _decided.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _decided.clear()


def _reread() -> None:
    """Make Ray read mode and token again; it keeps those from when it was imported or first asked."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # made by Cython

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
