"""Real vLLM engines of two tenants on one node: a prompt is its tenant's own, as far as it is not public."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.auth.tenants import Public, Tenant, Tenants, dump_tenants, hash_token, new_secret, new_token
from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.vllm.replica import Replica, close_all

pytestmark = pytest.mark.vllm

BLOCK = 32
PRIVATE, SYSTEM = [{"prompt_token_ids": [7 + n * step % 900 for n in range(8 * BLOCK)]} for step in (1, 7)]
SHARED = {"kvservice": {"version": 1, "public_tokens": 4 * BLOCK}}


@pytest.fixture(scope="module")
def engines(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, Replica]]:
    folder = tmp_path_factory.mktemp("tenants")
    rows = []
    for name, right in (("a", Public.PUBLISH), ("b", Public.READ)):
        token = new_token()
        (folder / name).write_text(token)
        rows.append(Tenant(name, (hash_token(token),), new_secret(), public=right))
    (folder / "tenants.json").write_text(dump_tenants(Tenants(rows, new_secret())))
    variables = {"KVSERVICE_TENANTS_FILE": str(folder / "tenants.json")}
    with LocalCluster(1, 1, pool_bytes=128 * MiB, transport="shm", environment=variables) as cluster:
        started = [
            Replica(
                shallow_model,
                {"mode": "service", "socket": cluster.socket("n0"), "token_file": str(folder / name)},
                folder / f"{name}.log",
                max_model_len=1024,
            )
            for name in ("a", "b")
        ]
        try:
            yield started[0].ready(), started[1].ready()
        finally:
            close_all(started)


def ask(engine: Replica, prompt: object, params: object = None) -> tuple[list[int], int]:
    """(tokens, blocks that came from the pool)."""
    engine.reset()  # its own cache
    before = engine.counters()["load_blocks"]
    engine.send(prompts=[prompt], params=[params], max_tokens=8)
    answer = engine.first_answer()
    return answer["token_ids"], engine.counters()["load_blocks"] - before


def test_a_prompt_is_nobody_elses(engines: tuple[Replica, Replica]) -> None:
    a, b = engines
    tokens, loaded = ask(a, PRIVATE)
    assert loaded == 0
    assert ask(a, PRIVATE) == (tokens, 8)
    assert ask(b, PRIVATE) == (tokens, 0), "an engine of another tenant found it"
    assert ask(b, PRIVATE) == (tokens, 8)


def test_a_public_beginning_is_shared_and_nothing_more(engines: tuple[Replica, Replica]) -> None:
    a, b = engines
    tokens, loaded = ask(a, SYSTEM, SHARED)
    assert loaded == 0
    stored = b.counters()["stored_blocks"]
    assert ask(b, SYSTEM, SHARED) == (tokens, 4)
    assert ask(b, SYSTEM, SHARED) == (tokens, 8)
    assert b.counters()["stored_blocks"] == stored + 4
    assert ask(b, SYSTEM) == (tokens, 0)
