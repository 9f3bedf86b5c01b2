"""The one error tree of the service.

    KVServiceError                 reason            gRPC code             retryable
    ├── InvalidRequest             INVALID_REQUEST   INVALID_ARGUMENT      no    malformed, out of range, wrong length
    ├── Refused                    (of the subclass) FAILED_PRECONDITION   no    never by itself: one of these
    │   ├── FingerprintMismatch    FINGERPRINT                                   model, dtype, layout or hash differs
    │   ├── VersionMismatch        VERSION                                       the other side has another version
    │   ├── StaleEpoch             EPOCH                                         the shard restarted: attach again
    │   ├── NotAttached            NOT_ATTACHED                                  no such attachment here
    │   ├── UnsupportedLayout      LAYOUT                                        KV cache groups or layout not supported
    │   ├── UnsupportedDevice      DEVICE                                        the engine's device has no copies here
    │   ├── RandomHashSeed         HASH_SEED                                     the engine's hashes differ per process
    │   ├── UnnamedWeights         WEIGHTS                                       the engine cannot name its weights
    │   └── Unauthenticated        UNAUTHENTICATED   UNAUTHENTICATED             token is missing, unknown or revoked
    ├── Forbidden                  FORBIDDEN         PERMISSION_DENIED     no    not allowed to this role or node
    ├── Exhausted                  EXHAUSTED         RESOURCE_EXHAUSTED    yes   no slot, over quota, message too large
    ├── Unavailable                UNAVAILABLE       UNAVAILABLE           yes   server drains, died or never started
    │   └── NoService              NO_SERVICE                                    no service of this name is here
    ├── DeadlineExceeded           DEADLINE          DEADLINE_EXCEEDED     yes   no answer in the caller's time
    ├── LeaseLost                  LEASE_LOST        FAILED_PRECONDITION   yes   what a program read may have changed
    ├── SegmentError               SEGMENT           FAILED_PRECONDITION   no    shared memory cannot be made or read
    ├── ConfigError                CONFIG            INVALID_ARGUMENT      no    a setting is unknown or wrong
    ├── ServiceConflict            CONFLICT          FAILED_PRECONDITION   no    two services or shards with one name
    ├── TransferError              TRANSFER          UNAVAILABLE           yes   the bytes did not arrive
    ├── TierError                  TIER              FAILED_PRECONDITION   no    a tier cannot be used
    └── CodecError                 CODEC             DATA_LOSS             no    stored bytes cannot be decoded
        └── KeyUnknown             KEY_UNKNOWN                                   they need a key that is not here

The text is for people and says what to do; `reason` and `attributes` are for code. The gRPC codes are strings, so that
this module imports nothing; kvservice.wire.status maps them in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping


class KVServiceError(Exception):
    """Base of all errors that kvservice raises on purpose.

    `attributes` are named values for programs (`wanted_bytes=…, free_bytes=…`). They travel over gRPC as text.
    `retryable` says whether the same call can succeed later without a change by the caller.
    """

    reason = "INTERNAL"
    grpc_code = "INTERNAL"
    retryable = False

    def __init__(self, message: str, /, **attributes: object) -> None:
        super().__init__(message)
        self.message = message
        self.attributes: Mapping[str, object] = attributes


class InvalidRequest(KVServiceError):
    reason = "INVALID_REQUEST"
    grpc_code = "INVALID_ARGUMENT"


class Refused(KVServiceError):
    reason = "REFUSED"
    grpc_code = "FAILED_PRECONDITION"


class FingerprintMismatch(Refused):
    reason = "FINGERPRINT"


class VersionMismatch(Refused):
    reason = "VERSION"


def another_version(what: str, theirs: object, ours: int) -> VersionMismatch:
    """`what` (an engine, a segment, …) has another version than this process knows: both versions, and what to do."""
    return VersionMismatch(
        f"{what} has version {theirs}, and this process knows version {ours}: upgrade the older of the two; the lookup "
        "service comes first, then the shards, then the engines. See docs/howto/upgrade.md",
        theirs=theirs,
        ours=ours,
    )


class StaleEpoch(Refused):
    reason = "EPOCH"


class NotAttached(Refused):
    reason = "NOT_ATTACHED"


class UnsupportedLayout(Refused):
    reason = "LAYOUT"


class UnsupportedDevice(Refused):
    reason = "DEVICE"


class RandomHashSeed(Refused):
    reason = "HASH_SEED"


class UnnamedWeights(Refused):
    reason = "WEIGHTS"


class Forbidden(KVServiceError):
    reason = "FORBIDDEN"
    grpc_code = "PERMISSION_DENIED"


class Unauthenticated(Refused):
    reason = "UNAUTHENTICATED"
    grpc_code = "UNAUTHENTICATED"


class Exhausted(KVServiceError):
    reason = "EXHAUSTED"
    grpc_code = "RESOURCE_EXHAUSTED"
    retryable = True


class Unavailable(KVServiceError):
    reason = "UNAVAILABLE"
    grpc_code = "UNAVAILABLE"
    retryable = True


class NoService(Unavailable):
    reason = "NO_SERVICE"


class DeadlineExceeded(KVServiceError):
    reason = "DEADLINE"
    grpc_code = "DEADLINE_EXCEEDED"
    retryable = True


class LeaseLost(KVServiceError):
    reason = "LEASE_LOST"
    grpc_code = "FAILED_PRECONDITION"
    retryable = True


class SegmentError(KVServiceError):
    reason = "SEGMENT"
    grpc_code = "FAILED_PRECONDITION"


class ConfigError(KVServiceError):
    reason = "CONFIG"
    grpc_code = "INVALID_ARGUMENT"


def plaintext_refused(what: str) -> ConfigError:
    """The error for a port without TLS, with the ways to solve it. `what` says in a clause what would be plaintext.

    A port on loopback counts too: every user of the machine can reach it.
    """
    return ConfigError(
        f"{what}: whoever reaches it could read and remove blocks. Either give every process certificates: set tls_dir "
        "(KVSERVICE_TLS_DIR) to a directory with tls.crt, tls.key and ca.crt, which `kvservice certs DIR` makes; or "
        "stay on this machine: give 127.0.0.1 and no port, and a Unix socket is used; or, when nobody else is on the "
        "network and the machine, set allow_plaintext (KVSERVICE_ALLOW_PLAINTEXT=1). See docs/howto/certificates.md",
        key="tls_dir",
    )


class ServiceConflict(KVServiceError):
    reason = "CONFLICT"
    grpc_code = "FAILED_PRECONDITION"


class TransferError(KVServiceError):
    reason = "TRANSFER"
    grpc_code = "UNAVAILABLE"
    retryable = True


class TierError(KVServiceError):
    """A tier cannot be used: no room, a file system that does not keep bytes, an object store that refuses."""

    reason = "TIER"
    grpc_code = "FAILED_PRECONDITION"


class CodecError(KVServiceError):
    """A stored block is not what its codec made, or a block must not be stored without a codec that cannot be used."""

    reason = "CODEC"
    grpc_code = "DATA_LOSS"


class KeyUnknown(CodecError):
    reason = "KEY_UNKNOWN"


def error_types() -> dict[str, type[KVServiceError]]:
    """All error classes by their reason, to rebuild an error that came over the wire."""
    found: dict[str, type[KVServiceError]] = {}
    pending: list[type[KVServiceError]] = [KVServiceError]
    while pending:
        kind = pending.pop()
        found[kind.reason] = kind
        pending.extend(kind.__subclasses__())
    return found
