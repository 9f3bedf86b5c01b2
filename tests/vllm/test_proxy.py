"""`kvservice proxy` in front of two real vLLM servers: what a client sees, and that the blocks were handed off.

One server prefills on n0, the other decodes on n1; the reference is the prefill server asked directly, which reads no
cache and so answers as one engine alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.cli.explain import explain
from kvservice.testing.cluster import LocalCluster, free_port
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.vllm import nursery
from tests.vllm.replica import BLOCKS
from tests.vllm.shared_memory import vllm_segments_removed

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

START_SECONDS = 240.0
MODEL = "small"
PROMPT = "The keeper of the northern light writes down every ship that passes, its flag and its course. " * 30 + "Today"
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
Process = subprocess.Popen[bytes] | nursery.Forked


class Servers:
    def __init__(self, cluster: LocalCluster, model: Path, logs: Path) -> None:
        self.cluster = cluster
        self._logs = logs
        self.processes: list[Process] = []
        self.prefill = self._serve(model, "n0", "kv_producer")
        self.decode = self._serve(model, "n1", "kv_consumer")
        self._wait(self.prefill, "n0")
        self._wait(self.decode, "n1")
        self.proxy = f"http://127.0.0.1:{free_port()}"
        words = ["proxy", "--port", self.proxy.rpartition(":")[2], "--prefill", self.prefill, "--decode", self.decode]
        with (self._logs / "proxy.log").open("wb") as out:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "kvservice", *words],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **VARIABLES},
                    start_new_session=True,
                )
            )
        self._wait(self.proxy, "proxy")

    def _serve(self, model: Path, node: str, role: str) -> str:
        port = free_port()
        transfer = {
            "kv_connector": "KVServiceConnector",
            "kv_connector_module_path": "kvservice.connector.vllm",
            "kv_role": role,
            "kv_connector_extra_config": {"mode": "service", "socket": self.cluster.socket(node)},
        }
        # What `vllm serve` runs, as a module that the nursery can fork.
        module = "vllm.entrypoints.openai.api_server"
        words = ["--model", str(model), "--served-model-name", MODEL, "--num-gpu-blocks-override", str(BLOCKS)]
        words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"]
        words += ["--block-size", "32", "--enforce-eager", "--kv-transfer-config", json.dumps(transfer)]
        with (self._logs / f"{node}.log").open("wb") as out:
            environment = {**os.environ, **VARIABLES}
            self.processes.append(nursery.start(module, words, environment, out.fileno(), output=out.fileno()))
        return f"http://127.0.0.1:{port}"

    def _wait(self, url: str, name: str) -> None:
        def said() -> str:
            return (self._logs / f"{name}.log").read_text(errors="replace")[-3000:]

        def is_healthy() -> bool:
            assert all(process.poll() is None for process in self.processes), f"{name} ended: {said()}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
            return False

        eventually(is_healthy, f"a healthy {name}", START_SECONDS, detail=said)

    def fetched(self) -> int:
        return self.cluster.stats("n1").counters.get("fetched_blocks", 0)

    def explained(self, request_id: str, node: str) -> dict[str, Any]:
        """What `kvservice explain` tells of a request that has ended, at this node."""

        def row() -> dict[str, Any] | None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KVSERVICE_RUNTIME_DIR", str(self.cluster.root))
                state = explain(self.cluster.service, request_id)
            return next((row for row in state["requests"] if row["node"] == node and row["finished"]), None)

        return eventually(row, f"what {node} tells of {request_id}")

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            self.kill(process)

    @staticmethod
    def kill(process: Process) -> None:
        """With all its children, as the end of a container does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def servers(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with vllm_segments_removed(), LocalCluster(nodes=2, pool_bytes=256 * MiB) as cluster:
        started = Servers(cluster, model_path, tmp_path_factory.mktemp("servers"))
        try:
            yield started
        finally:
            started.close()


def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)


def complete(url: str, prompt: str, **more: Any) -> Any:
    return client(url).completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, **more)


def test_prefill_here_and_decode_there_answer_as_one_server(servers: Servers) -> None:
    before = servers.fetched()
    completion = complete(servers.proxy, PROMPT)
    answer = completion.choices[0].text
    fetched = servers.fetched() - before
    assert fetched >= 15, "the prompt was not handed off"
    explained = servers.explained(completion.id, "n1")
    assert explained["blocks"]["fetched"] >= 15
    assert explained["report"]["loaded_blocks"] >= 15
    assert answer == complete(servers.prefill, PROMPT).choices[0].text


def test_streamed_chat_is_handed_off(servers: Servers) -> None:
    messages = [{"role": "user", "content": "Please read this log. " + PROMPT + " what did he see?"}]
    before = servers.fetched()
    wanted = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    stream = client(servers.proxy).chat.completions.create(**wanted, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert servers.fetched() - before >= 15
    assert text == client(servers.prefill).chat.completions.create(**wanted).choices[0].message.content


def test_leaving_clients_and_dying_prefill_hurt_nobody_else(servers: Servers) -> None:
    stream = complete(servers.proxy, "A different day. " + PROMPT, stream=True)
    stream.close()
    prompt = "Once more. " + PROMPT
    wanted = complete(servers.prefill, prompt).choices[0].text
    servers.kill(servers.processes[0])
    assert complete(servers.proxy, "Alone now. " + prompt).choices[0].text
    assert complete(servers.proxy, prompt).choices[0].text == wanted
    cluster = servers.cluster
    eventually(lambda: not any(cluster.accounting(node).leases for node in cluster.nodes), "the leases to end", 15)
    assert all(servers.cluster.accounting(node).balanced for node in servers.cluster.nodes)
