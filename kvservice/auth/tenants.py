"""The tenants file: who may use the service, by the hash of a token, and what each may hold.

    {"version": 1, "public_secret": "<64 hex digits>",
     "tenants": [{"name": "team-a", "tokens": ["<sha256 of a token, hex>"], "secret": "<64 hex digits>",
                  "quota": "25%" or "8GiB" or "", "disk_quota": the same, "in_flight": 0,
                  "public": "no" | "read" | "publish", "admin": false}]}

The file holds secrets: whoever reads it can name every tenant's blocks. It holds no token. A file that is broken never
takes the place of one that works. Nothing of a token or a secret is ever in an error or a log. `TenantsFile.look` reads
the file and may be called from any thread; `current` is a plain read. A token travels as `authorization: Bearer ...`.

The file is JSON, because Python reads and writes that. Of TOML it has a reader only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from kvservice.core.block import keys
from kvservice.core.block.tenants import NOBODY, OTHERS, TenantLimits
from kvservice.errors import ConfigError, Unauthenticated
from kvservice.units import parse_bytes

log = logging.getLogger("kvservice.wire")

VERSION = 1  # of the file's format. A file of another version is refused by name.
FILE_BYTES_MAX = 64 << 20  # about 100,000 tenants. A larger file is refused before it is parsed.
TOKENS_MAX = 8  # per tenant: enough to replace tokens one engine at a time. A file with more is refused.
SECRET_BYTES = 32  # 256 bits cannot be guessed; 64 hexadecimal digits in the file
TOKEN_BYTES_MAX = 512  # ours have 47 characters; the rest is for other issuers' tokens. A longer one is refused.
TOKEN_PREFIX = "kvs_"
METADATA_KEY = "authorization"
_SCHEME = "Bearer "
_BEARER_BYTES_MAX = len(_SCHEME) + TOKEN_BYTES_MAX  # a longer value holds no token that a client may have
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{64}")
_SHARE = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?%")
_KNOWN = frozenset({"name", "tokens", "secret", "quota", "disk_quota", "in_flight", "public", "admin"})
DISK = "disk"  # the tier that disk_quota is of
WHAT_TO_DO = (
    "name its file with KVSERVICE_TOKEN_FILE (an engine also with token_file in kv_connector_extra_config); "
    "`kvservice tenants add NAME --file FILE` makes one"
)


class Public(Enum):
    NO = "no"
    READ = "read"
    PUBLISH = "publish"  # may also read


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant, as the file describes it."""

    name: str
    tokens: tuple[bytes, ...] = field(repr=False)  # SHA-256 of each token, the newest last
    secret: bytes = field(repr=False)
    quota: str = ""  # a share of each node's pool ("25%") or bytes ("8GiB"); "" = no quota
    in_flight: int = 0  # slots of one node reserved or being fetched at once; 0 = no limit
    public: Public = Public.NO
    admin: bool = False  # sees what other tenants' requests did
    disk_quota: str = ""  # the same as `quota`, of each node's disk


@dataclass(frozen=True, slots=True)
class Bearer:
    """The tenant that a channel's token names, and which of its tokens it was."""

    tenant: Tenant
    token: bytes = field(repr=False)  # SHA-256 of the token


class Tenants:
    """The contents of the file at one moment."""

    def __init__(self, tenants: Iterable[Tenant], public_secret: bytes) -> None:
        self.by_name = {tenant.name: tenant for tenant in tenants}
        self._by_token = {token: tenant for tenant in self.by_name.values() for token in tenant.tokens}
        self.public_secret = public_secret

    def of_token(self, token: str) -> Bearer | None:
        digest = hash_token(token)
        tenant = self._by_token.get(digest)
        # The lookup uses a hash that nobody can choose. The comparison that decides takes constant time.
        known = next((known for known in tenant.tokens if hmac.compare_digest(known, digest)), None) if tenant else None
        return None if tenant is None or known is None else Bearer(tenant, digest)

    def is_valid(self, name: str, token: bytes) -> bool:
        """Whether the token with this hash is still one of this tenant's tokens."""
        tenant = self.by_name.get(name)
        return tenant is not None and token in tenant.tokens

    def limits(self, pool_bytes: int, disk_bytes: int = 0) -> dict[str, TenantLimits]:
        """The limits of each tenant for a pool of `pool_bytes` bytes, in the order of the file. `disk_bytes` is what
        the disk below it takes; 0 = there is none."""
        return {
            tenant.name: TenantLimits(
                quota_bytes(tenant.quota, pool_bytes),
                tenant.in_flight,
                {DISK: quota_bytes(tenant.disk_quota, disk_bytes)} if tenant.disk_quota and disk_bytes else {},
            )
            for tenant in self.by_name.values()
        }

    def secrets(self) -> dict[str, bytes]:
        """The secret of each tenant, by name: the file's own bytes, not copies."""
        return {tenant.name: tenant.secret for tenant in self.by_name.values()}

    def block_keys_of(self, tenant: Tenant) -> tuple[bytes, bytes]:
        """(the tenant's own key, the public key or b"" when it may not read public blocks)."""
        public = b"" if tenant.public is Public.NO else keys.public_key(self.public_secret)
        return keys.tenant_key(tenant.secret, tenant.name), public


class TenantsFile:
    """The tenants file, and the last contents of it that were valid."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is missing or wrong."""
        self.path = path
        self._stamp = _stamp(path)
        self._tenants = read_tenants(path)
        self._refused: tuple[object, str] = (None, "")  # stamp of what was read, and what was logged

    @property
    def current(self) -> Tenants:
        return self._tenants

    def look(self) -> bool:
        """Take the file when it has changed. Returns whether it was taken.

        Blocks while it reads the file. A file that is wrong is logged once and not taken; one that could not be read is
        tried again.
        """
        stamp: object = None
        try:
            stamp = _stamp(self.path)
            if stamp in (self._stamp, self._refused[0]):
                return False
            self._tenants = read_tenants(self.path)
        except ConfigError as error:
            refused = (None if isinstance(error.__cause__, OSError) else stamp, error.message)
            if refused != self._refused:
                log.warning("tenants_file_not_taken", extra={"reason": error.message, "path": str(self.path)})
            self._refused = refused
            return False
        self._stamp, self._refused = stamp, (None, "")
        log.info("tenants_file_taken", extra={"path": str(self.path), "tenants": len(self._tenants.by_name)})
        return True


def open_tenants(path: str | Path | None) -> TenantsFile | None:
    """None when `path` is empty: then all callers are one tenant. Raises ConfigError as TenantsFile does."""
    return TenantsFile(Path(path)) if path else None


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def new_token() -> str:
    """256 random bits in URL-safe characters, after the prefix."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a client's calls. Raises ConfigError when the text cannot be a token."""
    if not token.isascii() or not token.isprintable() or " " in token or not 16 <= len(token) <= TOKEN_BYTES_MAX:
        raise ConfigError(f"the token is not one: {WHAT_TO_DO}", key="token")
    return ((METADATA_KEY, _SCHEME + token),)


def bearer_of(metadata: Sequence[tuple[str, str | bytes]] | None, tenants: Tenants) -> Bearer:
    """The caller that the metadata names. Raises Unauthenticated for no token, several tokens, or an unknown one."""
    given = [value for key, value in metadata or () if key == METADATA_KEY]
    if not given:
        raise Unauthenticated(f"this service has tenants, and the call has no token: {WHAT_TO_DO}")
    value = given[0]
    if len(given) > 1 or not isinstance(value, str) or not value.startswith(_SCHEME) or len(value) > _BEARER_BYTES_MAX:
        raise Unauthenticated(f"the call's token is malformed: {WHAT_TO_DO}")
    caller = tenants.of_token(value[len(_SCHEME) :])
    if caller is None:
        raise Unauthenticated(f"the call's token is not known here, or was revoked: {WHAT_TO_DO}")
    return caller


def quota_bytes(quota: str, pool_bytes: int) -> int:
    """The bytes of "25%" or "8GiB"; 0 for "", which means no quota. Raises ValueError."""
    if not quota:
        return 0
    if _SHARE.fullmatch(quota):
        share = float(quota[:-1]) / 100
        if not 0 < share <= 1:
            raise ValueError(f"quota {quota!r} is not more than 0 and at most 100%")
        return max(int(pool_bytes * share), 1)
    size = parse_bytes(quota)
    if size <= 0:
        raise ValueError(f"quota {quota!r} is nothing")
    return size


def read_tenants(path: Path) -> Tenants:
    """Read and parse the file. Blocks. Raises ConfigError, which never quotes a token or a secret of the file."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & stat.S_IWOTH:
                raise ConfigError(
                    f"the tenants file {path} is not a regular file, or everybody can write it: chmod o-w {path}",
                    key="tenants_file",
                )
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the tenants file {path}: {error.strerror}; `kvservice tenants add NAME --file {path}` makes "
            "one",
            key="tenants_file",
        ) from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"the tenants file {path} is larger than {FILE_BYTES_MAX >> 20} MiB", key="tenants_file")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError(f"the tenants file {path} is not JSON", key="tenants_file") from None
    try:
        return parse_tenants(found)
    except ValueError as error:
        raise ConfigError(f"the tenants file {path}: {error}", key="tenants_file") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting. If the path were a pipe, opening it would block the whole shard."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_tenants(found: object) -> Tenants:
    """The tenants in a parsed file. Raises ValueError that names the tenant and the field."""
    if not isinstance(found, Mapping):
        raise ValueError("it is no object")
    if found.get("version") != VERSION:
        raise ValueError(f"its version is {found.get('version')!r:.40}, and this shard reads version {VERSION}")
    rows = found.get("tenants")
    if not isinstance(rows, list):
        raise ValueError("tenants is no list")
    tenants = [_parse_tenant(row, place) for place, row in enumerate(rows)]
    names, tokens = [t.name for t in tenants], [token for t in tenants for token in t.tokens]
    if len(set(names)) < len(names):
        raise ValueError("a name is there twice")
    if len(set(tokens)) < len(tokens):
        raise ValueError("a token is there twice")
    if len({t.secret for t in tenants}) < len(tenants):
        raise ValueError("two tenants have the same secret")
    return Tenants(tenants, _hex(found.get("public_secret"), "public_secret"))


def dump_tenants(tenants: Tenants) -> str:
    """The text of the file. It holds secrets."""
    rows = [
        {
            "name": tenant.name,
            "tokens": [token.hex() for token in tenant.tokens],
            "secret": tenant.secret.hex(),
            "quota": tenant.quota,
            "disk_quota": tenant.disk_quota,
            "in_flight": tenant.in_flight,
            "public": tenant.public.value,
            "admin": tenant.admin,
        }
        for tenant in tenants.by_name.values()
    ]
    whole = {"version": VERSION, "public_secret": tenants.public_secret.hex(), "tenants": rows}
    return json.dumps(whole, indent=1) + "\n"


def check_name(name: object) -> str:
    """Returns the name. Raises ValueError when it is not a valid tenant's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (NOBODY, OTHERS):
        raise ValueError("a tenant's name is 1 to 64 letters, digits, '_', '.' and '-', and begins with no sign")
    return name


def _parse_tenant(row: object, place: int) -> Tenant:
    if not isinstance(row, Mapping):
        raise ValueError(f"tenant {place} is no object")
    try:
        name = check_name(row.get("name"))
    except ValueError as error:
        raise ValueError(f"tenant {place}: {error}") from None
    unknown = sorted(str(key)[:32] for key in row.keys() - _KNOWN)
    if unknown:
        raise ValueError(f"tenant {name} has an unknown field {unknown[0]!r}")
    tokens = row.get("tokens")
    if not isinstance(tokens, list) or len(tokens) > TOKENS_MAX:
        raise ValueError(f"tokens of tenant {name} are no list of at most {TOKENS_MAX}")
    in_flight, admin, quota = row.get("in_flight", 0), row.get("admin", False), row.get("quota", "")
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or not 0 <= in_flight < 1 << 31:
        raise ValueError(f"in_flight of tenant {name} is no number of slots")
    if not isinstance(admin, bool):
        raise ValueError(f"admin of tenant {name} is neither true nor false")
    if not isinstance(quota, str) or row.get("public", "no") not in [right.value for right in Public]:
        raise ValueError(f"quota of tenant {name} is no text, or public is not one of no, read, publish")
    disk_quota = row.get("disk_quota", "")
    if not isinstance(disk_quota, str):
        raise ValueError(f"disk_quota of tenant {name} is no text")
    try:
        quota_bytes(quota, 1)
        quota_bytes(disk_quota, 1)
    except ValueError as error:
        raise ValueError(f"tenant {name}: {error}") from None
    hashes = tuple(_hex(token, f"a token of tenant {name}") for token in tokens)
    secret = _hex(row.get("secret"), f"the secret of tenant {name}")
    return Tenant(name, hashes, secret, quota, in_flight, Public(row.get("public", "no")), admin, disk_quota)


def _hex(value: Any, what: str) -> bytes:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"{what} is not 64 lower-case hexadecimal digits")
    return bytes.fromhex(value)


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes when the file does, or who may read it; also when the path is a link that changes, as in a
    Kubernetes secret."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read the tenants file {path}: {error.strerror}", key="tenants_file") from error
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
