"""Who may ask the console, and what a browser may do with its answers. Pure.

The printed URL carries the token behind a #, which browsers keep to themselves: it is in no request line, log or
Referer. The page keeps it for its own origin and tab, and sends it as `Authorization: Bearer`. A cookie would go to
every port of this host, and so to servers of its other users.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Collection

from kvservice.errors import ConfigError

TOKEN_BYTES = 24  # of a token that is made here: 192 bits cannot be guessed
TOKEN_CHARS_MIN = 24  # a shorter token in a file is refused: it could be guessed
TOKEN_CHARS_MAX = 512  # far below what an HTTP header may have; a longer one is refused
SCHEME = "Bearer "

# Nothing from elsewhere, no script or style inside of the page, no form, no frame, and no text that becomes markup.
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def check_token(text: str) -> str:
    """The token in the text of a file. Raises ConfigError for one that could be guessed or not be sent."""
    token = text.strip()
    allowed = token.isascii() and all(char.isalnum() or char in "-_.~" for char in token)
    if not allowed or not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
        raise ConfigError(
            f"a token has {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} letters, digits, '-', '_', '.' or '~'; make one with "
            "`openssl rand -hex 24`",
            key="token_file",
        )
    return token


def shows_token(header: str | None, token: str) -> bool:
    """Whether this Authorization header has the token. Takes the same time for every wrong one."""
    shown = (header or "").removeprefix(SCHEME)
    return hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode())


def is_our_name(host: str | None, names: Collection[str]) -> bool:
    """Whether a Host header names us: an address, localhost, or one of `names`.

    A page of another site can make its own name point here (DNS rebinding). It cannot make an address do so.
    """
    name = _without_port(host or "").lower()
    if name == "localhost" or name in names:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
