"""TLS files: what is taken, what is refused and how it is said, and what a change of the files does."""

from __future__ import annotations

import codecs
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvservice.auth import tls as wire_tls
from kvservice.auth.identity import Caller, caller_of
from kvservice.auth.tls import TlsFiles, is_loopback, listen, open_channel, open_tls
from kvservice.cli import certs, doctor
from kvservice.client.channels import Channels
from kvservice.config import load_config, tls_of_environment
from kvservice.errors import ConfigError, Forbidden, KVServiceError, ServiceConflict
from kvservice.observe.endpoint import CertificateCollector
from kvservice.wire.status import connect_hint, error_from_rpc
from tests.integration.certificates import AUTHORITY, STRANGER, write


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write(tmp_path / "tls")


# -- what is taken ----


def test_files_that_fit_each_other_are_taken(files: Path) -> None:
    version, pems = TlsFiles(files).current()
    assert (version, pems.authority) == (1, AUTHORITY.pem)
    assert b"PRIVATE KEY" in pems.key
    assert "PRIVATE KEY" not in repr(pems), "a log line must not give the key away"


def test_no_directory_means_plaintext() -> None:
    assert open_tls("") is None and open_tls(None) is None


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_named(files: Path, name: str) -> None:
    (files / name).unlink()
    with pytest.raises(ConfigError, match=f"has no {name}: make one with `kvservice certs"):
        TlsFiles(files)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent, which is not a directory"):
        TlsFiles(tmp_path / "absent")


def test_a_file_that_cannot_be_read_is_named(files: Path) -> None:
    (files / "tls.key").unlink()
    (files / "tls.key").symlink_to("/proc/self/mem")  # opens, and fails to be read; also for root
    with pytest.raises(ConfigError, match=r"cannot read tls\.key"):
        TlsFiles(files)


def test_a_certificate_that_cannot_work_is_refused_by_reason(tmp_path: Path) -> None:
    wrong = {
        "certificate has expired": write(tmp_path / "expired", days=-1),
        "unable to get local issuer certificate": write(tmp_path / "stranger", issuer=STRANGER),
        "certificate is not valid for 'kvservice'": write(tmp_path / "name", name="another"),
    }
    for reason, directory in wrong.items():
        with pytest.raises(ConfigError, match=reason):
            TlsFiles(directory)


def test_a_refusal_for_dates_says_what_the_clock_says(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has expired \(the clock of this machine says \d{4}-\d\d-\d\d .* UTC\)"):
        TlsFiles(write(tmp_path / "tls", days=-1))


def test_a_key_of_another_certificate_is_refused(files: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other")
    (files / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        TlsFiles(files)


def test_nonsense_is_refused(files: Path) -> None:
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (files / name).write_text("nonsense")
        with pytest.raises(ConfigError, match="cannot be used"):
            TlsFiles(files)


KEYS: dict[str, Callable[[], Any]] = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
}


@pytest.mark.parametrize("kind", KEYS)
async def test_no_key_is_taken_that_grpc_cannot_use(files: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in use works, also after the files were replaced."""
    clock, key = Clock(), KEYS[kind]()
    found = TlsFiles(files, clock)
    monkeypatch.setattr(ec, "generate_private_key", lambda curve: key)
    write(files)
    clock.now += 1.1
    assert (found.current()[0] == 2) == (kind in ("P-256", "P-384", "RSA"))
    assert await is_reached(found)


async def test_a_mark_of_byte_order_before_a_file_is_left_out(files: Path) -> None:
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (files / name).write_bytes(codecs.BOM_UTF8 + (files / name).read_bytes())
    assert await is_reached(TlsFiles(files))


async def is_reached(tls: TlsFiles) -> bool:
    """Whether a server with these files answers a client with them."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}", tls) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10.0)
        return True
    except grpc.aio.AioRpcError:
        return False
    finally:
        await server.stop(None)


# -- change ----


def test_changed_files_are_taken_once_a_second_at_most(files: Path) -> None:
    clock = Clock()
    found = TlsFiles(files, clock)
    _, before = found.current()
    write(files)
    assert found.current() == (1, before), "not looked at yet"
    clock.now += 1.1
    version, after = found.current()
    assert version == 2 and after.certificate != before.certificate


def test_half_replaced_files_leave_the_old_ones_in_place(files: Path, tmp_path: Path) -> None:
    clock = Clock()
    found = TlsFiles(files, clock)
    before = found.current()
    new = write(tmp_path / "new")
    (files / "tls.crt").write_bytes((new / "tls.crt").read_bytes())
    for _ in range(3):
        clock.now += 1.1
        assert found.current() == before
    (files / "tls.key").write_bytes((new / "tls.key").read_bytes())
    clock.now += 1.1
    assert found.current()[0] == 2, "whole again: taken"


def test_files_that_vanish_leave_the_old_ones_in_place(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    found = TlsFiles(files, clock)
    before = found.current()
    (files / "ca.crt").unlink()
    for _ in range(3):
        clock.now += 1.1
        assert found.current() == before
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["tls_files_not_taken"]


def test_a_link_that_is_turned_is_a_change(tmp_path: Path) -> None:
    """As the kubelet does it: the names stay links into `..data`, which is replaced as a whole."""
    write(tmp_path / "one"), write(tmp_path / "two")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "..data").symlink_to(tmp_path / "one")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mounted / name).symlink_to(f"..data/{name}")
    clock = Clock()
    found = TlsFiles(mounted, clock)
    (mounted / "..new").symlink_to(tmp_path / "two")
    (mounted / "..new").rename(mounted / "..data")
    clock.now += 1.1
    version, pems = found.current()
    assert version == 2 and pems.certificate == (tmp_path / "two" / "tls.crt").read_bytes()


async def test_a_channel_is_replaced_at_its_next_use_after_a_change(files: Path) -> None:
    clock = Clock()
    channels = Channels(TlsFiles(files, clock))
    first = channels.get("127.0.0.1:1")
    assert channels.get("127.0.0.1:1") is first
    write(files)
    clock.now += 1.1
    second = channels.get("127.0.0.1:1")
    assert second is not first and channels.get("127.0.0.1:1") is second
    await channels.close()


# -- listening ----


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("node.example", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


async def test_a_plaintext_port_is_refused_or_said(
    files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = grpc.aio.server()
    for address in ("0.0.0.0:0", "127.0.0.1:0"):
        with pytest.raises(
            ConfigError, match=r"KVSERVICE_TLS_DIR.*kvservice certs DIR.*Unix socket.*KVSERVICE_ALLOW_PLAINTEXT"
        ):
            listen(server, address, None, allow_plaintext=False)
    assert not caplog.records
    local = f"unix:{tmp_path / 'd' / 's.sock'}"
    assert listen(server, local, None, allow_plaintext=False) == local
    assert stat.S_IMODE((tmp_path / "d" / "s.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700
    address = listen(server, "0.0.0.0:0", TlsFiles(files), allow_plaintext=False)
    assert address.startswith("0.0.0.0:") and not address.endswith(":0")
    assert not caplog.records, "a private socket and TLS need no word"
    assert listen(server, "0.0.0.0:0", None, allow_plaintext=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "KVSERVICE_TLS_DIR" in caplog.text
    await server.stop(0)


# -- settings ----


def test_tls_is_set_like_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, {"KVSERVICE_TLS_DIR": "/a", "KVSERVICE_ALLOW_PLAINTEXT": "1"})
    assert (config.tls_dir, config.allow_plaintext) == ("/a", True)
    assert load_config(None, {}, allow_plaintext=False).allow_plaintext is False
    monkeypatch.setenv("KVSERVICE_TLS_DIR", "/b")
    monkeypatch.setenv("KVSERVICE_ALLOW_PLAINTEXT", "no")
    monkeypatch.setenv("KVSERVICE_NONSENSE", "1")
    assert tls_of_environment() == ("/b", False)


@pytest.mark.parametrize("wrong", [{"tls_dir": "relative"}, {"allow_plaintext": "maybe"}, {"allow_plaintext": 2}])
def test_a_wrong_tls_setting_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        load_config(None, {}, **wrong)


# -- certificates ----


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_certs_that_cannot_be_written_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"cannot write certificates to {tmp_path / name}: .*; name a folder"):
        certs.run(tmp_path / name, 30, renew=False)


def test_certs_are_the_services_own_and_their_keys_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    words = certs.run(directory, 30, renew=False)
    assert f"KVSERVICE_TLS_DIR={directory}" in words and "not ca.key" in words
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {"ca.crt": 0o644, "ca.key": 0o600, "tls.crt": 0o644, "tls.key": 0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    before = (directory / "tls.crt").read_bytes(), (directory / "ca.crt").read_bytes()
    with pytest.raises(ConfigError, match="--renew"):
        certs.run(directory, 30, renew=False)
    assert ((directory / "tls.crt").read_bytes(), (directory / "ca.crt").read_bytes()) == before
    certs.run(directory, 30, renew=True)
    assert (directory / "tls.crt").read_bytes() != before[0] and (directory / "ca.crt").read_bytes() == before[1]
    TlsFiles(directory)


def test_renewing_without_the_cas_key_is_refused(files: Path) -> None:
    with pytest.raises(ConfigError, match=r"no CA in .*--ca, or make a CA"):
        certs.run(files, 30, renew=True)


def test_doctor_tries_the_files_and_says_where_there_are_none(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path))
    found = []
    for directory in ("", str(files), str(tmp_path / "absent")):
        monkeypatch.setenv("KVSERVICE_TLS_DIR", directory)
        found += [(check.status, check.advice) for check in doctor.guarded(doctor.tls)]
    assert [status for status, _ in found] == [doctor.ABSENT, doctor.OK, doctor.PROBLEM]
    assert "docs/howto/certificates.md" in found[0][1] and "KVSERVICE_TLS_DIR" in found[2][1]


def test_the_end_of_a_certificate_or_of_its_ca_can_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first: nothing new connects after either."""
    clock, path = Clock(), tmp_path / "own"
    monkeypatch.setattr(certs, "AUTHORITY_DAYS", 2)
    certs.run(path, 1, renew=False)
    files = TlsFiles(path, clock)
    exported = CertificateCollector("s", files.valid)
    for days_valid, days_left in ((1, 1), (30, 2)):  # the second certificate outlives its CA
        certs.run(path, days_valid, renew=True)
        clock.now += 1.1
        begins, ends = [metric.samples[0].value for metric in exported.collect()]
        assert begins < time.time() and abs(ends - time.time() - days_left * 86_400) < 60
    assert not list(CertificateCollector("s", lambda: None).collect())


# -- errors ----


def test_other_failures_of_a_connection_have_no_word_about_tls() -> None:
    refused = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    assert connect_hint(refused) == "" and connect_hint("") == ""
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, refused, None)
    found: KVServiceError = error_from_rpc(error, "locate at node b")
    assert found.message == f"locate at node b: {refused}"


def test_certificates_are_signed_by_the_named_ca(tmp_path: Path) -> None:
    """This holds for clients and nodes. They are renewed as they were."""
    ca, client, node = tmp_path / "ca", tmp_path / "client", tmp_path / "node"
    certs.run(ca, 30, renew=False)
    assert "can ask" in certs.run(client, 30, renew=False, owner=certs.Owner(client=True), ca=ca)
    owner = certs.Owner(nodes=("node-a",), addresses=("10.0.0.7", "fd00::7"))
    assert "only for node-a, 10.0.0.7, fd00::7" in certs.run(node, 30, renew=False, owner=owner, ca=ca)
    assert not (client / "ca.key").exists() and (client / "ca.crt").read_bytes() == (ca / "ca.crt").read_bytes()
    for directory, expected in ((client, certs.Owner(client=True)), (node, owner)):
        before = (directory / "tls.crt").read_bytes()
        certs.run(directory, 30, renew=True, ca=ca)
        assert (directory / "tls.crt").read_bytes() != before
        assert certs._read_owner(directory / "tls.crt") == expected
    assert TlsFiles(node).server_credentials() and TlsFiles(client).channel_credentials()
    with pytest.raises(ConfigError, match="cannot serve"):
        TlsFiles(client).server_credentials()
    with pytest.raises(ConfigError, match=r"no CA in .*--ca, or make a CA"):
        certs.run(client, 30, renew=True)


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        ({"client": True, "nodes": ("a",)}, "is for no node"),
        ({"nodes": ("a/b",)}, "cannot be part of a certificate"),
        ({"addresses": ("",)}, "cannot be part of a certificate"),
    ],
)
def test_an_owner_that_cannot_be_is_refused(owner: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        certs.Owner(**owner)  # type: ignore[arg-type]


def test_a_clients_certificate_is_no_nodes(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_tls, "LOOK_SECONDS", 0.0)
    tls = TlsFiles(files)
    write(files, client=True)
    assert tls.current()[0] == 1
    write(files)
    assert tls.current()[0] == 2


def test_names_in_a_certificate_say_who_it_is() -> None:
    class Connection:
        def __init__(self, dns: tuple[bytes, ...], uris: tuple[bytes, ...] = (), kind: bytes = b"ssl") -> None:
            self.known = {"transport_security_type": (kind,), "peer_dns": dns, "peer_uri": uris}

        def auth_context(self) -> dict[str, tuple[bytes, ...]]:
            return self.known

        def invocation_metadata(self) -> tuple[()]:
            return ()

    assert caller_of(Connection((b"kvservice",), kind=b"insecure")) == Caller()
    node = caller_of(
        Connection((b"kvservice",), (b"kvservice://node/a", b"kvservice://address/fd00::1", b"spiffe://x"))
    )
    assert node == Caller(True, True, False, frozenset({"a"}), frozenset({"fd00::1"}))
    node.check_speaks_for("a", "[fd00::1]:7401")
    for name, address in (("b", None), ("a", "10.0.0.1:7401")):
        with pytest.raises(Forbidden):
            node.check_speaks_for(name, address)
    assert caller_of(Connection((b"client.kvservice",))) == Caller(True, False, True)
    assert caller_of(Connection((b"other", b"xkvservice"))) == Caller(True, False, False)


# -- where to listen ----

GRPC: Any = None  # a server that is not asked: gRPC writes lines of its own when it cannot bind


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_taken_port_says_which_option_to_change(files: Path, encrypted: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="Address already in use; choose another --port"):
            listen(GRPC, address, TlsFiles(files) if encrypted else None, allow_plaintext=True)


def test_a_host_of_another_machine_says_so() -> None:
    with pytest.raises(ConfigError, match="choose another --host"):
        listen(GRPC, "192.0.2.1:0", None, allow_plaintext=True)


def test_a_socket_that_is_served_says_what_to_change(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        with pytest.raises(ServiceConflict, match="choose another --service, --node or --partition"):
            listen(GRPC, f"unix:{path}", None, allow_plaintext=False)
