"""Objects of LMCache on two nodes, as our adapter keeps them: what another node finds, and a restart of the shard."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvservice.api.layout import Array
from kvservice.api.pool_thread import PoolThread
from kvservice.connector.lmcache.names import ObjectLayout
from kvservice.connector.lmcache.objects import PooledObjects
from kvservice.connector.lmcache.options import AdapterOptions
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from tests.unit.connector.lmcache.test_names import Key
from tests.unit.connector.lmcache.test_objects import lent

pytestmark = pytest.mark.slow
LAYOUT = ObjectLayout.of([(2, 3, 64, 8)], [torch.bfloat16], "KV_2LTD")


class Server:
    """The objects of one LMCache server."""

    def __init__(self, cluster: LocalCluster, node: str, **others: object) -> None:
        options = AdapterOptions.parse({"weights_version": "v1", "socket": cluster.socket(node), **others})
        self.thread = PoolThread(options)
        self.objects = PooledObjects(options, self.thread, "x86")

    def store(self, keys: list[Key], arrays: list[Array]) -> list[bool]:
        return self.thread.loop.wait(self.objects.store(keys, [LAYOUT] * len(keys), lent(arrays)))

    def lock(self, keys: list[Key]) -> int:
        return self.thread.loop.wait(self.objects.lock(keys, {0: LAYOUT})).count(True)

    def load(self, keys: list[Key]) -> list[Array]:
        arrays = [np.zeros(LAYOUT.size_bytes, np.uint8) for _ in keys]
        loaded = self.thread.loop.wait(self.objects.load(keys, [LAYOUT] * len(keys), lent(arrays)))
        return [array for array, one in zip(arrays, loaded, strict=True) if one]

    def unlock(self, keys: list[Key]) -> None:
        self.thread.loop.wait(self.objects.unlock(keys))

    def close(self) -> None:
        self.thread.loop.wait(self.objects.close())
        self.thread.end()


@contextmanager
def servers(cluster: LocalCluster, **options: object) -> Iterator[list[Server]]:
    made = [Server(cluster, node, **options) for node in cluster.nodes]
    try:
        yield made
    finally:
        for one in made:
            one.close()
        books = [cluster.accounting(node) for node in cluster.nodes]
        assert all(book.balanced and not book.leases for book in books)


def chunks(count: int) -> tuple[list[Key], list[Array]]:
    prompt = os.urandom(8)
    arrays = [np.frombuffer(os.urandom(LAYOUT.size_bytes), np.uint8) for _ in range(count)]
    return [Key(prompt + bytes([number])) for number in range(count)], arrays


def test_another_node_finds_a_prompt_and_what_was_generated() -> None:
    """What is generated is stored before any lookup says where in a prompt it is, so the directory knows it by itself
    only: about half of it at another partition than the prompt. A mirror would hide that."""
    with LocalCluster(nodes=2, lookup_partitions=2, mirror_bytes=0) as cluster, servers(cluster) as (first, second):
        keys, arrays = chunks(14)
        assert first.lock(keys[:4]) == 0
        assert all(first.store(keys[:4], arrays[:4]))
        for key, array in zip(keys[4:], arrays[4:], strict=True):
            assert first.store([key], [array]) == [True]
        cluster.wait_until_announced("n0")
        assert second.lock([*keys, Key(b"not stored")]) == len(keys)
        assert cluster.stats("n1").counters["fetched_blocks"] == len(keys)
        loaded = second.load(keys)
        assert len(loaded) == len(keys) and all(map(np.array_equal, loaded, arrays))
        second.unlock(keys)
        assert first.lock(keys) == len(keys)
        first.unlock(keys)


def test_a_shard_that_comes_back_is_used_again() -> None:
    with LocalCluster(nodes=1, keep_segment=False) as cluster, servers(cluster) as (server,):
        keys, arrays = chunks(3)
        server.store(keys, arrays)
        assert server.lock(keys) == 3
        cluster.kill("n0", signal.SIGKILL)
        eventually(lambda: not server.objects.is_attached, "the shard's end is noticed")
        assert server.load(keys) == [] and server.lock(keys) == 0
        server.unlock(keys)
        cluster.start_shard("n0")
        eventually(lambda: server.objects.is_attached, "it is attached again", 30)
        more, others = chunks(3)
        assert all(server.store(more, others)) and server.lock(more) == 3
        assert all(map(np.array_equal, server.load(more), others))
        server.unlock(more)


def test_a_shard_that_hangs_delays_one_lookup_and_not_all() -> None:
    with LocalCluster(nodes=1) as cluster, servers(cluster, fetch_timeout_seconds=2.0) as (server,):
        keys, arrays = chunks(3)
        server.store(keys, arrays)
        assert server.lock(keys) == 3
        server.unlock(keys)
        cluster.kill("n0", signal.SIGSTOP)
        began = time.monotonic()
        assert server.lock(keys) == 0
        waited = time.monotonic() - began
        assert waited >= 2.0
        began = time.monotonic()
        assert [server.lock(keys) for _ in range(10)] == [0] * 10
        assert time.monotonic() - began < waited / 2
        assert server.objects.counters["lookups_spared"] == 10
        cluster.kill("n0", signal.SIGCONT)
        eventually(lambda: server.lock(keys) == 3, "the shard is asked again", 30)
        server.unlock(keys)
