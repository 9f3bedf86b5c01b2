"""Warm, pin and unpin against real shards: by the commands, by a program, and by a router's warmer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvservice
from kvservice.cli.main import app
from kvservice.client.members import find_members
from kvservice.client.operator import CALL_SECONDS, OperatorClient
from kvservice.core.block.keys import block_keys, chain_hashes
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.messages import EngineKind
from kvservice.serve.warmer import Warmer
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB

MODEL = "test-model"
LAYOUT = kvservice.Layout(block_tokens=4, shape=(1024,), dtype="float32")
TOKENS = list(range(32))

pytestmark = pytest.mark.processes


class Service:
    """Two nodes with a program at each. The one at n0 has stored the prompt."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.prompt = folder / "prompt.json"
        self.prompt.write_text(json.dumps(TOKENS))
        self.pools = [kvservice.connect("service", socket=cluster.socket(node)) for node in cluster.nodes]
        self.writer, self.reader = (pool.attach(MODEL, LAYOUT) for pool in self.pools)
        self.writer.put(TOKENS, np.zeros((8, 1024), "float32"))

    def run(self, *words: str) -> tuple[int, Any]:
        """(exit code, what the command printed as JSON)."""
        lookup = [word for address in self.cluster.lookup_addresses for word in ("--lookup", address)]
        done = CliRunner().invoke(app, [*words, *lookup, "-o", "json"])
        return done.exit_code, json.loads(done.stdout) if done.exit_code in (0, 1) and done.stdout else done.output

    def clear_at(self, node: str, mark: Mark) -> None:
        """At this node alone, as by an operator to whom the directory names no other."""

        async def ask() -> None:
            client = OperatorClient()
            try:
                await client.clear(self.cluster.record(node).rpc_address, [mark])
            finally:
                await client.close()

        asyncio.run(ask())

    def leased(self, node: str) -> int:
        return self.cluster.accounting(node).slots["leased"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with LocalCluster(2, 1, pool_bytes=16 * MiB) as cluster:
        made = Service(cluster, tmp_path_factory.mktemp("prompts"))
        try:
            yield made
        finally:
            for pool in made.pools:
                pool.close()


def engine_at(address: str) -> EngineKind:
    async def ask() -> EngineKind:
        client = OperatorClient()
        try:
            (kind,) = await client.engines(address)
            return kind
        finally:
            await client.close()

    return asyncio.run(ask())


def test_a_prompt_is_warmed_where_its_model_is(service: Service) -> None:
    """Then the one who asks for it fetches nothing."""

    def all_there() -> bool:
        code, report = service.run("warm", str(service.prompt), "--model", MODEL, "--hold", "600")
        assert (code, report["held_seconds"]) == (0, 600.0)
        rows = {row["node"]: row for row in report["nodes"]}
        assert (rows["n0"]["local"], rows["n0"]["fetched"], rows["n0"]["held"]) == (8, {}, 8)
        n1 = rows["n1"]
        assert n1["local"] + sum(n1["fetched"].values()) == n1["held"] == 8 - n1["missing"]
        return bool(n1["held"] == 8)

    eventually(all_there, "the prompt at n1")
    assert service.leased("n1") == 8
    with service.reader.get(TOKENS) as hit:
        assert (len(hit), hit.fetched) == (8, 0)


def test_a_pin_is_made_shown_and_ended_by_commands(service: Service) -> None:
    code, report = service.run("pin", "system", str(service.prompt), "--model", MODEL, "--node", "n0")
    assert (code, report["held_seconds"], report["nodes"][0]["held"]) == (0, 0.0, 8)
    code, found = service.run("pins")
    (pin,) = found["pins"]
    assert (code, pin["name"], pin["node"], pin["model"], pin["blocks"]) == (0, "system", "n0", MODEL, 8)
    (node,) = [row for row in service.run("status")[1]["nodes"] if row["node_id"] == "n0"]
    assert (node["pins"], node["pinned_bytes"]) == (1, pin["bytes"])
    assert service.run("unpin", "system")[0] == 0
    assert service.run("pins")[1]["pins"] == []
    assert service.run("unpin", "system")[0] == 1


def test_a_router_lets_the_chosen_node_fetch_ahead(service: Service) -> None:
    other = list(range(100, 132))
    service.writer.put(other, np.ones((8, 1024), "float32"))
    digest = engine_at(service.cluster.record("n1").peer_address).fingerprint.digest
    keys = block_keys(digest, chain_hashes(other, 4))
    service.cluster.wait_until_known(keys)

    async def ahead() -> dict[str, int]:
        warmer = Warmer(hold_seconds=1.0)
        warmer.warm(service.cluster.record("n1").peer_address, digest, keys)
        warmer.warm(service.cluster.record("n1").peer_address, bytes(32), keys)
        Warmer(hold_seconds=0.0).warm("nowhere", digest, keys)
        while sum(warmer.counters.values()) < 10:
            await asyncio.sleep(0.01)
        await warmer.close()
        return dict(warmer.counters)

    assert asyncio.run(ahead()) == {"warms": 1, "warmed_blocks": 8, "warms_failed_not_attached": 1}
    with service.reader.get(other) as hit:
        assert (len(hit), hit.fetched) == (8, 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "none"), "no engine of model 'none'"),
        (("--model", MODEL, "--node", "n9"), "no node's id begins with 'n9'"),
    ],
)
def test_a_warm_of_nothing_that_is_there_says_so(service: Service, words: tuple[str, ...], says: str) -> None:
    code, said = service.run("warm", str(service.prompt), *words)
    assert code == 2 and says in said


def test_a_program_that_ended_names_no_prompts(service: Service) -> None:
    """An operator was told only that no engine is attached, of blocks that a program had stored."""
    with kvservice.connect("service", socket=service.cluster.socket("n0")) as pool:
        pool.attach("ended", LAYOUT).put(range(32), np.ones((8, 1024), "float32"))
    needed = "keep the Python program running that stored them"
    code, said = service.run("warm", str(service.prompt), "--model", "ended")
    assert code == 2 and needed in said
    code, said = service.run("clear", "--prompt", str(service.prompt), "--model", "ended")
    assert code == 2 and f"{needed}; or clear --model" in said


def test_a_prompt_without_a_whole_block_stops_no_other(service: Service) -> None:
    mixed = service.prompt.with_name("mixed.jsonl")
    mixed.write_text(f"{TOKENS}\n[1, 2, 3]\n{TOKENS}\n")
    code, report = service.run("warm", str(mixed), "--model", MODEL, "--node", "n0")
    (row,) = report["nodes"]
    assert (code, row["prompts"], row["short"], row["local"]) == (0, 2, 1, 16)
    mixed.write_text("[1, 2, 3]\n[4]\n")
    code, said = service.run("warm", str(mixed), "--model", MODEL)
    assert code == 2 and "is as long as one block of 4 tokens" in said


def test_a_prompt_that_is_short_at_one_node_is_warmed_elsewhere(service: Service) -> None:
    """Blocks are larger at n1. The command ended there, as if nothing had been warmed at n0."""
    larger = kvservice.Layout(block_tokens=64, shape=(1024,), dtype="float32")
    sockets = [service.cluster.socket(node) for node in service.cluster.nodes]
    with kvservice.connect("service", socket=sockets[0]) as n0, kvservice.connect("service", socket=sockets[1]) as n1:
        n0.attach("of two sizes", LAYOUT)
        n1.attach("of two sizes", larger)
        code, report = service.run("warm", str(service.prompt), "--model", "of two sizes")
    assert (code, {row["node"]: row["short"] for row in report["nodes"]}) == (0, {"n0": 0, "n1": 1})


def test_a_pin_is_of_one_prompt(service: Service) -> None:
    two = service.prompt.with_name("two.jsonl")
    two.write_text("[1, 2, 3, 4]\n[5, 6, 7, 8]\n")
    code, said = service.run("pin", "both", str(two), "--model", MODEL)
    assert code == 2 and "use a name for each" in said


def hidden(service: Service, node: str) -> bool:
    """Whether the directory has missed so many heartbeats of the node that it names it to nobody."""
    return node in find_members(None, service.cluster.lookup_addresses).hidden


def test_a_pin_of_what_nobody_has_is_none(service: Service) -> None:
    unknown = service.prompt.with_name("unknown.json")
    unknown.write_text(json.dumps(list(range(1000, 1032))))
    code, report = service.run("pin", "nothing", str(unknown), "--model", MODEL)
    assert code == 1 and {row["held"] for row in report["nodes"]} == {0}
    assert service.run("pins")[1]["pins"] == []


@pytest.mark.parametrize(
    "words", [("status",), ("blocks",), ("pins",), ("unpin", "x"), ("clear", "--everything"), ("top", "--plain")]
)
def test_a_wrong_token_file_is_no_silent_node(
    service: Service, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSERVICE_TOKEN_FILE", "/nonexistent/token")
    lookup = [word for address in service.cluster.lookup_addresses for word in ("--lookup", address)]
    done = CliRunner().invoke(app, [*words, *lookup, *(("--count", "1") if "top" in words else ())])
    assert done.exit_code == 2 and "token file /nonexistent/token" in done.stderr


def test_a_clear_says_whom_it_did_not_reach(service: Service) -> None:
    """One that was away asks the others before it says what it holds. It ends a node, as tests below do."""
    cluster = service.cluster
    service.writer.put(TOKENS, np.zeros((8, 1024), "float32"))
    cluster.kill("n1")
    code, report = service.run("clear", "--model", MODEL)
    rows = {row["node"]: row for row in report["nodes"]}
    assert (code, report["complete"], rows["n0"]["error"]) == (1, False, "") and rows["n0"]["blocks"] >= 8
    assert rows["n1"]["error"]
    with service.writer.get(TOKENS) as hit:
        assert len(hit) == 0
    cluster.start_shard("n1")
    assert sum(cluster.stats("n1").slots[state] for state in ("sealed", "leased")) == 0
    assert cluster.stats("n1").counters["clears"] == 1
    code, report = service.run("clear", "--prompt", str(service.prompt), "--model", MODEL, "--wait", "60")
    assert (code, report["complete"]) == (0, True)
    assert service.run("clear", "--model", MODEL, "--everything")[0] == 2


def test_a_node_that_hung_learns_what_was_cleared_meanwhile(service: Service) -> None:
    cluster = service.cluster
    eventually(lambda: service.reader.is_attached, "the program at n1 to attach again")
    service.reader.put(TOKENS, np.zeros((8, 1024), "float32"))
    with service.reader.get(TOKENS) as hit:
        assert len(hit) == 8
    before = cluster.stats("n1").counters["clears"]
    os.kill(cluster.pid("n1"), signal.SIGSTOP)
    try:
        eventually(lambda: hidden(service, "n1"), "n1 to be hidden")
        service.clear_at("n0", Mark(MarkKind.MODEL, time.time(), MODEL))
    finally:
        os.kill(cluster.pid("n1"), signal.SIGCONT)
    eventually(lambda: cluster.stats("n1").counters["clears"] > before, "n1 to ask what was cleared")
    with service.reader.get(TOKENS) as hit:
        assert len(hit) == 0


def test_a_clear_waits_little_for_a_node_that_hangs(service: Service) -> None:
    """It waited as long as for one that clears millions of blocks, with nothing on the screen."""
    pid = service.cluster.pid("n1")
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: hidden(service, "n1"), "n1 to be hidden")
        began = time.monotonic()
        code, report = service.run("clear", "--everything")
        took = time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (code, [row["node"] for row in report["nodes"] if row["error"]]) == (1, ["n1"])
    assert took < 2 * CALL_SECONDS
    assert service.run("clear", "--everything", "--wait", "60")[0] == 0


def test_a_clear_is_not_complete_without_a_silent_node(service: Service) -> None:
    service.cluster.kill("n1")
    eventually(lambda: hidden(service, "n1"), "n1 to be hidden")
    code, report = service.run("clear", "--everything")
    assert (code, report["complete"], [row["node"] for row in report["nodes"] if row["error"]]) == (1, False, ["n1"])


def test_a_hidden_node_is_shown_as_silent_wherever_one_looks(service: Service) -> None:
    """`top` had one node less, and a check passed."""
    service.cluster.kill("n1")
    eventually(lambda: hidden(service, "n1"), "n1 to be hidden")
    code, seen = service.run("status")
    assert (code, {node["node_id"]: node["state"] for node in seen["nodes"]}) == (1, {"n0": "ok", "n1": "silent"})
    lookup = [word for address in service.cluster.lookup_addresses for word in ("--lookup", address)]
    shown = CliRunner().invoke(app, ["top", "--plain", "--count", "1", *lookup]).stdout.splitlines()
    assert [line.split()[2] for line in shown[1:3]] == ["ok", "silent"] and shown[2].split()[1] == "n1"
    assert CliRunner().invoke(app, ["check", *lookup]).exit_code == 1


@pytest.mark.parametrize("words", [("pins",), ("pin", "it"), ("unpin", "it"), ("warm",)])
def test_commands_for_prompts_name_a_silent_node(service: Service, words: tuple[str, ...]) -> None:
    """They passed, and its pins were missing without a word."""
    service.cluster.kill("n1")
    eventually(lambda: hidden(service, "n1"), "n1 to be hidden")
    service.writer.put(TOKENS, np.zeros((8, 1024), "float32"))
    prompt = (str(service.prompt), "--model", MODEL) if words[0] in ("pin", "warm") else ()
    code, found = service.run(*words, *prompt)
    assert (code, found["problems"]) == (1, ["node n1 is silent"])


def test_a_clear_that_waits_goes_on_without_a_directory(tmp_path: Path) -> None:
    """It said that there was no service, and not what it had cleared."""
    with LocalCluster(2, 1, pool_bytes=16 * MiB) as cluster:
        service = Service(cluster, tmp_path)
        cluster.kill("n1")
        words = ["clear", "--everything", "--wait", "8", "--lookup", *cluster.lookup_addresses, "-o", "json"]
        command = subprocess.Popen(
            [sys.executable, "-m", "kvservice", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with command:
            assert command.stderr is not None and "not done" in command.stderr.readline()
            cluster.kill("lookup0")
            said, _ = command.communicate()
        report = json.loads(said)
        errors = {row["node"]: bool(row["error"]) for row in report["nodes"]}
        assert (command.returncode, report["complete"], errors) == (1, False, {"n0": False, "n1": True})
        assert "does not answer" in report["problems"][0]
        for pool in service.pools:
            pool.close()


@pytest.mark.parametrize("model", [MODEL, "of n1"])
def test_a_clear_of_a_prompt_learns_the_names_of_late_nodes(tmp_path: Path, model: str) -> None:
    """A node that hung at its start was cleared under the names that the engines of the others give, and where it alone
    has the model, the clear ended. The prompt comes from a pipe, which can be read once."""
    with LocalCluster(2, 1, pool_bytes=16 * MiB) as cluster:
        service = Service(cluster, tmp_path)
        service.pools[1].attach(model, LAYOUT, namespace="late").put(TOKENS, np.zeros((8, 1024), "float32"))
        words = ["clear", "--prompt", "/dev/stdin", "--model", model, "--wait", "60", "-o", "json"]
        os.kill(cluster.pid("n1"), signal.SIGSTOP)
        with (
            subprocess.Popen(["cat", service.prompt], stdout=subprocess.PIPE) as prompt,
            subprocess.Popen(
                [sys.executable, "-m", "kvservice", *words, "--lookup", *cluster.lookup_addresses],
                stdin=prompt.stdout,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as command,
        ):
            try:
                assert command.stderr is not None and "not done" in command.stderr.readline()
            finally:
                os.kill(cluster.pid("n1"), signal.SIGCONT)
            said, _ = command.communicate()
        assert (command.returncode, json.loads(said)["complete"]) == (0, True)
        slots = cluster.stats("n1").slots
        assert slots["sealed"] + slots["leased"] == 0
        for pool in service.pools:
            pool.close()


def learns_of_the_clear(service: Service, what: str) -> None:
    """n1 takes the mark, and serves nothing of before. Closes the pools."""
    eventually(lambda: service.cluster.stats("n1").counters["clears"], what, 30.0)
    with service.reader.get(TOKENS) as hit:
        assert len(hit) == 0
    for pool in service.pools:
        pool.close()


def test_a_node_learns_what_a_new_directory_cleared(tmp_path: Path) -> None:
    """A lookup partition that starts again knows no node, so a clear reaches those alone that it has heard of since."""
    with LocalCluster(2, 1, pool_bytes=16 * MiB, environment={"KVSERVICE_HEARTBEAT_SECONDS": "5"}) as cluster:
        service = Service(cluster, tmp_path)
        service.reader.put(TOKENS, np.zeros((8, 1024), "float32"))
        cluster.wait_until_announced("n1")
        os.kill(cluster.pid("n1"), signal.SIGSTOP)  # for less time than the directory hides a node after
        try:
            cluster.kill("lookup0")
            cluster.start_lookup(0)
            cluster.wait_until_announced("n0")
            assert [row["node"] for row in service.run("clear", "--model", MODEL)[1]["nodes"]] == ["n0"]
        finally:
            os.kill(cluster.pid("n1"), signal.SIGCONT)
        learns_of_the_clear(service, "n1 to ask what was cleared")


@pytest.mark.parametrize("later_seconds", [0.0, 8.0])
def test_a_node_asks_those_that_the_directory_hears_of_later(tmp_path: Path, later_seconds: float) -> None:
    """It was cut off at the clear, and a directory that starts again hears of it first, maybe by more than it waits."""
    with LocalCluster(2, 1, pool_bytes=16 * MiB) as cluster:
        service = Service(cluster, tmp_path)
        service.reader.put(TOKENS, np.zeros((8, 1024), "float32"))
        cluster.wait_until_announced("n1")
        os.kill(cluster.pid("n1"), signal.SIGSTOP)
        eventually(lambda: hidden(service, "n1"), "n1 to be hidden")
        service.clear_at("n0", Mark(MarkKind.MODEL, time.time(), MODEL))
        os.kill(cluster.pid("n0"), signal.SIGSTOP)
        cluster.kill("lookup0")
        cluster.start_lookup(0)
        os.kill(cluster.pid("n1"), signal.SIGCONT)
        eventually(lambda: "n1" in find_members(None, cluster.lookup_addresses).shards, "n1 to be known")
        time.sleep(later_seconds)
        assert not cluster.stats("n1").counters["clears"]
        os.kill(cluster.pid("n0"), signal.SIGCONT)
        learns_of_the_clear(service, "n1 to ask n0, too")
