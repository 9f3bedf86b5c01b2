"""The command line as a user meets it: exit codes, messages, JSON keys, and a service in the foreground."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvservice.cli import lifecycle
from kvservice.cli.main import app
from kvservice.client import members
from kvservice.client.overview import Overview
from kvservice.discovery import find_shards
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.transfer.nixl import nixl_available
from tests.interruptible import interruptible

pytestmark = pytest.mark.processes

HEAVY = ("ray", "vllm", "torch", "grpc", "nixl_cu12", "matplotlib", "numpy")


@pytest.fixture
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvc-") as folder:  # short: a Unix socket goes into it
        yield Path(folder)


def command(runtime: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvservice", *arguments],
        env={**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


class Foreground:
    """`kvservice up --no-ray` as a process."""

    def __init__(self, runtime: Path, service: str) -> None:
        self.runtime, self.service = runtime, service
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.metrics_port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvservice", "up", "--no-ray", "--service", service, "--pool-bytes", "16MiB"],
            env={**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime), "KVSERVICE_METRICS_PORT": str(self.metrics_port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return bool(find_shards(self.service, self.runtime))

        eventually(is_there, "the shard of the service in the foreground")

    def end(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output


@pytest.fixture
def foreground(runtime: Path) -> Iterator[Foreground]:
    made = Foreground(runtime, f"cli-{os.getpid()}")
    try:
        made.wait()
        yield made
    finally:
        if made.process.poll() is None:
            made.end(signal.SIGTERM)


def test_help_names_every_command_and_loads_nothing_heavy(runtime: Path) -> None:
    shown = command(runtime, "--help")
    assert shown.returncode == 0
    for name in ("up", "down", "status", "doctor", "demo"):
        assert f"  {name}" in shown.stdout
    code = f"import sys, kvservice.cli.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "asked",
    [
        ["status"],
        ["status", "-o", "json"],
        ["explain", "x"],
        ["drain", "--local"],
        ["logs"],
        ["tenants", "usage"],
        ["status", "--lookup", "127.0.0.1:1"],
    ],
    ids=" ".join,
)
def test_without_a_service_every_command_exits_3(runtime: Path, asked: list[str]) -> None:
    shown = command(runtime, *asked)
    assert (shown.returncode, shown.stdout) == (3, ""), shown.stderr
    assert ("kvservice up --no-ray" in shown.stderr) != ("127.0.0.1:1;" in shown.stderr), shown.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--no-ray", "--pool-bytes", "0"], "at least 4.0 MiB"),
        (["up", "--no-ray", "--pool-bytes", "-4GiB"], "at least 4.0 MiB"),
        (["up", "--no-ray", "--transport", "pigeon"], "give auto, nixl or shm"),
        (["up", "--no-ray", "--config", "/does/not/exist.toml"], "cannot read /does/not/exist.toml"),
        (["up", "--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_to_do(runtime: Path, arguments: list[str], said: str) -> None:
    shown = command(runtime, *arguments)
    assert shown.returncode == 2
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_misspelt_variable_exits_2_and_names_the_nearest(runtime: Path) -> None:
    shown = command(runtime, "status", KVSERVICE_POOL_BYTE="1GiB")
    assert shown.returncode == 2
    assert "did you mean 'pool_bytes'" in shown.stderr


@pytest.mark.parametrize(("variable", "colours"), [("1", False), ("", True)])
def test_errors_on_a_terminal_heed_no_color(runtime: Path, variable: str, colours: bool) -> None:
    ours, its = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(its, "wb"):
        words = [sys.executable, "-m", "kvservice", "status"]
        variables = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime), "NO_COLOR": variable}
        assert subprocess.run(words, env=variables, stderr=its, timeout=60).returncode == 3
        said = screen.read(4096)
    assert b"error: no service" in said and (b"\x1b[" in said) == colours


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_service_in_the_foreground_ends_cleanly(foreground: Foreground, number: signal.Signals) -> None:
    state = json.loads(command(foreground.runtime, "status", "-o", "json", "--service", foreground.service).stdout)
    assert [row["node_id"] for row in state["nodes"]] == ["local"]
    code, output = foreground.end(number)
    assert (code, "Traceback" in output) == (0, False), output
    assert not (foreground.runtime / foreground.service).exists()
    assert not list(Path("/dev/shm").glob(f"kvservice-{foreground.service}-*"))


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

INTERRUPTED = sys.argv[1]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == INTERRUPTED:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["up", "--no-ray", "--pool-bytes", "16MiB", "--service", "early"]
runpy.run_module("kvservice", run_name="__main__")
"""


@pytest.mark.parametrize(("module", "code"), [("typer", -signal.SIGINT), ("kvservice.lookup.server", 0)])
def test_ctrl_c_before_a_service_serves_leaves_nothing(runtime: Path, module: str, code: int) -> None:
    """It comes while the command loads, or while the foreground loads what it runs: most of the first second."""
    shown = subprocess.run(
        interruptible([sys.executable, "-c", INTERRUPTED_IMPORT, module]),
        env={**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (shown.returncode, shown.stderr) == (code, "")
    assert not list(runtime.iterdir())


KEEPS_TABLES = """
import os, runpy, signal, sys
from kvservice import garbage

def keep_tables():
    print("kept", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

garbage.keep_tables = keep_tables
sys.argv[1:] = ["up", "--no-ray", "--pool-bytes", "16MiB", "--service", "tables"]
runpy.run_module("kvservice", run_name="__main__")
"""


def test_a_service_in_the_foreground_keeps_its_tables(runtime: Path) -> None:
    """As every process of the service: a collection of all that a pool's books hold would stop its engines."""
    shown = subprocess.run(
        [sys.executable, "-c", KEEPS_TABLES],
        env={**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (shown.returncode, shown.stdout) == (0, "kept\n"), shown.stderr


PARTS = (
    ["shard", "--node", "n0", "--pool-bytes", "16MiB"],
    ["lookup", "--lookup-partitions", "1"],
    ["copy-worker", "--node", "n0", "--device", "cpu"],
)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0])
@pytest.mark.parametrize("nohup", [False, True])
def test_a_part_whose_terminal_closes_leaves_nothing(runtime: Path, part: list[str], nohup: bool) -> None:
    """With `nohup` it goes on."""
    service = f"hup-{os.getpid()}"
    process = subprocess.Popen(
        [*(["nohup"] if nohup else []), sys.executable, "-m", "kvservice", *part, "--service", service],
        env={**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime), "KVSERVICE_TRANSPORT": "shm"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert any("serves" in line or "listens" in line for line in process.stdout)
        process.send_signal(signal.SIGHUP)
        if nohup:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
        else:
            assert process.wait(30) == 0
            assert not list(runtime.rglob("*.*")) and not list(Path("/dev/shm").glob(f"kvservice-{service}-*"))
    finally:
        process.terminate()
        process.wait(30)


def test_the_demo_stopped_half_way_leaves_nothing_behind(runtime: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvservice", "demo"],
        env={**os.environ, "TMPDIR": str(runtime), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("started")
    for _ in range(3):  # a terminal signals the whole group; an impatient user does it again
        os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.read().endswith("stopped:  everything that was started is removed\n")
    assert process.wait(30) == 130
    assert not list(runtime.iterdir())
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_a_demo_stopped_before_its_first_part_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A signal may come when its cluster is made, and nothing is there yet that would remove it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cluster = LocalCluster(1)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(cluster, "start_lookup", lambda index: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), cluster:
        pass
    assert not list(tmp_path.iterdir())


def test_the_parts_of_a_killed_demo_end_by_themselves(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvservice", "demo"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("started:")
        parts = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        services = [path.name for path in tmp_path.glob("kvs-*/t*")]
        process.kill()
    assert (len(parts), len(services)) == (3, 1)
    eventually(lambda: not any(Path("/proc", pid).exists() for pid in parts), "the end of the demo's parts")
    assert not list(Path("/dev/shm").glob(f"kvservice-{services[0]}-*"))


def test_the_demo_goes_on_when_its_reader_has_seen_enough() -> None:
    """As with `kvservice demo | head -1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvservice", "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("started")
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, "")


TRANSPORTS = ("shm", "nixl") if nixl_available() else ("shm",)


@pytest.mark.parametrize(
    "arguments",
    [["shard", "--node", "n0", "--pool-bytes", "16MiB"], ["lookup", "--lookup-partitions", "1", "--port", "0"]],
    ids=["shard", "lookup"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_json_logs_are_all_that_a_process_writes(runtime: Path, arguments: list[str], transport: str) -> None:
    """Start, work and end; libraries' lines too. In a container both streams are one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvservice", *arguments, "--json-logs", "--service", f"json-{os.getpid()}"],
        env={**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime), "KVSERVICE_TRANSPORT": transport},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[dict[str, object]] = []
    for line in process.stdout:
        lines.append(json.loads(line))
        if "serves" in str(lines[-1]["event"]):
            process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert any("serves" in str(line["event"]) for line in lines)
    assert not [line for line in lines if line["level"] in ("warning", "error")]


def test_with_json_logs_the_reason_of_an_early_end_is_json_too(runtime: Path) -> None:
    shown = command(runtime, "shard", "--node", "n0", "--pool-bytes", "1", "--json-logs")
    (line,) = [json.loads(line) for line in (shown.stdout + shown.stderr).splitlines()]
    assert (shown.returncode, line["level"]) == (2, "error") and "at least 4.0 MiB" in line["event"]


def test_a_service_in_the_foreground_answers_prometheus(foreground: Foreground) -> None:
    url = f"http://127.0.0.1:{foreground.metrics_port}/metrics"

    def answer() -> str | None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            return str(reply.read().decode())
        return None

    text = eventually(answer, "the metrics: a service is registered a moment before it answers here")
    assert "kvservice_pull_corrupt_total{" in text and "kvservice_lookup_keys{" in text


def test_the_only_service_of_a_machine_needs_no_name(foreground: Foreground) -> None:
    """If there are several, the error names them."""
    state = json.loads(command(foreground.runtime, "status", "-o", "json").stdout)
    assert state["service"] == foreground.service
    for asked in (["status", "--service", "other"], ["explain", "x", "--service", "other"]):
        shown = command(foreground.runtime, *asked)
        assert shown.returncode != 0 and f"there is {foreground.service}" in shown.stdout + shown.stderr
    record = foreground.runtime / "second" / "n0" / "shard.json"
    record.parent.mkdir(parents=True)
    (found,) = find_shards(foreground.service, foreground.runtime)
    record.write_text(json.dumps({**asdict(found), "service": "second", "node_id": "n0"}))
    shown = command(foreground.runtime, "status")
    assert shown.returncode == 2 and f"--service {foreground.service} or second" in shown.stderr


def test_down_says_who_ends_a_service_without_ray(foreground: Foreground) -> None:
    shown = command(foreground.runtime, "down", "--service", foreground.service)
    assert shown.returncode == 1
    assert f"`kill {foreground.process.pid}`" in shown.stderr
    assert foreground.process.poll() is None


def test_logs_are_found_where_they_are_written(runtime: Path) -> None:
    path = runtime / "shard.log"
    with path.open("wb") as log:
        shard = subprocess.Popen(
            [sys.executable, "-m", "kvservice", "shard", "--node", "n0", "--pool-bytes", "16MiB", "--service", "logs"],
            env={**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime), "KVSERVICE_TRANSPORT": "shm"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    follow = None
    try:
        eventually(lambda: find_shards("logs", runtime), "the shard")
        assert "shard_started" in command(runtime, "logs", "--service", "logs").stdout
        last = command(runtime, "logs", "--lines", "0", "--node", "n")
        assert (last.returncode, last.stdout) == (0, "") and str(path) in last.stderr
        assert command(runtime, "logs", "--node", "other").returncode == 2
        follow = subprocess.Popen(
            interruptible([sys.executable, "-m", "kvservice", "logs", "--follow", "--lines", "0"]),
            env={**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert follow.stderr is not None and follow.stdout is not None
        assert str(path) in follow.stderr.readline()
        with path.open("ab") as log:
            log.write(b"a new line\x1b[31m\n")
        assert follow.stdout.readline() == "a new line\\x1b[31m\n"
        follow.send_signal(signal.SIGINT)
        assert follow.wait(10) == 0
    finally:
        shard.terminate()
        shard.wait(30)
        if follow is not None:
            follow.kill()
            follow.communicate()


def test_logs_in_a_pipe_are_said_to_be_there(foreground: Foreground) -> None:
    shown = command(foreground.runtime, "logs")
    assert shown.returncode == 1 and "to a pipe" in shown.stderr and str(foreground.process.pid) in shown.stderr


def test_two_services_of_one_name_on_one_machine_are_refused(foreground: Foreground) -> None:
    second = command(foreground.runtime, "up", "--no-ray", "--service", foreground.service, "--pool-bytes", "16MiB")
    assert second.returncode == 1
    assert "runs on this machine already" in second.stderr and "--node" not in second.stderr
    shard = command(foreground.runtime, "shard", "--node", "local", "--service", foreground.service)
    assert shard.returncode == 1 and "choose another --node of `kvservice shard`" in shard.stderr
    assert find_shards(foreground.service, foreground.runtime)  # the first one goes on


def test_status_shows_every_node_and_a_dead_one_as_a_problem() -> None:
    with LocalCluster(nodes=2, lookup_partitions=1, transport="shm", pool_bytes=16 << 20) as cluster:
        variables = {"KVSERVICE_SERVICE": cluster.service}
        shown = command(cluster.root, "status", "-o", "json", **variables)
        state = json.loads(shown.stdout)
        assert shown.returncode == 0, shown.stdout
        assert set(state) == {field.name for field in fields(Overview)}
        assert [(row["node_id"], row["state"]) for row in state["nodes"]] == [("n0", "ok"), ("n1", "ok")]
        assert [row["partition_count"] for row in state["lookups"]] == [1]
        table = command(cluster.root, "status", **variables)
        assert table.returncode == 0
        assert "2 nodes, 0 engines" in table.stdout and "reserved" in table.stdout
        assert f"{socket.gethostname()} (n1)" in table.stdout
        assert (
            "boot epoch" not in table.stdout
            and "boot epoch" in command(cluster.root, "status", "-o", "wide", **variables).stdout
        )

        cluster.kill("n1")
        shown = command(cluster.root, "status", "-o", "json", **variables)
        assert shown.returncode == 1
        assert any("node n1" in problem for problem in json.loads(shown.stdout)["problems"])

        cluster.kill("n0")  # no shard is left
        assert command(cluster.root, "status", "-o", "json", **variables).returncode == 1
        cluster.kill("lookup0")  # nobody is left, but the records say that there was a service
        assert command(cluster.root, "status", "-o", "json", **variables).returncode == 3


def test_check_names_the_part_that_does_not_answer(runtime: Path) -> None:
    result = command(runtime, "check", "--lookup", "127.0.0.1:1", "--metrics", "127.0.0.1:1")
    assert result.returncode == 1
    assert "lookup partition 127.0.0.1:1: unavailable" in result.stderr
    assert "problem: 127.0.0.1:1: Connection refused" in result.stderr
    assert result.stdout.startswith("0 of 1 lookup partition, 0 cache shards"), "what is silent is not counted as there"
    assert command(runtime, "check").returncode == 3


def test_check_asks_the_service_of_this_machine(foreground: Foreground) -> None:
    checked = command(foreground.runtime, "check")
    assert checked.returncode == 0 and checked.stdout.startswith("1 lookup partition, 1 cache shard, 14.0 MiB"), (
        checked.stderr
    )
    assert command(foreground.runtime, "check", "--nodes", "2").returncode == 1
    named = command(foreground.runtime, "check", "--service", "other")
    assert named.returncode == 3 and f"there is {foreground.service}" in named.stderr


def test_a_drain_that_is_undone_is_told_to_programs_too(foreground: Foreground) -> None:
    undone = command(foreground.runtime, "drain", "--local", "--undo", "-o", "json")
    assert undone.returncode == 0, undone.stderr
    assert json.loads(undone.stdout) == [{"node": "local", "error": "", "phase": "serving"}]


@pytest.mark.parametrize(("given", "chosen"), [((), "nu1"), (("--service", "nu2"), "nu2")])
def test_down_stops_the_only_service_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], chosen: str
) -> None:
    stopped: list[str] = []
    monkeypatch.delenv("KVSERVICE_SERVICE", raising=False)
    monkeypatch.setattr(members, "services_here", lambda: ["nu1"])
    monkeypatch.setattr(lifecycle, "down", lambda service, *_, **__: stopped.append(service))
    assert CliRunner().invoke(app, ["down", *given]).exit_code == 0
    assert stopped == [chosen]


def test_a_shard_with_a_wrong_setting_says_which(runtime: Path) -> None:
    result = command(runtime, "shard", "--node", "n0", "--lookup", "nowhere")
    assert result.returncode == 2 and "lookup has 'nowhere'" in result.stderr
    for name in ("a/b", "--", "n c", ".."):
        assert f"{name!r} cannot be a node's name" in command(runtime, "shard", "--node", name).stderr
    assert "service is '--'" in command(runtime, "status", "--service", "--").stderr
    refused = command(runtime, "shard", "--node", "n0", "--segment-dir", str(runtime / "nope"))
    assert refused.returncode == 2 and "which is no folder: make it, or leave the option out" in refused.stderr


@pytest.mark.parametrize(("given", "is_there"), [((), True), (("--port", "0"), False)])
def test_a_lookup_partition_listens_at_the_port_of_the_setting(
    runtime: Path, given: tuple[str, ...], is_there: bool
) -> None:
    """Unless it is given a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["lookup", "--partition", "1", "--lookup-partitions", "2", f"--lookup-port={port - 1}", *given]
    variables = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(runtime), "KVSERVICE_ALLOW_PLAINTEXT": "true"}
    with subprocess.Popen(
        [sys.executable, "-m", "kvservice", *words], env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert (f"127.0.0.1:{port}" in said) is is_there, said
            assert "every shard needs the addresses of all 2 lookup partitions" in process.stdout.readline()
        finally:
            process.terminate()
            process.wait(20)
