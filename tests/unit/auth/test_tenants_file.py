"""Rules of the tenants file, of the command that edits it, and of tokens: auth.tenants and auth.token."""

from __future__ import annotations

import json
import os
import resource
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvservice.auth.tenants import (
    TOKEN_BYTES_MAX,
    Public,
    Tenants,
    TenantsFile,
    bearer_of,
    dump_tenants,
    hash_token,
    parse_tenants,
    quota_bytes,
    read_tenants,
    token_metadata,
)
from kvservice.auth.token import Token
from kvservice.cli.main import app
from kvservice.config import load_config
from kvservice.errors import ConfigError, Unauthenticated

SECRET, OTHER = "5e" * 32, "07" * 32


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["tenants", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def row(name: str = "a", **fields: object) -> dict[str, object]:
    return {"name": name, "tokens": ["ab" * 32], "secret": SECRET, **fields}


def whole(*rows: object, **fields: object) -> dict[str, object]:
    return {"version": 1, "public_secret": OTHER, "tenants": list(rows), **fields}


def test_add_rotate_retire_and_remove_change_who_may_attach(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    first = run("add", "team-a", "--file", str(file), "--quota", "25%", "--public", "publish").strip().splitlines()[-1]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    tenants = read_tenants(file)
    assert first not in file.read_text()
    caller = tenants.of_token(first)
    assert caller is not None and (caller.tenant.name, caller.tenant.public) == ("team-a", Public.PUBLISH)
    second = run("rotate", "team-a", "--file", str(file)).strip().splitlines()[-1]
    both = read_tenants(file)
    assert both.of_token(first) and both.of_token(second)
    assert both.by_name["team-a"].secret == caller.tenant.secret, "rotating a token loses no block"
    run("rotate", "team-a", "--retire", "--file", str(file))
    assert read_tenants(file).of_token(first) is None and read_tenants(file).of_token(second)
    run("set", "team-a", "--file", str(file), "--quota", "", "--in-flight", "8")
    (shown,) = json.loads(run("list", "-o", "json", "--file", str(file)))
    assert (shown["quota"], shown["in_flight"], shown["public"]) == ("", 8, "publish")
    run("remove", "team-a", "--file", str(file))
    assert read_tenants(file).by_name == {}


def test_the_commands_take_the_file_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVICE_TENANTS_FILE", str(tmp_path / "tenants.json"))
    run("add", "team-a")
    assert "team-a" in run("list")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_whoever_could_read_the_file_still_can_after_an_edit(tmp_path: Path) -> None:
    """A shard that runs as another user would not hear of a tenant that root has removed."""
    file = tmp_path / "tenants.json"
    run("add", "team-a", "--file", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    os.chown(file, 12345, 12346)
    file.chmod(0o644)
    run("remove", "team-a", "--file", str(file))
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 12346, 0o640)


def test_a_token_goes_to_a_private_file_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "token"
    printed = run("add", "a", "--file", str(tmp_path / "t.json"), "--token-to", str(target))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert target.read_text().strip() not in printed
    assert Token(path=str(target)).metadata() == token_metadata(target.read_text().strip())


@pytest.mark.parametrize("words", [["add", "a"], ["add", "b", "--quota", "lots"], ["remove", "c"], ["add", "../x"]])
def test_a_refused_command_changes_nothing(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "tenants.json"
    run("add", "a", "--file", str(file))
    before = file.read_bytes()
    result = CliRunner().invoke(app, ["tenants", *words, "--file", str(file)])
    assert result.exit_code == 2 and "error:" in result.output
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


BROKEN = [
    ("version", whole(version=2)),
    ("no list", whole() | {"tenants": {}}),
    ("no object", whole("a")),
    ("name", whole(row("../a"))),
    ("name", whole(row(""))),
    ("twice", whole(row(), row(tokens=[], secret=OTHER))),
    ("same secret", whole(row(), row("b", tokens=[]))),
    ("token", whole(row(), row("b", secret=OTHER))),
    ("token", whole(row(tokens=["xyz"]))),
    ("tokens", whole(row(tokens=["ab" * 32] * 9))),
    ("secret", whole(row(secret="short"))),
    ("public_secret", whole() | {"public_secret": 7}),
    ("in_flight", whole(row(in_flight=-1))),
    ("in_flight", whole(row(in_flight=True))),
    ("admin", whole(row(admin="yes"))),
    ("public", whole(row(public="all"))),
    ("quota", whole(row(quota="0%"))),
    ("quota", whole(row(quota="120%"))),
    ("quota", whole(row(disk_quota="120%"))),
    ("disk_quota", whole(row(disk_quota=8))),
    ("unknown field", whole(row(quotas="1%"))),
]


@pytest.mark.parametrize(("word", "found"), BROKEN)
def test_a_wrong_file_is_refused_by_name_and_quotes_no_secret(word: str, found: object) -> None:
    with pytest.raises(ValueError, match=word) as refused:
        parse_tenants(found)
    assert SECRET not in str(refused.value) and "ab" * 32 not in str(refused.value)


def test_a_file_that_is_no_json_is_refused_without_its_text(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text('{"version": ' + SECRET)
    with pytest.raises(ConfigError, match="is not JSON") as refused:
        read_tenants(path)
    assert SECRET not in repr(refused.value) and refused.value.__cause__ is None
    with pytest.raises(ConfigError, match="tenants add"):
        read_tenants(tmp_path / "absent")


def test_a_broken_new_file_leaves_the_old_in_use(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(whole(row())))
    files = TenantsFile(path)
    assert not files.look()
    path.write_text("{")
    assert not files.look() and "a" in files.current.by_name
    path.unlink()
    assert not files.look() and "a" in files.current.by_name
    path.write_text(json.dumps(whole(row("other"))))
    assert files.look() and list(files.current.by_name) == ["other"]


def test_a_file_that_may_be_read_at_last_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its time and size are what they were when it could not be read; a revocation would never count."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps(whole(row())))
    files = TenantsFile(path)
    path.write_text(json.dumps(whole(row("other", secret=OTHER))))
    path.chmod(0o622)  # refused whoever reads it
    assert not files.look() and not files.look()
    path.chmod(0o600)
    assert files.look() and list(files.current.by_name) == ["other"]
    path.unlink()
    assert not files.look() and not files.look()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["tenants_file_not_taken"] * 2, "once for each reason"


def test_a_file_that_could_not_be_opened_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process had no descriptor left as a token was revoked."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps(whole(row())))
    files = TenantsFile(path)
    path.write_text(json.dumps(whole(row(tokens=[]))))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert not files.look() and not files.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files.look() and not files.current.by_name["a"].tokens
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["tenants_file_not_taken"], "once"


def test_callers_are_named_by_their_token_only() -> None:
    token = "kvs_0123456789abcdef"
    tenants = parse_tenants(whole(row(tokens=[hash_token(token).hex()])))
    assert bearer_of([*token_metadata(token), ("tenant", "other")], tenants).tenant.name == "a"
    for metadata in ((), [("authorization", token)], [*token_metadata(token)] * 2, token_metadata(token + "x")):
        with pytest.raises(Unauthenticated) as refused:
            bearer_of(metadata, tenants)
        assert token not in refused.value.message
        assert "name its file with KVSERVICE_TOKEN_FILE" in refused.value.message, "also to who calls a command"


def test_the_longest_token_of_a_client_is_taken_by_a_shard() -> None:
    """Both ends bound the token itself, not the header value that carries it."""
    token = "x" * TOKEN_BYTES_MAX
    tenants = parse_tenants(whole(row(tokens=[hash_token(token).hex()])))
    assert bearer_of(token_metadata(token), tenants).tenant.name == "a"


def test_keys_of_tenants_differ_and_outlive_their_tokens() -> None:
    tenants: Tenants = parse_tenants(
        whole(row(public="read"), row("b", tokens=["cd" * 32], secret="11" * 32, public="publish"))
    )
    a, b = tenants.by_name.values()
    keys = [tenants.block_keys_of(tenant) for tenant in (a, b)]
    assert keys[0][0] != keys[1][0] and keys[0][1] == keys[1][1] != keys[0][0]
    rotated = parse_tenants(whole(row(public="no", tokens=["ee" * 32])))
    assert rotated.block_keys_of(rotated.by_name["a"]) == (keys[0][0], b"")


def test_a_quota_of_the_disk_is_a_share_of_the_disk() -> None:
    tenants = parse_tenants(whole(row(quota="50%", disk_quota="25%")))
    ((name, with_disk),) = tenants.limits(1000, 4000).items()
    assert (with_disk.quota_bytes, with_disk.tier_bytes) == (500, {"disk": 1000})
    assert tenants.limits(1000)[name].tier_bytes == {}
    assert parse_tenants(json.loads(dump_tenants(tenants))).by_name == tenants.by_name


@pytest.mark.parametrize(("quota", "wanted"), [("", 0), ("25%", 250), ("12.5%", 125), ("100%", 1000), ("2KiB", 2048)])
def test_quotas_are_shares_or_sizes(quota: str, wanted: int) -> None:
    assert quota_bytes(quota, 1000) == wanted


def test_a_broken_token_file_leaves_the_old_one_in_use(tmp_path: Path) -> None:
    """One that is replaced is read."""
    now = [0.0]
    path = tmp_path / "token"
    token = Token(path=str(path), clock=lambda: now[0])
    with pytest.raises(ConfigError, match=str(path)):
        token.metadata()
    path.write_text("kvs_the-first-token\n")
    assert token.metadata() == token_metadata("kvs_the-first-token")
    path.write_text("kvs_the-second-token\n")
    assert token.metadata() == token_metadata("kvs_the-first-token"), "not at every call"
    now[0] = 1.5
    assert token.metadata() == token_metadata("kvs_the-second-token")
    path.write_text("")
    now[0] = 3.0
    assert token.metadata() == token_metadata("kvs_the-second-token")


def test_a_token_goes_where_nobody_listens() -> None:
    token = Token("kvs_0123456789abcdef")
    for address in ("10.0.0.1:7000", "127.0.0.1:7000"):  # on loopback any user of the machine may listen
        assert token.metadata_for(address, encrypted=False) == ()
    for address, encrypted in (("10.0.0.1:7000", True), ("127.0.0.1:7000", True), ("unix:/run/x", False)):
        assert token.metadata_for(address, encrypted=encrypted) == token.metadata()


def test_the_setting_is_a_path_and_tokens_are_no_settings() -> None:
    variables = {"KVSERVICE_TENANTS_FILE": "/etc/t.json", "KVSERVICE_TOKEN": "x", "KVSERVICE_TOKEN_FILE": "y"}
    assert load_config(None, variables).tenants_file == "/etc/t.json"
    with pytest.raises(ConfigError, match="absolute"):
        load_config(None, {"KVSERVICE_TENANTS_FILE": "t.json"})
