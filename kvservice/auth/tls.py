"""TLS for everything that is served or called over TCP, from three files that may change while the process runs.

A directory holds `tls.crt`, `tls.key` and `ca.crt`, as a Kubernetes secret does. Both ends show a certificate and check
the other's against the CA (mTLS). Addresses change and are mostly IPs, so certificates do not name them: each has the
DNS name `kvservice`, and clients check that name. Without TLS the processes of one machine talk over Unix sockets in a
private directory, because a port on loopback is open to every user of the machine.

New files are used only after a handshake with themselves in memory. So a pair that is half replaced, expired or signed
by another CA never replaces one that works. `TlsFiles` may be used from any thread and blocks while it reads files.
"""

from __future__ import annotations

import codecs
import contextlib
import ipaddress
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc

from kvservice.auth.identity import CLIENT_NAME, NODE_NAME
from kvservice.descriptors import cannot_listen
from kvservice.errors import ConfigError, ServiceConflict, plaintext_refused
from kvservice.private_files import check_socket_path, is_listening, make_directory
from kvservice.units import bracketed, endpoint_of

log = logging.getLogger("kvservice.wire")

CERTIFICATE_NAME, KEY_NAME, AUTHORITY_NAME = "tls.crt", "tls.key", "ca.crt"
SERVER_NAME = NODE_NAME
LOOK_SECONDS = 1.0  # a change of the files is seen within this time. One look is three stat() calls.
RETRY_SECONDS = 10.0  # refused files are tried again even if unchanged: a certificate may not be valid yet
FILE_BYTES_MAX = 1 << 20  # some 500 certificates. More bytes are not read, and the rest does not parse or not verify.
HANDSHAKE_TURNS_MAX = 16  # TLS 1.2 takes 3 turns and TLS 1.3 takes 2; files that need more are refused
# The kinds of keys that gRPC's TLS library takes, as each certificate has them: RSA, and the curves P-256 and P-384.
KEY_KINDS = (
    bytes.fromhex("06092a864886f70d010101"),
    bytes.fromhex("06072a8648ce3d020106082a8648ce3d030107"),
    bytes.fromhex("06072a8648ce3d020106052b81040022"),
)
OUT_OF_DATE = (9, 10)  # OpenSSL's codes of a certificate that is not valid yet, and of one that has expired
OTHER_PORT = "choose another --port, or --lookup-port of lookup partitions"
WHAT_TO_DO = "make one with `kvservice certs DIR`, or see docs/howto/certificates.md"

Options = Sequence[tuple[str, str | int]]
TlsStamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the files at one moment, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes
    serves: bool = True  # False for a client's certificate
    valid: tuple[float, float] = (0.0, 0.0)  # from when and until when the certificate is, in seconds since 1970


class TlsFiles:
    """The current certificate, key and CA of a directory."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for files that are missing, cannot be read, or do not work with each other."""
        self.directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp, self._pems = _take(directory)
        self._version = 1
        self._look_at = clock() + LOOK_SECONDS
        self._refused: tuple[TlsStamp | None, str] = (None, "")  # stamp, and what was logged
        self._refused_until = 0.0
        self._judged = (0, (0.0, 0.0))  # the version that `valid` was asked about last, and its answer

    def current(self) -> tuple[int, Pems]:
        """(a number that grows with each change, the contents of the files).

        Looks for a change once a second at most, and then blocks to read the files. Files that do not work are logged,
        and the previous ones stay in use.
        """
        with self._lock:
            now = self._clock()
            if now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                self._look(now)
            return self._version, self._pems

    def valid(self) -> tuple[float, float]:
        """From when and until when the present certificate is valid, or its CA, whichever ends first; in seconds since
        1970. After a change of the files it blocks for a few handshakes in memory."""
        version, pems = self.current()
        if version != self._judged[0]:
            authority = (0.0, math.inf)
            with contextlib.suppress(ConfigError, OSError):  # the files may be changing now; ssl.SSLError is an OSError
                authority = _authority_valid(self.directory)
            self._judged = version, min(pems.valid, authority, key=lambda valid: valid[1])
        return self._judged[1]

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server that asks every client for a certificate signed by the CA.

        Each new connection uses the newest files. Raises ConfigError when the certificate is a client's.
        """
        told, pems = self.current()
        if not pems.serves:
            raise ConfigError(
                f"{self.directory} has a client's certificate (DNS:{CLIENT_NAME}), which cannot serve: give this "
                f"process a node's, with DNS:{SERVER_NAME}; {WHAT_TO_DO}",
                key="tls_dir",
            )

        def fetch() -> grpc.ServerCertificateConfiguration | None:  # gRPC calls it for each handshake, on its thread
            nonlocal told
            version, pems = self.current()
            if version == told:
                return None
            told = version
            return _served(pems)

        fetcher = cast(
            "Callable[[], grpc.ServerCertificateConfiguration]", fetch
        )  # the stubs do not know that None is allowed
        return grpc.dynamic_ssl_server_credentials(_served(pems), fetcher, require_client_authentication=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a new channel, which uses the present files for all its life."""
        _, pems = self.current()
        return grpc.ssl_channel_credentials(pems.authority, pems.key, pems.certificate)

    def _look(self, now: float) -> None:
        stamp = None
        try:
            stamp = _stamp(self.directory)
            if stamp == self._stamp or (stamp == self._refused[0] and now < self._refused_until):
                return
            stamp, pems = _take(self.directory)
            if self._pems.serves and not pems.serves:
                raise ConfigError(
                    f"a client's certificate does not replace a node's in {self.directory}", key="tls_dir"
                )
            self._stamp = stamp
        except (ConfigError, OSError) as error:
            if (stamp, str(error)) != self._refused:
                log.warning("tls_files_not_taken", extra={"reason": str(error), "directory": str(self.directory)})
            self._refused, self._refused_until = (stamp, str(error)), now + RETRY_SECONDS
            return
        self._refused = (None, "")
        if pems != self._pems:
            self._pems = pems
            self._version += 1
            log.info("tls_files_taken", extra={"directory": str(self.directory), "version": self._version})


def open_tls(directory: str | Path | None) -> TlsFiles | None:
    """None when `directory` is empty, which means plaintext. Raises ConfigError as TlsFiles does."""
    return TlsFiles(Path(directory)) if directory else None


def local_or_tcp(host: str, port: int, socket_path: str, *, tls: bool, allow_plaintext: bool) -> str:
    """The address where a server listens and is called: a Unix socket, or host:port.

    The socket is chosen for a loopback host without a port number, when neither TLS nor `allow_plaintext` is set: a
    port would then be open to every user of the machine.
    """
    is_tcp = tls or allow_plaintext or port or not is_loopback(host)
    return f"{bracketed(host)}:{port}" if is_tcp else f"unix:{socket_path}"


def listen(server: grpc.aio.Server, address: str, tls: TlsFiles | None, *, allow_plaintext: bool) -> str:
    """Bind a listener and return the address to call.

    A `unix:` address is open to this user only. A host:port address is served with TLS when `tls` is given. Without it
    a port needs `allow_plaintext`, and the log has a warning. Raises ConfigError for a port that would be plaintext and
    for an address that cannot be bound, and ServiceConflict when another process serves the Unix socket.
    """
    if address.startswith("unix:"):
        return _listen_locally(server, address)
    _check_plaintext(address, tls, allow_plaintext)
    if tls is None:
        log.warning(
            "plaintext_listener: %s is served without TLS, and whoever reaches it can read and remove blocks: set "
            "KVSERVICE_TLS_DIR everywhere (%s), or keep the network closed",
            address,
            WHAT_TO_DO,
            extra={"address": address},
        )
    _check_free(address)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; {OTHER_PORT}") from error
    return f"{address.rpartition(':')[0]}:{port}"


def is_bound(address: str) -> bool:
    """Whether callers can still reach this address of ours. A Unix socket's file may be deleted; a port stays."""
    return not address.startswith("unix:") or Path(address.removeprefix("unix:")).is_socket()


def remove_socket(address: str) -> None:
    """Remove the file of a `unix:` address after its server has ended, and its directory when that is empty."""
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        with contextlib.suppress(OSError):  # rmdir fails while the directory has other files; those stay
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def _listen_locally(server: grpc.aio.Server, address: str) -> str:
    path = Path(address.removeprefix("unix:"))
    check_socket_path(str(path))
    make_directory(path.parent)
    if is_listening(str(path)):
        raise ServiceConflict(
            f"another process already serves {path}: stop it, or choose another --service, --node or --partition"
        )
    path.unlink(missing_ok=True)  # nobody listens on it: its process was killed
    previous = os.umask(0o177)  # the socket must be owner-only from the moment it exists
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; set another KVSERVICE_RUNTIME_DIR") from error
    finally:
        os.umask(previous)
    return address


def check_listener(address: str, tls: TlsFiles | None, *, allow_plaintext: bool) -> None:
    """Check that `listen` could bind this address now, and keep nothing bound. Raises ConfigError as `listen` does."""
    if address.startswith("unix:"):
        return
    _check_plaintext(address, tls, allow_plaintext)
    _check_free(address)


def _check_free(address: str) -> None:
    """Raises ConfigError if a port cannot be bound. gRPC writes lines of its own for that, and its error gives no
    reason."""
    endpoint = endpoint_of(address)
    assert endpoint is not None, f"{address} is made of a host and a port"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            *endpoint, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except (OSError, UnicodeError) as error:
        raise ConfigError(cannot_listen(address, error, OTHER_PORT)) from error


def _check_plaintext(address: str, tls: TlsFiles | None, allow_plaintext: bool) -> None:
    if tls is None and not allow_plaintext:
        raise plaintext_refused(f"{address} would be served without TLS")


def open_channel(address: str, tls: TlsFiles | None, options: Options = ()) -> grpc.aio.Channel:
    """A channel for asyncio. `unix:` addresses are never encrypted."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=_named(options))


def open_blocking_channel(address: str, tls: TlsFiles | None) -> grpc.Channel:
    """A channel whose calls block. `unix:` addresses are never encrypted."""
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, tls.channel_credentials(), options=_named(()))


def is_loopback(host: str) -> bool:
    """Whether this host is reachable from this machine only. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _named(options: Options) -> tuple[tuple[str, str | int], ...]:
    return (*options, ("grpc.ssl_target_name_override", SERVER_NAME))


def _served(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.authority)


def _stamp(directory: Path) -> TlsStamp:
    """A value that changes when a file does, also when it is a link that changes, as in a Kubernetes secret."""
    found = [os.stat(directory / name) for name in (CERTIFICATE_NAME, KEY_NAME, AUTHORITY_NAME)]  # noqa: PTH116
    return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)


def _take(directory: Path) -> tuple[TlsStamp, Pems]:
    """Read the files and test them with a handshake. Raises ConfigError."""
    if not directory.is_dir():
        raise ConfigError(f"tls_dir is {directory}, which is not a directory: {WHAT_TO_DO}", key="tls_dir")
    missing = [n for n in (CERTIFICATE_NAME, KEY_NAME, AUTHORITY_NAME) if not (directory / n).is_file()]
    if missing:
        raise ConfigError(f"{directory} has no {' and no '.join(missing)}: {WHAT_TO_DO}", key="tls_dir")
    try:
        stamp = _stamp(directory)
        certificate, key, authority = [_read(directory / n) for n in (CERTIFICATE_NAME, KEY_NAME, AUTHORITY_NAME)]
        pems = Pems(certificate, key, authority, *_try(directory))
        if _stamp(directory) != stamp:
            raise ConfigError(f"the files in {directory} changed while they were read: start again", key="tls_dir")
    except ssl.SSLCertVerificationError as error:
        _unusable(directory, error.verify_message + _clock_here(error.verify_code), error)
    except ssl.SSLError as error:
        _unusable(directory, error.reason or str(error), error)
    except OSError as error:
        raise ConfigError(f"cannot read the files in {directory}: {error.strerror}", key="tls_dir") from error
    return stamp, pems


def _unusable(directory: Path, reason: str, error: Exception) -> NoReturn:
    raise ConfigError(
        f"the certificate in {directory} cannot be used: {reason}. {CERTIFICATE_NAME} must be signed by "
        f"{AUTHORITY_NAME}, belong to {KEY_NAME} (not encrypted), be valid now, have the name DNS:{SERVER_NAME} and "
        f"allow server and client use; {WHAT_TO_DO}",
        key="tls_dir",
    ) from error


def _clock_here(verify_code: int) -> str:
    """What the clock says, if the certificate is refused for its dates: the clock may be what is wrong."""
    return f" (the clock of this machine says {utc_time(time.time())})" if verify_code in OUT_OF_DATE else ""


def _authority_valid(directory: Path) -> tuple[float, float]:
    """From when and until when the CA of the certificate in these files is valid, in seconds since 1970. Of several
    that stand for it, it is the one that ends last. A certificate that is trusted itself has none: (0, inf)."""
    known, found = _context(ssl.PROTOCOL_TLS_CLIENT, directory), list[tuple[float, float]]()
    for der, told in zip(known.get_ca_certs(binary_form=True), known.get_ca_certs(), strict=True):
        with contextlib.suppress(ssl.SSLError):
            _try(directory, der)
            found.append(_dates(told))
    return max(found, key=lambda valid: valid[1], default=(0.0, math.inf))


def utc_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX).removeprefix(codecs.BOM_UTF8)  # with it gRPC finds nothing in the file
    except OSError as error:
        raise ConfigError(f"cannot read {path.name} in {path.parent}: {error.strerror}", key="tls_dir") from error


def _try(directory: Path, authority: bytes = b"") -> tuple[bool, tuple[float, float]]:
    """(whether the certificate may serve: True for a node's, False for a client's; from when and until when it is
    valid). `authority` is the one CA to trust, in DER; empty for those of the directory.

    Raises ssl.SSLError or OSError when it is neither.
    """
    try:
        _, valid = _shake_hands(directory, authority, serves=True)
        return True, valid
    except ssl.SSLCertVerificationError:
        with contextlib.suppress(ssl.SSLError):
            names, valid = _shake_hands(directory, authority, serves=False)
            if CLIENT_NAME in names and SERVER_NAME not in names:
                return False, valid
        raise


def _shake_hands(directory: Path, authority: bytes, *, serves: bool) -> tuple[set[str], tuple[float, float]]:
    """Make a handshake of the files with themselves, in memory, by the rules of gRPC.

    Returns the DNS names in the certificate that the server sees, and from when and until when it is valid. The client
    checks the server's certificate only when `serves` is set. Raises ssl.SSLError, and ConfigError for a key that
    Python's TLS library takes and gRPC's does not.
    """
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = _context(ssl.PROTOCOL_TLS_SERVER, directory, authority).wrap_bio(inward, outward, server_side=True)
    asking = _context(ssl.PROTOCOL_TLS_CLIENT, directory, authority)
    if not serves:
        asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    client = asking.wrap_bio(outward, inward, server_hostname=SERVER_NAME)
    waiting = [client, server]
    for _ in range(HANDSHAKE_TURNS_MAX):
        for end in list(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                waiting.remove(end)
        if not waiting:
            seen: Mapping[str, Any] = server.getpeercert() or {}
            if not any(kind in (server.getpeercert(binary_form=True) or b"") for kind in KEY_KINDS):
                raise ConfigError(
                    f"gRPC cannot use the key of the certificate in {directory}: make one with an RSA key, or of the "
                    "curve P-256 or P-384",
                    key="tls_dir",
                )
            names = {str(value) for kind, value in seen.get("subjectAltName", ()) if kind == "DNS"}
            return names, _dates(seen)
    raise ssl.SSLError("the handshake does not end")


def _dates(told: Mapping[str, Any]) -> tuple[float, float]:
    return ssl.cert_time_to_seconds(told["notBefore"]), ssl.cert_time_to_seconds(told["notAfter"])


def _context(protocol: int, directory: Path, authority: bytes = b"") -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # gRPC accepts an issuing CA in ca.crt without its root
    # Without a password OpenSSL would ask for one on the terminal.
    context.load_cert_chain(directory / CERTIFICATE_NAME, directory / KEY_NAME, password="")
    if authority:
        context.load_verify_locations(cadata=authority)
    else:
        context.load_verify_locations(directory / AUTHORITY_NAME)
    return context
