"""`kvservice certs`: makes a CA and a certificate, to try TLS out and for small installations without an issuer.

All files are in one directory that only its owner can read. The CA's key is needed again to renew, and for nothing
else.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.cli.extras import how_to_install
from kvservice.errors import ConfigError
from kvservice.units import counted

AUTHORITY_KEY_NAME = "ca.key"
# Ten years: renewing a CA means to replace the files of every machine. After it nothing connects.
AUTHORITY_DAYS = 3650
LEAF_DAYS = 365  # One year, the default of `--days`. After it nothing connects until the certificate is renewed.
# certificates are valid this long before they are made, because clocks of other machines may be behind
BACKDATED = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA: what signs certificates."""

    key: Any
    certificate: Any

    @property
    def pem(self) -> bytes:
        return bytes(self.certificate.public_bytes(_library()[1].Encoding.PEM))


@dataclass(frozen=True, slots=True)
class Owner:
    """Who a certificate is for: all nodes, which share it, one node, or a client."""

    client: bool = False
    nodes: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.client and (self.nodes or self.addresses):
            raise ConfigError("a client's certificate is for no node; leave --node and --address out")
        for name in (*self.nodes, *self.addresses):
            if not name or not name.isascii() or not name.isprintable() or " " in name or "/" in name:
                raise ConfigError(f"{name!r} cannot be part of a certificate; give a node's name or a host's address")

    @property
    def uris(self) -> list[str]:
        from kvservice.auth.identity import ADDRESS_URI, NODE_URI

        return [NODE_URI + node for node in self.nodes] + [ADDRESS_URI + address for address in self.addresses]


def run(directory: Path, days: int, *, renew: bool, owner: Owner | None = None, ca: Path | None = None) -> str:
    """Write ca.crt, ca.key, tls.crt and tls.key. If `ca` names a folder with a CA, that CA signs and its key is not
    copied. With `renew` only tls.crt and tls.key are written, for the owner of the old certificate. Returns text that
    says what to do next. Raises ConfigError if files would be lost or cannot be written, or if there is no CA to sign
    with."""
    try:
        return _make(directory.absolute(), days, renew=renew, owner=owner, ca=ca)
    except OSError as error:
        raise ConfigError(
            f"cannot write certificates to {directory}: {error.strerror}; name a folder that you can make or write"
        ) from error


def _make(directory: Path, days: int, *, renew: bool, owner: Owner | None, ca: Path | None) -> str:
    from kvservice.auth.tls import AUTHORITY_NAME, CERTIFICATE_NAME, KEY_NAME, open_tls
    from kvservice.private_files import write_private

    found = [name for name in (AUTHORITY_NAME, AUTHORITY_KEY_NAME, CERTIFICATE_NAME) if (directory / name).exists()]
    if renew:
        authority = _read_authority(ca or directory)
        owner = owner or _read_owner(directory / CERTIFICATE_NAME)
    elif found:
        raise ConfigError(
            f"{directory} has {' and '.join(found)} already; renew with --renew, or name another directory"
        )
    else:
        authority = make_authority("kvservice CA") if ca is None else _read_authority(ca)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ca is None:
            write_private(directory / AUTHORITY_KEY_NAME, _key_pem(authority.key))
        write_private(directory / AUTHORITY_NAME, authority.pem, mode=0o644)
    owner = owner or Owner()
    certificate, key = issue(authority, days=days, owner=owner)
    write_private(directory / KEY_NAME, key)
    write_private(directory / CERTIFICATE_NAME, certificate, mode=0o644)
    open_tls(directory)  # raises if the service would refuse what was written
    return _what_to_do(directory, days, owner)


def _what_to_do(directory: Path, days: int, owner: Owner) -> str:
    from kvservice.auth.tls import AUTHORITY_NAME, CERTIFICATE_NAME, KEY_NAME

    days_valid = f"{directory} has a certificate, valid for {counted(days, 'day')}"
    files = f"{CERTIFICATE_NAME}, {KEY_NAME} and {AUTHORITY_NAME}"
    if owner.client:
        return (
            f"{days_valid}, for a client. Routers and commands that use it with KVSERVICE_TLS_DIR={directory} can ask "
            "the service but change nothing. To renew it, give the same --ca."
        )
    if owner.uris:
        return (
            f"{days_valid}, only for {', '.join((*owner.nodes, *owner.addresses))}. Copy {files} to that node, into "
            "the folder that KVSERVICE_TLS_DIR names on every node."
        )
    return (
        f"{days_valid}. Copy {files}, but not {AUTHORITY_KEY_NAME}, to the same path on every node. Start every part "
        f"with KVSERVICE_TLS_DIR={directory}. Running processes read renewed files within seconds."
    )


def make_authority(name: str) -> Authority:
    """A self-signed CA that is valid for ten years."""
    x509, _, hashes, ec = _library()
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _valid(x509.CertificateBuilder(), AUTHORITY_DAYS).subject_name(subject).issuer_name(subject)
    builder = builder.public_key(key.public_key()).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    builder = builder.add_extension(_usage(signs=True), True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    return Authority(key, builder.sign(key, hashes.SHA256()))


def for_ray(directory: Path, host: str) -> None:
    """Write a CA and a certificate for a Ray cluster of one machine at this IP address. A running Ray does not read
    renewed files, so they are valid for ten years. The CA's key is thrown away. Raises ConfigError if the library is
    missing."""
    from kvservice.actors import ray_auth
    from kvservice.private_files import write_private

    authority = make_authority("kvservice CA of a local Ray")
    certificate, key = issue(authority, days=AUTHORITY_DAYS, name="localhost", hosts=(host, "127.0.0.1"))
    directory.mkdir(mode=0o700, exist_ok=True)
    write_private(directory / ray_auth.AUTHORITY, authority.pem)
    write_private(directory / ray_auth.KEY, key)
    write_private(directory / ray_auth.CERTIFICATE, certificate)


def issue(
    authority: Authority,
    *,
    days: float = LEAF_DAYS,
    name: str = "",
    owner: Owner | None = None,
    hosts: tuple[str, ...] = (),
) -> tuple[bytes, bytes]:
    """Make a certificate. Returns (certificate, key) as PEM.

    Args:
        days: how long it is valid; negative means that it ended so long ago.
        name: replaces the name of its role.
        owner: who it is for; None means all nodes.
        hosts: further IP addresses.
    """
    from kvservice.auth.identity import CLIENT_NAME, NODE_NAME

    owner = owner or Owner()
    name = name or (CLIENT_NAME if owner.client else NODE_NAME)
    x509, _, hashes, ec = _library()
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    builder = _valid(x509.CertificateBuilder(), days).subject_name(_name(name)).issuer_name(issuer.subject)
    builder = builder.public_key(key.public_key()).add_extension(
        x509.BasicConstraints(ca=False, path_length=None), True
    )
    names = [x509.DNSName(name), *map(x509.UniformResourceIdentifier, owner.uris)]
    names += [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    purposes = [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    if not owner.client:
        purposes.append(x509.ExtendedKeyUsageOID.SERVER_AUTH)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), False).add_extension(_usage(signs=False), True)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    signed = builder.add_extension(identifier, False).sign(authority.key, hashes.SHA256())
    return bytes(signed.public_bytes(_library()[1].Encoding.PEM)), _key_pem(key)


def _read_authority(directory: Path) -> Authority:
    from kvservice.auth.tls import AUTHORITY_NAME

    x509, serialization, _, _ = _library()
    try:
        key = serialization.load_pem_private_key((directory / AUTHORITY_KEY_NAME).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((directory / AUTHORITY_NAME).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"there is no CA in {directory}: cannot read {error.filename}: {error.strerror}; name the folder that has "
            f"{AUTHORITY_KEY_NAME} with --ca, or make a CA with `kvservice certs DIRECTORY`"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the CA in {directory} cannot be used: {error}") from error
    return Authority(key, certificate)


def _read_owner(path: Path) -> Owner:
    from kvservice.auth.identity import ADDRESS_URI, CLIENT_NAME, NODE_NAME, NODE_URI

    x509 = _library()[0]
    try:
        old = x509.load_pem_x509_certificate(path.read_bytes())
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return Owner()
    dns, uris = (names.get_values_for_type(kind) for kind in (x509.DNSName, x509.UniformResourceIdentifier))
    return Owner(
        CLIENT_NAME in dns and NODE_NAME not in dns,
        *[tuple(uri.removeprefix(one) for uri in uris if uri.startswith(one)) for one in (NODE_URI, ADDRESS_URI)],
    )


def _valid(builder: Any, days: float) -> Any:
    x509 = _library()[0]
    end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
    start = min(datetime.datetime.now(datetime.timezone.utc), end - datetime.timedelta(days=1)) - BACKDATED
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)


def _usage(*, signs: bool) -> Any:
    return _library()[0].KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> Any:
    x509 = _library()[0]
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _key_pem(key: Any) -> bytes:
    form = _library()[1]
    return bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))


def _library() -> tuple[Any, Any, Any, Any]:
    """x509, serialization, hashes and ec of the `cryptography` library, which Ray and vLLM install as well."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"making certificates needs cryptography. {how_to_install('certs')}. Or make them with openssl, as "
            "docs/howto/certificates.md shows"
        ) from error
    return x509, serialization, hashes, ec
