"""One contract, every copier that runs on a CPU: views, runs, and the copy worker. CUDA's: tests/stand_in_driver."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvservice.connector.options import CopierChoice
from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import Copier, HostCopier, InlineCopier
from kvservice.connector.worker.remote_copier import RemoteCopier, copier_for
from kvservice.connector.worker.shared_kv import SharedKV
from kvservice.copying.device import HostDevice
from kvservice.copying.message import Direction
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.core.segment.digest import digest_payload
from kvservice.discovery import node_directory
from kvservice.memory.segment import Segment
from kvservice.testing.copier_contract import (
    CACHE_BYTES,
    ENGINE_ID,
    GEOMETRY,
    HEADS,
    KEYS,
    LAYOUT,
    SLOTS,
    CopierBench,
    CopierContract,
    kv_layers,
)
from kvservice.testing.eventually import eventually
from kvservice.testing.unique import unique_name
from kvservice.units import NodeId


@contextmanager
def benched(
    layers: list[torch.Tensor], make: Callable[[BlockCopier], Copier], directory: str = ""
) -> Iterator[CopierBench]:
    path = Path(f"/dev/shm/kvservice-contract{unique_name()}-n")
    segment = Segment.create(path, GEOMETRY, "n")
    segment.assign_slab(0, LAYOUT.payload_bytes)
    pool = PoolInfo(str(path), GEOMETRY, segment.epoch, LAYOUT, ENGINE_ID, directory)
    blocks = BlockCopier(layers, range(HEADS))
    copier = make(blocks)
    copier.adopt(blocks.bind(segment.buffer, LAYOUT), pool)
    yield CopierBench(copier, layers, segment, pool)
    copier.release()
    copier.close()
    blocks.unbind()
    segment.close()
    segment.unlink()


class TestInline(CopierContract):
    @pytest.fixture
    def bench(self) -> Iterator[CopierBench]:
        with benched(kv_layers(torch.zeros(CACHE_BYTES, dtype=torch.int8)), InlineCopier) as made:
            yield made


class TestHost(CopierContract):
    @pytest.fixture
    def bench(self) -> Iterator[CopierBench]:
        with benched(kv_layers(torch.zeros(CACHE_BYTES, dtype=torch.int8)), HostCopier) as made:
            assert isinstance(made.copier, HostCopier) and made.copier.region_of(0) is not None, "as runs, not as views"
            yield made

    def test_a_slot_that_is_read_whole_brings_its_digest(self, bench: CopierBench) -> None:
        ref = bench.seal(SLOTS[3], KEYS[3])
        ticket = bench.run(Direction.LOAD, *(CopyEntry(2 * part, ref, KEYS[3], part=part) for part in range(2)))
        assert ticket.digests == {SLOTS[3]: digest_payload(bench.slot(SLOTS[3]), KEYS[3])}


class TestCopyWorker(CopierContract):
    @pytest.fixture
    def bench(self) -> Iterator[CopierBench]:
        with SharedKV() as shared:
            layers = kv_layers(torch.zeros(CACHE_BYTES, dtype=torch.int8))
        with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
            root, node = Path(folder), NodeId("n")
            worker = CopyWorker(CopyWorkerConfig("s", node, root), HostDevice())
            worker.start()

            def remote(blocks: BlockCopier) -> Copier:
                return copier_for(CopierChoice.WORKER, blocks, layers, range(HEADS), shared, lends=True)

            with benched(layers, remote, str(node_directory("s", node, root))) as made:
                assert isinstance(made.copier, RemoteCopier)
                link = made.copier._link
                eventually(lambda: link.is_ready, "the link to the copy worker")
                yield made
            worker.stop()

    def test_copies_run_in_the_worker(self, bench: CopierBench) -> None:
        """Or the rules above would have held for the engine's own copies."""
        bench.fill(0)
        assert bench.copied(Direction.STORE, CopyEntry(0, bench.reserve(SLOTS[0]), KEYS[0]))
        counters = bench.copier.take_counters()
        assert counters["copy_worker_blocks"] == 1 and "copy_in_process_blocks" not in counters
