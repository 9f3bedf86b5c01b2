"""What `kvservice doctor` finds on a machine with something wrong, and what its JSON promises."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvservice.auth.tls import utc_time
from kvservice.cli import certs, doctor
from kvservice.cli.doctor_check import ABSENT, OK, PROBLEM, WARNING, Check
from kvservice.cli.output import Format
from kvservice.core.segment import native
from kvservice.discovery import ShardRecord, write_record
from kvservice.errors import ConfigError
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.tier.mounts import MountPoint
from kvservice.units import BootEpoch, GiB, MiB, NodeId
from tests.integration import certificates


@pytest.fixture(autouse=True)
def machine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No service, Ray cluster, token or setting of the real machine shows."""
    for name in [name for name in os.environ if name.startswith(("KVSERVICE_", "RAY_"))]:
        if name != "KVSERVICE_TEST_SESSION":
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(doctor, "RAY_TOKEN", tmp_path / "auth_token")
    monkeypatch.setattr(doctor, "RAY_CURRENT", tmp_path / "ray_current_cluster")
    return tmp_path


@pytest.fixture
def listener() -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def one(probe: doctor.Probe) -> Check:
    (check,) = doctor.guarded(probe)
    return check


def test_a_broken_check_is_a_row_and_not_a_crash() -> None:
    def broken() -> list[Check]:
        raise OSError("no such thing")

    check = one(broken)
    assert (check.name, check.status) == ("broken", PROBLEM)
    assert "OSError: no such thing" in check.detail


def test_a_wrong_setting_is_told_as_its_own_error_says() -> None:
    def reads_settings() -> list[Check]:
        raise ConfigError("objects_url is 'bucket'; give a URL")

    assert one(reads_settings).detail == "objects_url is 'bucket'; give a URL"


@pytest.mark.parametrize(("status", "good"), [(OK, True), (WARNING, True), (ABSENT, True), (PROBLEM, False)])
def test_only_a_problem_makes_the_machine_unfit(status: str, good: bool) -> None:
    assert doctor.healthy([Check("a", OK, ""), Check("b", status, "")]) is good


def test_json_has_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.write_checks([Check("clock", OK, "fine"), Check("ray", PROBLEM, "gone", "start it")], Format.JSON)
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "checks": [
            {"name": "clock", "status": "ok", "detail": "fine", "advice": ""},
            {"name": "ray", "status": "problem", "detail": "gone", "advice": "start it"},
        ],
    }


def test_text_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.write_checks([Check("ray", PROBLEM, "not installed", "pip install 'ray[serve]'")], Format.TABLE)
    assert "pip install 'ray[serve]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("free", "segments", "pool", "status"),
    [
        (64 * GiB, {}, "", OK),
        (1 * GiB, {}, "", WARNING),
        (1 * GiB, {"default-n0": 3 * GiB}, "", OK),  # what is missing is in use by this service
        (1 * GiB, {"default-n0~mirror": 3 * GiB}, "", WARNING),  # a mirror takes less memory than its size
        (1 * GiB, {"other-n0": 3 * GiB}, "", WARNING),
        (1 * MiB, {}, "", PROBLEM),
        (64 * GiB, {}, "100GiB", PROBLEM),  # as it was asked for, no start can work
        (64 * GiB, {"other-n0": 64 * GiB}, "100GiB", PROBLEM),
        (64 * GiB, {"default-n0": 36 * GiB}, "100GiB", OK),
        (1 * GiB, {}, "512MiB", OK),
    ],
)
def test_shared_memory_that_is_too_small_says_how_to_get_more(
    free: int, segments: dict[str, int], pool: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        total = 128 * GiB

    Usage.free = free  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage)
    monkeypatch.setattr("kvservice.memory.room.machine_memory", lambda: 512 * GiB)
    monkeypatch.setattr("kvservice.memory.room.free_memory", lambda: 256 * GiB)
    if pool:
        monkeypatch.setenv("KVSERVICE_POOL_BYTES", pool)
    for name, size in segments.items():
        with (tmp_path / f"kvservice-{name}").open("wb") as file:
            file.truncate(size)
    check = one(doctor.shared_memory)
    assert check.status == status
    assert ("--shm-size" in check.advice) is (status in (WARNING, PROBLEM))


@pytest.mark.parametrize(
    ("left", "pool", "status"),
    [(2 * GiB, "", WARNING), (2 * GiB, "4GiB", PROBLEM), (2 * GiB, "1GiB", OK), (8 * GiB, "", OK)],
)
def test_memory_that_others_have_taken_is_told(
    left: int, pool: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/shm may have room that the machine has not: nothing is set aside for it."""
    usage = SimpleNamespace(total=128 * GiB, free=64 * GiB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr("kvservice.memory.room.free_memory", lambda: left)
    if pool:
        monkeypatch.setenv("KVSERVICE_POOL_BYTES", pool)
    check = one(doctor.shared_memory)
    assert check.status == status
    assert ("has only 2.0 GiB of memory left" in check.detail) is (status != OK)


@pytest.mark.parametrize(
    ("mounts", "status", "policy"),
    [
        ("tmpfs /dev/shm tmpfs rw,relatime,size=4k 0 0", "absent", "never"),
        ("tmpfs /dev/shm tmpfs rw,huge=advise 0 0", "absent", "advise"),
        ("tmpfs /dev/shm tmpfs rw,huge=within_size,size=4k 0 0\ntmpfs /tmp tmpfs rw 0 0", "ok", "within_size"),
        ("tmpfs /dev/shm tmpfs rw 0 0\ntmpfs /dev/shm tmpfs rw,huge=always 0 0", "ok", "always"),
        ("tmpfs /tmp tmpfs rw,huge=always 0 0", "absent", "never"),
    ],
)
def test_huge_pages_of_shared_memory_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounts: str, status: str, policy: str
) -> None:
    (tmp_path / "mounts").write_text(mounts)
    monkeypatch.setattr(doctor, "MOUNTS", tmp_path / "mounts")
    [check] = doctor.huge_pages()
    assert check.status == status and f"huge={policy}" in check.detail
    assert bool(check.advice) == (status != "ok")


def test_plaintext_is_told_and_warned_of_when_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check = one(doctor.tls)
    assert check.status == ABSENT and "stays on this machine" in check.detail and "kvservice certs" in check.advice
    monkeypatch.setenv("KVSERVICE_ALLOW_PLAINTEXT", "1")
    assert one(doctor.tls).status == WARNING


@pytest.mark.parametrize(
    ("days", "status"), [(0.001, WARNING), (13, OK), (365, OK)], ids=["ends soon", "short-lived", "new"]
)
def test_a_certificate_that_ends_soon_is_told_with_its_date(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, days: float, status: str
) -> None:
    monkeypatch.setenv("KVSERVICE_TLS_DIR", str(certificates.write(tmp_path / "tls", days=days)))
    until, check = time.time() + days * 86_400, one(doctor.tls)
    assert check.status == status
    assert any(utc_time(until + late) in check.detail for late in (0, -60)), "a certificate knows no parts of a second"
    assert ("certs DIR --renew" in check.advice) == (status == WARNING)


def test_a_ca_that_ends_first_is_told_with_its_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two CAs, as while one replaces the other, the one that signed counts. Only the certificate's date was told."""
    monkeypatch.setattr(certs, "AUTHORITY_DAYS", 0.01)
    ending = certs.make_authority("test CA")
    until = time.time() + 0.01 * 86_400
    for trusted in (ending.pem, ending.pem + certificates.STRANGER.pem, certificates.AUTHORITY.pem + ending.pem):
        folder = certificates.write(tmp_path / "tls", issuer=ending, trusted=trusted)
        monkeypatch.setenv("KVSERVICE_TLS_DIR", str(folder))
        check = one(doctor.tls)
        assert check.status == WARNING and "rotation" in check.advice
        assert any(f"{utc_time(until + late)}, when its CA ends" in check.detail for late in (0, -60))


def test_a_certificate_that_is_its_own_ca_ends_when_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may not sign, so TLS libraries list no CA, and the CA ended in 1970."""
    folder = certificates.write(tmp_path / "tls", days=365)
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    monkeypatch.setenv("KVSERVICE_TLS_DIR", str(folder))
    check = one(doctor.tls)
    assert check.status == OK and "when its CA ends" not in check.detail


def test_a_misspelt_setting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVICE_POOL_BYTE", "1GiB")
    check = one(doctor.settings)
    assert check.status == PROBLEM
    assert "did you mean 'pool_bytes'" in check.detail


def test_block_keys_are_what_every_other_node_computes() -> None:
    assert one(doctor.block_keys).status == OK


def test_other_block_keys_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "GOLDEN_KEY", "00" * 16)
    assert one(doctor.block_keys).status == PROBLEM


@pytest.mark.parametrize(
    ("source", "algorithm"),
    [
        ('class CacheConfig:\n    prefix_caching_hash_algo: Algo = "xxhash"\n', "xxhash"),
        ("class CacheConfig:\n    prefix_caching_hash_algo: Algo\n", None),
        ("x = 1\n", None),
    ],
)
def test_default_hash_is_read_from_source(source: str, algorithm: str | None) -> None:
    assert doctor.default_hash(source) == algorithm


@pytest.mark.parametrize(
    ("algorithm", "seed", "status", "advised"),
    [
        ("xxhash", None, WARNING, True),
        ("xxhash_cbor", "0", OK, False),
        ("sha256", None, OK, True),
        ("sha256_cbor", None, OK, False),
        (None, None, WARNING, True),
    ],
)
def test_a_hash_that_no_other_replica_repeats_is_warned_about(
    algorithm: str | None, seed: str | None, status: str, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setattr(doctor, "default_hash", lambda source: algorithm)
    check = one(doctor.engine_hash)
    assert (check.status, bool(check.advice)) == (status, advised)


def test_installed_engine_names_its_hash_without_being_imported() -> None:
    check = one(doctor.engine_hash)
    assert check.status == OK
    assert "sha256" in check.detail


def test_a_silent_cluster_is_a_problem_only_if_asked_for(
    machine_of_its_own: Path, monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
    (machine_of_its_own / "ray_current_cluster").write_text(silent)
    check = one(doctor.ray_cluster)
    assert check.status == OK
    assert "no cluster runs" in check.detail
    monkeypatch.setenv("RAY_ADDRESS", silent)
    assert one(doctor.ray_cluster).status == PROBLEM
    monkeypatch.setenv("RAY_ADDRESS", listener)
    assert listener in one(doctor.ray_cluster).detail


def test_token_file_without_a_stated_mode_is_warned_about(
    machine_of_its_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine_of_its_own / "auth_token").write_text("x")
    check = one(doctor.ray_cluster)
    assert check.status == WARNING
    assert "RAY_AUTH_MODE" in check.advice
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert one(doctor.ray_cluster).status == OK


def test_no_service_is_absent_and_no_problem() -> None:
    check = one(doctor.service_parts)
    assert (check.name, check.status) == ("service", ABSENT)


def test_a_registered_shard_that_died_is_a_problem() -> None:
    write_record(ShardRecord("gone", NodeId("n0"), "/nowhere.sock", "127.0.0.1:1", 1, BootEpoch(1), ("127.0.0.1:1",)))
    checks = doctor.guarded(doctor.service_parts)
    assert {check.status for check in checks} == {PROBLEM}
    assert all(check.advice for check in checks)


@pytest.mark.processes
def test_every_part_of_a_running_service_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(nodes=2, transport="shm") as cluster:
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
        checks = doctor.guarded(doctor.service_parts)
    kinds = sorted(check.name.split(" ")[0] for check in checks)
    assert {check.status for check in checks} == {OK}, checks
    assert kinds.count("shard") == 2
    assert kinds.count("lookup") >= 1


@pytest.mark.processes
def test_a_tier_that_a_shard_does_not_use_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`status` says that the doctor knows what to do, and the doctor said that all was well."""
    taken = tmp_path / "a file"
    taken.write_text("")
    with LocalCluster(nodes=1, transport="shm", environment={"KVSERVICE_DISK_PATH": str(taken)}) as cluster:
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
        eventually(lambda: cluster.stats("n0").tiers[0].state == "failed", "the tier to have failed")
        (found,) = [check for check in doctor.guarded(doctor.service_parts) if check.status == PROBLEM]
    assert found.name.startswith("disk of") and str(taken) in found.detail and "restart its shard" in found.advice


@pytest.mark.processes
def test_a_part_without_ray_is_not_started_again_on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(nodes=1, transport="shm") as cluster:
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
        cluster.kill("lookup0")
        (lost,) = [check for check in doctor.guarded(doctor.service_parts) if check.status == PROBLEM]
    assert "start it there again" in lost.advice and "kvservice up" not in lost.advice


@pytest.mark.parametrize(
    ("files", "uid", "lingers", "status"),
    [
        ({}, 1000, False, WARNING),  # yes is what systemd does unless it is told not to
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, 1000, False, WARNING),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, 1000, False, OK),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=yes\n"}, 999, False, OK),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=yes\n"}, 1000, True, OK),
        (
            {
                "usr/systemd/logind.conf": "[Login]\nRemoveIPC=yes\n",
                "usr/systemd/logind.conf.d/50-server.conf": "[Login]\nRemoveIPC = no\n",
            },
            1000,
            False,
            OK,
        ),
        (
            {
                "usr/systemd/logind.conf.d/50-server.conf": "[Login]\nRemoveIPC=no\n",
                "etc/systemd/logind.conf.d/50-server.conf": "[Login]\nKillUserProcesses=no\n",
            },
            1000,
            False,
            WARNING,
        ),
    ],
)
def test_memory_that_goes_with_a_logout_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], uid: int, lingers: bool, status: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    folders = (tmp_path / "usr/systemd", tmp_path / "etc/systemd")
    monkeypatch.setattr(doctor, "LOGIND_FOLDERS", folders)
    monkeypatch.setattr(doctor, "SYSTEMD", tmp_path)
    monkeypatch.setattr(doctor, "LINGER", tmp_path / "linger")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(doctor.pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="kim"))
    if lingers:
        (tmp_path / "linger").mkdir()
        (tmp_path / "linger/kim").touch()
    check = one(doctor.logout)
    assert check.status == status
    assert ("enable-linger" in check.advice) is (status == WARNING)


def test_without_systemd_nothing_goes_with_a_logout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SYSTEMD", tmp_path / "none")
    assert one(doctor.logout).status == OK


def test_a_runtime_directory_that_others_write_or_share_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path / "run"))
    (check,) = doctor.runtime_directory()
    assert (check.status, check.detail.startswith(str(tmp_path / "run"))) == (OK, True)
    monkeypatch.setattr("kvservice.tier.mounts.mounts_here", lambda: [MountPoint(Path("/"), "nfs4")])
    (check,) = doctor.runtime_directory()
    assert check.status == WARNING and "KVSERVICE_RUNTIME_DIR" in check.advice
    tmp_path.chmod(0o777)
    (check,) = doctor.runtime_directory()
    assert check.status == PROBLEM and "other users can write" in check.detail


@pytest.mark.parametrize("mode", [0o500, 0])
def test_a_runtime_directory_that_cannot_be_written_is_a_problem(tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir(mode=mode)
    code = "from kvservice.cli import doctor; [row] = doctor.runtime_directory(); print(row.status, row.detail)"
    rights = "-dac_override,-dac_read_search"  # with them root writes and looks everywhere
    drop = ["setpriv", "--bounding-set", rights] if os.geteuid() == 0 else []
    for wanted in ("run", "run/below"):
        variables = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(tmp_path / wanted)}
        said = subprocess.run([*drop, sys.executable, "-c", code], env=variables, capture_output=True, text=True).stdout
        assert said.startswith(PROBLEM) and f"{tmp_path / 'run'} is not writable" in said


def test_an_installation_without_a_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(doctor.copies).status == OK
    monkeypatch.setattr(native, "native", None)
    check = one(doctor.copies)
    assert check.status == WARNING and "make native" in check.advice
