"""Rules of auth.authenticator that need a moment no two processes can be made to meet in."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvservice.auth import authenticator as authenticator_module
from kvservice.auth.authenticator import Authenticator, is_private
from kvservice.auth.tenants import TenantsFile, hash_token, token_metadata
from kvservice.core.messages import Attachment
from kvservice.core.segment.geometry import Geometry
from kvservice.errors import Unauthenticated
from kvservice.testing.eventually import eventually_async
from kvservice.units import AttachmentId, BootEpoch, MiB, NodeId

TOKEN = "kvs_0123456789abcdef"
GEOMETRY = Geometry(slab_bytes=MiB, slab_count=2)
ATTACHMENT = Attachment(AttachmentId(1), NodeId("n"), BootEpoch(1), 9.0, "", GEOMETRY, "")


class Pool:
    geometry = GEOMETRY
    disk_bytes = 0

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.limits: Any = None

    def count(self, name: str) -> None:
        self.counters[name] += 1

    def set_tenants(self, limits: Any, secrets: Any) -> None:
        self.limits = limits


class Call:
    def __init__(self, token: str = "", peer: str = "unix:", kind: bytes = b"") -> None:
        self._metadata, self._peer, self._kind = token_metadata(token) if token else (), peer, kind

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"transport_security_type": [self._kind]} if self._kind else {}


def write(path: Path, *tokens: str, quota: str = "") -> None:
    row = {"name": "a", "tokens": [hash_token(t).hex() for t in tokens], "secret": "5e" * 32, "quota": quota}
    path.write_text(json.dumps({"version": 1, "public_secret": "07" * 32, "tenants": [row]}))


def test_whoever_is_revoked_while_it_attaches_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write(path, TOKEN)
    files = TenantsFile(path)
    authenticator = Authenticator(files, Pool())  # type: ignore[arg-type]
    caller = authenticator.caller(Call(TOKEN))  # type: ignore[arg-type]
    write(path)
    assert files.look()
    with pytest.raises(Unauthenticated, match="revoked"):
        authenticator.bind(caller, ATTACHMENT, lambda reason: None)


def test_an_engine_is_told_of_another_quota_by_attaching_again(tmp_path: Path) -> None:
    path, pool, said = tmp_path / "t.json", Pool(), []
    write(path, TOKEN, quota="50%")
    files = TenantsFile(path)
    authenticator = Authenticator(files, pool)  # type: ignore[arg-type]
    attached = authenticator.bind(authenticator.caller(Call(TOKEN)), ATTACHMENT, said.append)  # type: ignore[arg-type]
    assert attached.quota_bytes == MiB and attached.tenant_key.hex() not in repr(attached)
    write(path, TOKEN, "kvs_another-token-1234", quota="50%")
    files.look()
    authenticator._take(files.current)
    assert said == []
    write(path, TOKEN, quota="25%")
    files.look()
    authenticator._take(files.current)
    assert len(said) == 1 and pool.limits["a"].quota_bytes == MiB // 2
    assert pool.counters == {"attachments_revoked": 1}


def test_a_new_token_does_not_hide_that_rights_changed(tmp_path: Path) -> None:
    path, said, newer = tmp_path / "t.json", list[str](), "kvs_another-token-1234"
    write(path, TOKEN, quota="50%")
    files = TenantsFile(path)
    authenticator = Authenticator(files, Pool())  # type: ignore[arg-type]
    authenticator.bind(authenticator.caller(Call(TOKEN)), ATTACHMENT, said.append)  # type: ignore[arg-type]
    write(path, newer, quota="50%")
    assert files.look()
    authenticator.renew(ATTACHMENT.attachment_id, authenticator.caller(Call(newer)))  # type: ignore[arg-type]
    authenticator._take(files.current)
    assert said == [], "the token that it attached with may go"
    write(path, newer, quota="25%")
    assert files.look()
    authenticator.renew(ATTACHMENT.attachment_id, authenticator.caller(Call(newer)))  # type: ignore[arg-type]
    authenticator._take(files.current)
    assert said == ["this tenant's rights changed: attach again"]


def test_secrets_go_where_nobody_listens() -> None:
    for peer, kind, wanted in (
        ("unix:/run/x", b"", True),
        ("ipv4:127.0.0.1:5", b"", False),
        ("ipv6:%5B::1%5D:5", b"", False),
        ("ipv4:10.0.0.1:5", b"ssl", True),
        ("ipv4:10.0.0.1:5", b"", False),
        ("ipv4:10.127.0.1:5", b"", False),
    ):
        assert is_private(Call(peer=peer, kind=kind)) is wanted  # type: ignore[arg-type]


async def test_a_revocation_of_a_file_taken_in_part_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read once for each change, so what fails then is tried again."""
    monkeypatch.setattr(authenticator_module, "LOOK_SECONDS", 0.01)
    path, pool, said = tmp_path / "t.json", Pool(), list[str]()
    write(path, TOKEN)
    authenticator = Authenticator(TenantsFile(path), pool)  # type: ignore[arg-type]
    authenticator.bind(authenticator.caller(Call(TOKEN)), ATTACHMENT, said.append)  # type: ignore[arg-type]
    takes = iter([MemoryError(), MemoryError()])

    def failing(limits: Any, secrets: Any) -> None:
        for error in takes:
            raise error
        pool.limits = limits

    monkeypatch.setattr(pool, "set_tenants", failing)
    authenticator.start()
    try:
        write(path, "kvs_another-token-1234")
        await eventually_async(lambda: said, "the revocation")
        await eventually_async(lambda: pool.limits is not None, "the limits of the new file")
    finally:
        await authenticator.stop()
    assert len(said) == 1 and "revoked" in said[0]
