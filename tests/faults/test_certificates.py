"""Certificates of the right CA with names that only look right, and certificates that no CA signed."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvservice.auth.identity import Caller, caller_of
from kvservice.auth.tls import TlsFiles, open_channel
from kvservice.cli.certs import Authority, _key_pem, _name, _usage, _valid
from kvservice.errors import Forbidden
from tests.integration.certificates import AUTHORITY, write

x509 = pytest.importorskip("cryptography.x509")
from cryptography.hazmat.primitives import hashes  # noqa: E402  after the check that it is there
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

pytestmark = pytest.mark.faults

CALL_SECONDS = 20.0
METHOD = "/probe/Who"
KVSERVICE = x509.DNSName("kvservice")


def signed(
    names: Sequence[Any],
    *,
    issuer: Authority = AUTHORITY,
    common: str = "kvservice",
    is_authority: bool = False,
    serves: bool = True,
) -> Authority:
    """A certificate with exactly these names, for clients, and for servers where it `serves`."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _valid(x509.CertificateBuilder(), 1).subject_name(_name(common)).public_key(key.public_key())
    builder = builder.issuer_name(issuer.certificate.subject).add_extension(_usage(signs=is_authority), True)
    builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), True)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), False)
    if not is_authority:
        purposes = [x509.ExtendedKeyUsageOID.CLIENT_AUTH] + [x509.ExtendedKeyUsageOID.SERVER_AUTH] * serves
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), False)
    return Authority(key, builder.sign(issuer.key, hashes.SHA256()))


class Probe(grpc.GenericRpcHandler):
    """Answers nothing but remembers who called."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        async def who(request: bytes, context: Any) -> bytes:
            self.callers.append(caller_of(context))
            return b""

        return grpc.unary_unary_rpc_method_handler(who)


@asynccontextmanager
async def served(key: bytes, chain: bytes) -> AsyncIterator[tuple[str, Probe]]:
    probe, server = Probe(), grpc.aio.server()
    server.add_generic_rpc_handlers((probe,))
    credentials = grpc.ssl_server_credentials([(key, chain)], AUTHORITY.pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", probe
    finally:
        await server.stop(0)


LOOKALIKES: dict[str, Sequence[Any]] = {
    "common name alone": [],
    "address": [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))],
    "mail": [x509.RFC822Name("kvservice@kvservice")],
    "star": [x509.DNSName("*")],
    "star below": [x509.DNSName("*.kvservice")],
    "zero byte": [x509.DNSName("kvservice\0.example")],
    "longer": [x509.DNSName("kvservice.example"), x509.DNSName("xkvservice")],
    "uri": [x509.UniformResourceIdentifier("kvservice://node/n0")],
}


async def _believed(
    tmp_path: Path, names: Sequence[Any], chain: Sequence[Authority] = (), *, serves: bool = True
) -> bool:
    """Whether our client takes a server for ours."""
    impostor = signed(names, issuer=chain[0] if chain else AUTHORITY, serves=serves)
    pem = b"".join(each.pem for each in (impostor, *chain))
    tls = TlsFiles(write(tmp_path / "client"))
    async with served(_key_pem(impostor.key), pem) as (address, _), open_channel(address, tls) as channel:
        try:
            await channel.unary_unary(METHOD, None, None)(b"", timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
    return True


CUT = "gRPC reads a name up to its first zero byte"
COMMON = "gRPC takes the common name of a certificate that names no host"
UNGUARDED = {name: COMMON for name in ("common name alone", "address", "mail", "uri")} | {"zero byte": CUT}


@pytest.mark.parametrize("name", LOOKALIKES)
async def test_no_server_with_a_name_that_looks_right_is_believed(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """Those that gRPC believes: docs/howto/certificates.md says what an issuer must not sign."""
    if name in UNGUARDED:
        request.applymarker(pytest.mark.xfail(strict=True, reason=UNGUARDED[name]))
    assert not await _believed(tmp_path, LOOKALIKES[name])


@pytest.mark.parametrize("name", LOOKALIKES)
async def test_certificate_for_clients_alone_serves_nothing(tmp_path: Path, name: str) -> None:
    """Whatever name it carries, nobody believes it as a server's."""
    assert await _believed(tmp_path, [KVSERVICE])
    assert not await _believed(tmp_path, LOOKALIKES[name], serves=False)


async def _caller(tmp_path: Path, given: Authority, chain: Sequence[Authority] = ()) -> Caller | None:
    """What a server makes of a caller; None when it does not let him in."""
    good = signed([KVSERVICE])
    pem = b"".join(each.pem for each in (given, *chain))
    credentials = grpc.ssl_channel_credentials(AUTHORITY.pem, _key_pem(given.key), pem)
    options = (("grpc.ssl_target_name_override", "kvservice"),)
    async with served(_key_pem(good.key), good.pem) as (address, probe):
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            try:
                await channel.unary_unary(METHOD, None, None)(b"", timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                return None
        return probe.callers[0]


@pytest.mark.parametrize("name", LOOKALIKES)
async def test_no_caller_with_a_name_that_looks_right_may_do_anything(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    if name == "zero byte":
        request.applymarker(pytest.mark.xfail(strict=True, reason=CUT))
    caller = await _caller(tmp_path, signed(LOOKALIKES[name]))
    if caller is not None:
        assert caller.checked and not caller.is_node and not caller.is_client
        with pytest.raises(Forbidden):
            caller.check_may("kvservice.wire.v1.AdminService.Stats")


async def test_the_holder_of_a_certificate_signs_no_other(tmp_path: Path) -> None:
    leaf = signed([KVSERVICE, x509.UniformResourceIdentifier("kvservice://node/n0")])
    pretender = signed([], common="pretender", is_authority=True, issuer=leaf)
    for chain in ([leaf], [pretender, leaf]):
        assert not await _believed(tmp_path, [KVSERVICE], chain)
        assert await _caller(tmp_path, signed([KVSERVICE], issuer=chain[0]), chain) is None


@pytest.mark.parametrize(
    "uri",
    [
        "kvservice://nodes/n0",
        "kvservice://Node/n0",
        "KVSERVICE://node/n0",
        "kvservice:node/n0",
        "kvservice://n0",
        "kvservice://node/",
        "kvservice://node/n0/",
        "kvservice://node/n%30",
        "kvservice://address/10.0.0.1:7",
    ],
)
async def test_a_name_of_ours_that_nobody_knows_speaks_for_nobody(tmp_path: Path, uri: str) -> None:
    caller = await _caller(tmp_path, signed([KVSERVICE, x509.UniformResourceIdentifier(uri)]))
    assert caller is not None and caller.is_node
    for node in ("n0", "n1"):
        with pytest.raises(Forbidden):
            caller.check_speaks_for(node, "10.0.0.1:7")
