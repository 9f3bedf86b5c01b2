"""Opens an object store by its URL and says in plain words what is wrong with it.

Everything that talks to a store is obstore's (Python bindings of Rust's object_store), which is an extra: this module
alone imports it, when a store is opened. Its functions may be called from any thread.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvservice.errors import TierError
from kvservice.units import printable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# The schemes that are known, with the beginning of the environment variables of their clients.
SCHEMES = {
    "s3": "AWS",
    "s3a": "AWS",
    "https": "AWS",  # https://BUCKET.s3.REGION.amazonaws.com
    "gs": "GOOGLE",
    "az": "AZURE",
    "abfs": "AZURE",
    "abfss": "AZURE",
    "file": "",
    "memory": "",
}
# What a client reads from PREFIX_NAME. obstore reads the rest (credentials, region, endpoint) by itself.
CLIENT_VARIABLES = (
    "allow_http",
    "allow_invalid_certificates",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
    "connect_timeout",
    "timeout",
)
CONNECT_SECONDS = 2.0  # a store in reach connects within milliseconds
REQUEST_SECONDS = 20.0  # of one request: all bytes in flight (256 MiB) pass within this at 13 MB/s, 100 Mbit/s
RETRIES_MAX = 2  # after an error of the server or the network: more would only delay the miss
RETRY_SECONDS = 5.0  # a request is not begun again this long after its first beginning
RETRY_PAUSE_SECONDS = 0.05  # before the first retry; it doubles, with jitter
RETRY_PAUSE_SECONDS_MAX = 1.0  # within RETRY_SECONDS there is no time for longer ones
MESSAGE_CHARS_MAX = 300  # of a library's message in ours: the rest is a dump of its data


def open_store(url: str) -> ObjectStore:
    """The store of this URL; names of its objects are relative to the URL's path. Reads the environment.

    Raises TierError when obstore is not installed, or the URL or the environment make no store. Asks nobody: whether
    the store answers shows with the first request.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, MemoryStore, from_url
    except ImportError as error:
        raise TierError(
            "an object store needs the package obstore, which comes with the extra 'objects' (pip install obstore)"
        ) from error
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if parts.query or parts.fragment:  # obstore would leave them out, and use the folder of the shorter name
        raise TierError(f"objects_url {url!r} says something behind # or ?: write %23 and %3F in a prefix", url=url)
    if scheme not in SCHEMES:
        raise TierError(
            f"objects_url {url!r} is no URL of an object store: write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "az://CONTAINER/PREFIX or file:///FOLDER",
            url=url,
        )
    try:
        if scheme == "file":
            folder: ObjectStore = LocalStore.from_url(url, mkdir=True)
            return folder
        if scheme == "memory":
            return MemoryStore()
        store: ObjectStore = from_url(
            url,
            client_options=_client_options(SCHEMES[scheme]),
            retry_config={
                "max_retries": RETRIES_MAX,
                "retry_timeout": timedelta(seconds=RETRY_SECONDS),
                "backoff": {
                    "init_backoff": timedelta(seconds=RETRY_PAUSE_SECONDS),
                    "max_backoff": timedelta(seconds=RETRY_PAUSE_SECONDS_MAX),
                    "base": 2,
                },
            },
        )
        return store
    except (BaseError, ValueError, OSError) as error:
        raise TierError(f"objects_url {url!r} cannot be opened: {_first_line(error)}", url=url) from error


def _client_options(prefix: str) -> Any:
    """Settings of the HTTP client: ours, and over them those of the environment."""
    options: dict[str, Any] = {
        "connect_timeout": f"{CONNECT_SECONDS}s",
        "timeout": f"{REQUEST_SECONDS}s",
    }
    for name in CLIENT_VARIABLES:
        value = os.environ.get(f"{prefix}_{name.upper()}", "")
        if value:
            options[name] = value
    return options


def store_errors() -> tuple[type[Exception], ...]:
    """What a request of obstore raises when it fails. FileNotFoundError among them says that an object is not there,
    or its bucket."""
    from obstore.exceptions import BaseError

    return (BaseError, OSError, ValueError, asyncio.TimeoutError)


def why_unusable(url: str, error: BaseException) -> TierError:
    """The error for people about a store that failed its proof: what is wrong, and what to do.

    Its attribute `transient` is True when it may work later: buckets, roles and identities are made by others, maybe
    after this process has started.
    """
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error)
    variables = {
        "AWS": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine or pod",
        "GOOGLE": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, or an identity of the machine or pod",
        "AZURE": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or an identity of the machine or pod",
    }.get(SCHEMES.get(urlsplit(url).scheme.lower(), ""), "the credentials")
    transient = True
    if isinstance(error, FileNotFoundError):
        said = "it says that there is no such bucket: make the bucket, or correct its name in objects_url"
    elif isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        said = f"it refuses these credentials: check {variables}. They must allow to get, put, delete and list"
    elif "169.254.169.254" in text or "metadata.google.internal" in text or "token request" in text:
        said = f"there are no credentials for it: set {variables}"
    elif "BadScheme" in text:
        said = "its endpoint is http:// and nobody allowed plain HTTP: use https://, or set AWS_ALLOW_HTTP=true"
        transient = False
    else:
        said = "it does not answer as it should: check objects_url, the endpoint and the network"
    return TierError(
        f"the object store {url} cannot be used, {said}. See docs/howto/object-store.md ({_first_line(error)})",
        url=url,
        transient=transient,
    )


def _first_line(error: BaseException) -> str:
    """The part of a message of obstore that is for people: below it is a dump of its data."""
    text = str(error).partition("\n\nDebug source:")[0].strip() or type(error).__name__
    return printable(" ".join(text.split()))[:MESSAGE_CHARS_MAX]
