"""`kvservice console` as a process, beside a real service: what it says, what it shows, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from tests.conftest import ROOT
from tests.integration import certificates
from tests.integration.engine import attached, chain, spec

COMMAND = (sys.executable, "-m", "kvservice", "console", "--port", "0")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=1) as running:
        yield running


@contextmanager
def console(cluster: LocalCluster, *options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    own = {"KVSERVICE_RUNTIME_DIR": str(cluster.root), "KVSERVICE_SERVICE": cluster.service}
    process = subprocess.Popen(
        [*COMMAND, *options], env={**os.environ, **own, **variables}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def ask(url: str, token: str, context: ssl.SSLContext | None = None) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20, context=context) as response:
        return json.load(response)


def first_page(url: str, token: str, context: ssl.SSLContext | None = None) -> Any:
    request = urllib.request.Request(f"{url}api/events", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20, context=context) as response:
        for line in response:
            told = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
            if told.get("page"):
                return told["page"]
    return None


def page_of(url: str, token: str, *, nodes: list[str]) -> Any:
    """The page, if it shows these nodes: a shard answers before the lookup partitions have heard of it."""
    page = first_page(url, token)
    return page if [row["node_id"] for row in page["nodes"]] == nodes else None


async def test_the_printed_url_shows_the_service(cluster: LocalCluster) -> None:
    engine = await attached(cluster.socket("n0"), spec())
    await engine.store(chain(1, 4))
    await engine.read_all(chain(1, 6), request_id="cmpl-1")
    with console(cluster) as (process, said):
        url, token = re.search(r"(http://127\.0\.0\.1:\d+/)#token=(\S+)$", said).groups()  # type: ignore[union-attr]
        assert process.stdout is not None
        told = re.sub(rf"{cluster.service}|:\d+|{token}", "", said) + process.stdout.readline()
        shown = re.search(r"\$ kvservice console\n((?:.+\n){2})", (ROOT / "docs/howto/console.md").read_text())
        assert shown and re.sub(r"default|:\d+|(?<=token=)\S+", "", shown[1]) == told, "the page shows what is printed"
        page = eventually(lambda: page_of(url, token, nodes=["n0", "n1"]), "both nodes to be known")
        assert {row["state"] for row in page["nodes"]} == {"ok"}
        assert page["models"][0]["model"] == "test-model"
        assert page["slowest"][0]["request_id"] == "cmpl-1"
        listed = ask(f"{url}api/blocks?node=n0&state=sealed", token)
        assert (len(listed["blocks"]), listed["complete"]) == (4, True)
        assert ask(f"{url}api/blocks?node=n1", token)["blocks"] == []
        explained = ask(f"{url}api/explain?request=cmpl", token)["requests"][0]
        assert explained["blocks"] == {"engine": 0, "local": 4, "fetched": 0, "missed": 2}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    await engine.pool.close()
    engine.let_go()


def test_a_token_of_a_file_is_asked_for_and_not_printed(cluster: LocalCluster, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-that-nobody-can-guess\n")
    with console(cluster, "--token-file", str(token)) as (_, said):
        assert "guess" not in said
        url = re.search(r"http\S+", said)[0]  # type: ignore[index]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            first_page(url, "another-token-that-is-wrong")
        assert first_page(url, token.read_text().strip())["service"] == cluster.service


def test_other_machines_come_over_tls_only(cluster: LocalCluster, tmp_path: Path) -> None:
    folder = certificates.write(tmp_path / "tls")
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.check_hostname = False  # the certificate has the name of the service
    files = ("--certificate", str(folder / "tls.crt"), "--key", str(folder / "tls.key"))
    with console(cluster, "--host", "0.0.0.0", *files) as (_, said):
        port, token = re.search(r"https://.*:(\d+)/#token=(\S+)$", said).groups()  # type: ignore[union-attr]
        assert first_page(f"https://127.0.0.1:{port}/", token, context)["service"] == cluster.service
    process = subprocess.run([*COMMAND, "--host", "0.0.0.0"], env=environment(cluster), capture_output=True, text=True)
    assert process.returncode == 2 and "--certificate" in process.stderr


def test_without_a_service_the_console_says_what_to_do(cluster: LocalCluster, tmp_path: Path) -> None:
    nowhere = {**environment(cluster), "KVSERVICE_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.run([*COMMAND], env=nowhere, capture_output=True, text=True, timeout=60)
    assert process.returncode == 3 and "kvservice up" in process.stderr


def environment(cluster: LocalCluster) -> dict[str, str]:
    return {**os.environ, "KVSERVICE_RUNTIME_DIR": str(cluster.root), "KVSERVICE_SERVICE": cluster.service}
