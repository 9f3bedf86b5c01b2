"""A call that cannot work is told in a line that says what to do, with the exit code of a wrong call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvservice.cli.main import app
from kvservice.discovery import ShardRecord, write_record
from kvservice.units import BootEpoch, NodeId

FILES = {
    "missing": ("No such file or directory", None),
    "empty": ("each line is one request", b""),
    "words": ("each line is one request", b"hello\n"),
    "binary": ("each line is one request", b"\xff\xfe\x00"),
    "gzip": ("each line is one request", b"\x1f\x8b\x08\x00"),
}


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_trace_is_a_wrong_call(tmp_path: Path, kind: str) -> None:
    said, data = FILES[kind]
    path = tmp_path / kind
    if data is not None:
        path.write_bytes(data)
    code, output = call("replay", str(path))
    assert code == 2 and said in output and kind in output


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("command", [("warm",), ("pin", "name")], ids=["warm", "pin"])
def test_a_file_without_prompts_is_a_wrong_call(tmp_path: Path, command: tuple[str, ...], kind: str) -> None:
    said, data = FILES[kind]
    path = tmp_path / kind
    if data is not None:
        path.write_bytes(data)
    code, output = call(*command, str(path), "--model", "m")
    assert code == 2 and str(path) in output and "Errno" not in output and "codec" not in output
    assert (said if data is None else "a line is a list of token ids") in output


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    code, output = call("tier", "check", str(tmp_path / "none"))
    assert code == 2 and "disk_path/SERVICE/NODE" in output and "go without this tier" not in output


@pytest.mark.parametrize("address", ["foo", "foo:", "foo:²", "foo:99999"])
def test_an_address_of_metrics_without_a_port_is_refused(address: str) -> None:
    """It was a problem of the service, and --wait went on asking."""
    code, output = call("check", "--metrics", address, "--wait", "60")
    assert code == 2 and f"'{address}'; give HOST:PORT" in output


def test_up_without_ray_joins_no_cluster() -> None:
    code, output = call("up", "--no-ray", "--address", "10.0.0.5:6379")
    assert code == 2 and "leave one of them out" in output


def test_logs_offers_no_option_that_it_lacks() -> None:
    code, output = call("logs")
    assert code == 3 and "kvservice up" in output and "--lookup" not in output


def test_a_compressed_trace_is_told_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00")
    code, output = call("replay", str(path))
    assert code == 2 and "unpack a compressed file first" in output and "codec" not in output


@pytest.mark.parametrize(
    "words",
    [
        ("clear", "--tenant", "a", "--tenant", "b"),
        ("drain", "--node", "a", "--node", "b"),
        ("warm", "prompts", "--model", "a", "--model", "b"),
        ("status", "-o", "json", "--output", "yaml"),
    ],
    ids=lambda words: words[0],
)
def test_an_option_for_one_value_is_not_taken_twice(words: tuple[str, ...]) -> None:
    """The last one would count, and the others would be left out in silence."""
    code, output = call(*words)
    assert code == 2 and "takes one value, and was given 2 times" in output


def test_settings_and_options_for_many_may_be_repeated() -> None:
    code, output = call("blocks", "--state", "sealed", "--state", "leased")
    assert code == 3 and "no service is registered" in output
    code, output = call("up", "--no-ray", "--pool-bytes", "1GiB", "--pool-bytes", "x")
    assert code == 2 and "not a size: 'x'" in output


def test_a_service_beside_a_lookup_partition_is_refused() -> None:
    """The partition's service was shown, whatever name was given."""
    code, output = call("status", "--service", "other", "--lookup", "127.0.0.1:1")
    assert code == 2 and "give --service or --lookup, not both" in output


def test_tenants_set_without_a_change_changes_nothing(tmp_path: Path) -> None:
    file = str(tmp_path / "tenants.json")
    assert call("tenants", "add", "a", "--file", file)[0] == 0
    code, output = call("tenants", "set", "a", "--file", file)
    assert code == 2 and "say what to change" in output


@pytest.mark.processes
def test_a_copy_worker_without_its_shard_says_so() -> None:
    """It served nobody, silently. It goes on: the shard may start later."""
    write_record(ShardRecord("s", NodeId("n0"), "/none.sock", "unix:/none", 1, BootEpoch(1)))
    command = [sys.executable, "-m", "kvservice", "copy-worker", "--service", "s", "--node"]
    for node in ("zz", "n0"):
        worker = subprocess.Popen([*command, node], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert worker.stdout is not None and "listens" in worker.stdout.readline()
        finally:
            worker.terminate()
            _, said = worker.communicate(timeout=30)
        assert ("no shard 'zz' of service 's'" in said and "there is n0" in said) == (node == "zz"), said


@pytest.mark.processes
@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_a_full_disk_is_told_in_one_line(form: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kvservice", "config", "show", "-o", form]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.stderr == "error: the output cannot be written: No space left on device\n"
    assert ended.returncode == 1


def test_config_show_names_the_setting_that_was_meant() -> None:
    code, output = call("config", "show", "pool_byts")
    assert code == 2 and "did you mean 'pool_bytes'?" in output
